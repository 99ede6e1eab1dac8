"""The exposures that wait for their outcomes: their index, in native code, and their rows.

`OpenExposures` calls the core of the join (``io/join``) through ctypes. `ExposureRows` holds the columns of
the rows, in memory up to a bound and in files beyond it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.core.errors import GmetaError
from gmeta.core.files import explain_write_errors
from gmeta.core.native import FunctionTypes, load_functions

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

POSITIVE = 3
"""The status of an exposure whose row is released; 0 to 2 are open, negative and thinned."""


class Decided(NamedTuple):
    """What rows of the log decide: examples, as numbers of rows, and the rows that are released."""

    rows: Ints
    labels: Floats
    weights: Floats
    released: Ints


@dataclass(frozen=True)
class NativeCounts:
    """Sizes and counters; those of the same names in `JoinCounts` are described there."""

    known: int
    open: int
    waiting: int
    index_bytes: int
    next_row: int
    exposures: int
    outcomes: int
    positives: int
    negatives: int
    thinned: int
    corrections: int
    late_exposures: int
    repeated_exposures: int
    repeated_outcomes: int
    unmatched_outcomes: int


@dataclass(frozen=True)
class JoinCounts:
    """What a `LabelJoin` has counted since it was made or restored.

    Attributes:
      exposures: Exposures, with late and repeated ones.
      outcomes: Outcomes.
      positives: Exposures that got their outcome, in time or by a correction.
      negatives: Negatives that were emitted with weight 1.
      thinned: Negatives that sampling left out.
      corrections: Closed exposures that got their outcome.
      late_exposures: Exposures that arrived after their deadline; a larger ``lateness`` has fewer.
      repeated_exposures: Dropped exposures whose key was known.
      repeated_outcomes: Dropped outcomes of exposures that had one.
      unmatched_outcomes: Dropped outcomes that belong to no exposure in the log: they are before it or too
        long after it, or none arrived while they waited.
      bad: Rows skipped because of a null key, or a label that is null or not finite.
      known: Exposures that are known now: open ones, and those that could still be corrected or repeated.
      open: Exposures that are open now.
      waiting: Outcomes that wait for their exposure now.
      index_bytes: Bytes of the index, in memory.
      memory_bytes: Bytes of the rows in memory.
      spilled_bytes: Bytes of the rows in files.
    """

    exposures: int
    outcomes: int
    positives: int
    negatives: int
    thinned: int
    corrections: int
    late_exposures: int
    repeated_exposures: int
    repeated_outcomes: int
    unmatched_outcomes: int
    bad: int
    known: int
    open: int
    waiting: int
    index_bytes: int
    memory_bytes: int
    spilled_bytes: int


class OpenExposures:
    """The index of known exposures and waiting outcomes; ``io/join/open_exposures.h`` describes it.

    Args:
      spans: ``within``, ``lateness`` and ``corrections`` in microseconds.
      negatives: The share of negatives that are kept.
    """

    def __init__(self, spans: Sequence[int], negatives: float) -> None:
        library = _library()
        self._handle = library.gmeta_join_new(*spans, negatives)
        if not self._handle:
            raise GmetaError(_NO_MEMORY)
        self._free = weakref.finalize(self, library.gmeta_join_free, self._handle)

    @property
    def counts(self) -> NativeCounts:
        """Sizes and counters."""
        counts = np.zeros(len(NativeCounts.__dataclass_fields__), np.int64)
        self._call("counts", counts)
        return NativeCounts(*counts.tolist())

    def push(
        self,
        keys: Ints,
        times: Ints,
        sides: npt.NDArray[np.uint8],
        parts: npt.NDArray[np.int32],
        fingerprints: npt.NDArray[np.uint64],
        labels: Floats,
    ) -> tuple[npt.NDArray[np.bool_], Decided]:
        """Add rows of the log, with the outcomes' labels.

        Returns:
          Which exposures aren't repetitions, and so get the next numbers; and what the rows decide.
        """
        accepted = np.zeros(len(sides) - len(labels), np.uint8)
        self._call("push", len(keys), keys, times, sides, parts, fingerprints, labels, accepted)
        return accepted.view(np.bool_), self._decided()

    def finish(self) -> Decided:
        """Close and forget all exposures."""
        self._call("finish")
        return self._decided()

    def exposures(self) -> list[Any]:
        """Return fingerprint, time, part and status of all known exposures, in order of arrival."""
        dtypes = (np.uint64, np.int64, np.int64, np.int32, np.uint8)
        columns = [np.empty(self.counts.known, dtype) for dtype in dtypes]
        self._call("exposures", *columns)
        order = np.argsort(columns.pop(2))
        return [column[order] for column in columns]

    def waiting(self) -> list[Any]:
        """Return fingerprint, time, the key at arrival, label and part of waiting outcomes, by arrival."""
        dtypes = (np.uint64, np.int64, np.int64, np.float32, np.int32)
        columns = [np.empty(self.counts.waiting, dtype) for dtype in dtypes]
        self._call("waiting", *columns)
        return columns

    def restore(self, exposures: Sequence[Any]) -> npt.NDArray[np.bool_]:
        """Add exposures, as `exposures` returns them, under the next numbers; return which keys are new."""
        accepted = np.zeros(len(exposures[0]), np.uint8)
        self._call("restore", len(accepted), *map(np.ascontiguousarray, exposures), accepted)
        return accepted.view(np.bool_)

    def restore_waiting(self, outcomes: Sequence[Any]) -> None:
        """Add outcomes, as `waiting` returns them."""
        self._call("restore_waiting", len(outcomes[0]), *map(np.ascontiguousarray, outcomes))

    def _decided(self) -> Decided:
        sizes, pointers = np.zeros(2, np.int64), [ctypes.c_void_p() for _ in range(4)]
        _library().gmeta_join_output(self._handle, sizes.ctypes.data, *map(ctypes.byref, pointers))
        dtypes = (np.int64, np.float32, np.float32, np.int64)
        counts = (*[int(sizes[0])] * 3, int(sizes[1]))
        return Decided(*map(_copy, pointers, counts, dtypes))

    def _call(self, function: str, *arguments: Any) -> None:
        given = [each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments]
        if getattr(_library(), f"gmeta_join_{function}")(self._handle, *given):
            raise GmetaError(_NO_MEMORY)


def fingerprints_of(batch: pa.RecordBatch, key: Sequence[str]) -> npt.NDArray[np.uint64]:
    """Hash the key columns of each row, which have no nulls and are of a `kind_of_key`."""
    fingerprints = np.zeros(batch.num_rows, np.uint64)
    for name in key if batch.num_rows else ():
        column = batch.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pa.types.is_integer(column.type):
            words = np.ascontiguousarray(column.to_numpy().astype(np.int64, copy=False))
            _library().gmeta_join_add_words(len(words), words.ctypes.data, fingerprints.ctypes.data)
            continue
        large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
        if not large and not pa.types.is_string(column.type) and not pa.types.is_binary(column.type):
            column, large = column.cast(pa.large_binary()), True
        _, offsets, texts = column.buffers()
        start = offsets.address + column.offset * (8 if large else 4)
        where = 0 if texts is None else texts.address
        _library().gmeta_join_add_texts(len(column), large, start, where, fingerprints.ctypes.data)
    return fingerprints


def kind_of_key(dtype: pa.DataType) -> str | None:
    """Return ``"integers"`` or ``"texts"``, or None for types of which values can't be keys."""
    if pa.types.is_dictionary(dtype):
        dtype = dtype.value_type
    if pa.types.is_integer(dtype):
        return "integers"
    texts = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return "texts" if str(dtype) in texts else None


def _copy(pointer: ctypes.c_void_p, count: int, dtype: Any) -> Any:
    """Return a copy of a native array."""
    if not count:
        return np.empty(0, dtype)
    return np.frombuffer(ctypes.string_at(pointer, count * np.dtype(dtype).itemsize), dtype)


_NO_MEMORY = "LabelJoin: out of memory: restore a saved state on more ranks"
_POINTER, _NUMBER, _FAULT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_SIGNATURES: FunctionTypes = {
    "add_words": (None, [_NUMBER, _POINTER, _POINTER]),
    "add_texts": (None, [_NUMBER, _FAULT, _POINTER, _POINTER, _POINTER]),
    "new": (_POINTER, [_NUMBER, _NUMBER, _NUMBER, ctypes.c_double]),
    "free": (None, [_POINTER]),
    "push": (_FAULT, [_POINTER, _NUMBER, *([_POINTER] * 7)]),
    "finish": (_FAULT, [_POINTER]),
    "output": (None, [_POINTER] * 6),
    "counts": (None, [_POINTER] * 2),
    "exposures": (None, [_POINTER] * 6),
    "waiting": (None, [_POINTER] * 6),
    "restore": (_FAULT, [_POINTER, _NUMBER, *([_POINTER] * 5)]),
    "restore_waiting": (_FAULT, [_POINTER, _NUMBER, *([_POINTER] * 5)]),
}


@functools.cache
def _library() -> ctypes.CDLL:
    return load_functions("records", "gmeta_join_", _SIGNATURES)


_LARGEST = 4 << 20  # bytes of a segment; small segments are merged up to it


class ExposureRows:
    """Numbered rows of one schema, which are taken in any order and released one by one.

    Rows lie in segments, in ascending order of their numbers. A segment in a file is mapped into memory: the
    pages that `take` touches are read, and the system drops them again when it needs memory. The file's name
    is removed as soon as it is mapped, so the file disappears with its last row, and with this process,
    however that ends. A segment of which three quarters are released is compacted.

    Args:
      memory: Maximum bytes of the rows' columns that stay in memory; the largest segments go to files first.
      folder: The folder of the files, which should be on a disk; None: the system's for temporary files.
    """

    def __init__(self, memory: int, folder: Path | None) -> None:
        self._memory = memory
        self._folder = Path(tempfile.gettempdir()) if folder is None else folder
        self._largest = min(_LARGEST, max(1, memory // 4))
        self._segments: list[_Segment] = []

    @property
    def memory_bytes(self) -> int:
        """Bytes of the columns in memory."""
        return sum(segment.bytes for segment in self._segments if not segment.in_file)

    @property
    def index_bytes(self) -> int:
        """Bytes of the rows' numbers, in memory."""
        return sum(segment.ids.nbytes + segment.alive.nbytes for segment in self._segments)

    @property
    def spilled_bytes(self) -> int:
        """Bytes of the columns in files."""
        return sum(segment.bytes for segment in self._segments if segment.in_file)

    def add(self, ids: Ints, batch: pa.RecordBatch, rows: Ints) -> None:
        """Add copies of some rows of a batch.

        Args:
          ids: (N,) their numbers, ascending, and larger than all before.
          batch: The batch, with the columns of those before.
          rows: (N,) the rows' places in the batch.

        Raises:
          GmetaError: A file can't be written, such as on a full disk.
        """
        most = max(1, batch.num_rows * self._largest // max(1, batch.nbytes))
        for begin in range(0, len(ids), most):
            own = ids[begin : begin + most].copy()
            self._segments.append(_Segment.of(own, batch.take(pa.array(rows[begin : begin + most]))))
            self._merge(len(self._segments) - 1)
        self._spill()

    def take(self, ids: Ints) -> pa.RecordBatch:
        """Return rows in the order of ``ids``, at least one; a number may occur repeatedly."""
        pieces, order = [], []
        for segment, positions, places in self._find(ids):
            pieces.append(segment.batch.take(pa.array(places)))
            order.append(positions)
        taken = _concat(pieces)
        back = np.concatenate(order)
        if np.all(back[1:] > back[:-1]):
            return taken
        inverse = np.empty(len(back), np.int64)
        inverse[back] = np.arange(len(back))
        return taken.take(pa.array(inverse))

    def release(self, ids: Ints) -> None:
        """Drop rows that won't be taken again."""
        sparse = []
        for segment, _, places in self._find(ids):
            segment.alive[places] = False
            segment.live -= len(places)
            if 0 < 4 * segment.live <= len(segment.ids):
                sparse.append(segment)
        self._segments = [segment for segment in self._segments if segment.live > 0]
        for segment in sparse:
            at = self._segments.index(segment)
            self._segments[at] = segment.compact()
            self._merge(at)
        self._spill()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows that aren't released, in ascending order."""
        for segment in self._segments:
            yield segment.compact().batch

    def _find(self, ids: Ints) -> Iterator[tuple[_Segment, Ints, Ints]]:
        """Yield segments with the positions in ``ids`` that belong to them, and the rows' places in them."""
        if not len(ids):
            return
        firsts = np.array([segment.ids[0] for segment in self._segments])
        of = np.searchsorted(firsts, ids, side="right") - 1
        order = np.argsort(of.astype(np.uint16) if len(firsts) < 2**16 else of, kind="stable")
        counts = np.bincount(of, minlength=len(firsts))
        ends = np.cumsum(counts)
        for number in np.flatnonzero(counts):
            positions = order[ends[number] - counts[number] : ends[number]]
            segment = self._segments[number]
            yield segment, positions, segment.places(ids[positions])

    def _merge(self, at: int) -> None:
        """Merge a segment with those before it while they aren't much larger: few copies of each row."""
        while at > 0:
            one, other = self._segments[at - 1 : at + 1]
            if one.bytes >= 2 * max(1, other.bytes) or one.bytes + other.bytes > self._largest:
                return
            batch = _concat([one.compact().batch, other.compact().batch])
            ids = np.concatenate([one.ids[one.alive], other.ids[other.alive]])
            self._segments[at - 1 : at + 1] = [_Segment.of(ids, batch)]
            at -= 1

    def _spill(self) -> None:
        kept = self.memory_bytes
        while kept > self._memory:
            here = [number for number, segment in enumerate(self._segments) if not segment.in_file]
            largest = max(here, key=lambda number: self._segments[number].bytes)
            kept -= self._segments[largest].bytes
            self._segments[largest] = self._segments[largest].compact().to_file(self._folder)


@dataclass(eq=False)
class _Segment:
    ids: Ints  # ascending
    alive: npt.NDArray[np.bool_]
    live: int
    batch: pa.RecordBatch
    bytes: int
    in_file: bool = False

    @classmethod
    def of(cls, ids: Ints, batch: pa.RecordBatch) -> _Segment:
        return cls(ids, np.ones(len(ids), np.bool_), len(ids), batch, batch.nbytes)

    def places(self, ids: Ints) -> Ints:
        """Return the places of rows by their numbers."""
        first, last = self.ids[0], self.ids[-1]
        return ids - first if last - first == len(self.ids) - 1 else np.searchsorted(self.ids, ids)

    def compact(self) -> _Segment:
        """Return a segment without the released rows."""
        if self.live == len(self.ids):
            return self
        return _Segment.of(self.ids[self.alive], self.batch.take(pa.array(np.flatnonzero(self.alive))))

    def to_file(self, folder: Path) -> _Segment:
        """Return this segment in a file without a name."""
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, path = tempfile.mkstemp(prefix="gmeta-exposures-", suffix=".arrow", dir=folder)
            os.close(descriptor)
        try:
            with explain_write_errors(Path(path)):
                with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, self.batch.schema) as writer:
                    writer.write_batch(self.batch)
                with pa.memory_map(path) as source:  # the mapping lives as long as the batch
                    batch = pa.ipc.open_file(source).get_batch(0)
        finally:
            Path(path).unlink()
        return _Segment(self.ids, self.alive, self.live, batch, self.bytes, in_file=True)


def _concat(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    columns = zip(*(batch.columns for batch in batches), strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.concat_arrays(column) for column in columns], schema=batches[0].schema
    )

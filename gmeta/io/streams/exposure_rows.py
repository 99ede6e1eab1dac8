"""The rows of exposures that wait for their outcomes, in memory up to a bound and in files beyond it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.core.files import explain_write_errors

Ints = npt.NDArray[np.int64]

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

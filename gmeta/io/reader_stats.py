"""Counters of the data that a reader read, skipped or found bad."""

from __future__ import annotations

import ctypes
import functools
import re
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from gmeta.core.errors import DataError
from gmeta.core.native import library_path, load_op_library

_MESSAGES = 100  # the number of messages kept, as in the native counters


@functools.cache
def _library() -> ctypes.CDLL:
    load_op_library("io")  # checks the build, and resolves TensorFlow's symbols
    library = ctypes.CDLL(str(library_path("io")))
    library.gmeta_reader_stats_new.restype = ctypes.c_int64
    library.gmeta_reader_stats_free.argtypes = [ctypes.c_int64]
    library.gmeta_reader_stats_reset.argtypes = [ctypes.c_int64]
    library.gmeta_reader_stats_fault.argtypes = [ctypes.c_int64]
    library.gmeta_reader_stats_fault.restype = ctypes.c_char_p
    library.gmeta_reader_stats_read.argtypes = [
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
    ]
    library.gmeta_reader_stats_read.restype = ctypes.c_int64
    return library


@functools.cache
def _reasons() -> tuple[str, ...]:
    names: list[str] = []
    while (name := _library().gmeta_reader_stats_fault(len(names) + 1)) is not None:
        names.append(name.decode())
    return tuple(names)


@dataclass(frozen=True)
class ReaderCounts:
    """Values read from `ReaderStats`.

    Attributes:
      records: Records returned in sound groups.
      groups: Sound groups.
      skipped: Skipped records. Records after a truncation or a broken length, or in a shard with a bad index,
        aren't counted, because their number is unknown.
      bad: Reason -> how often it occurred, for reasons that occurred. For records: ``truncated``,
        ``length_crc``, ``data_crc``, ``not_example``, ``missing_column``, ``wrong_type``, ``not_scalar``,
        ``not_columnar``, ``newer_layout``, ``wrong_key``. For files: ``open``, ``read``. For groups:
        ``not_contiguous``, ``too_small``, ``index_mismatch``, and ``one_sided``, a group with only support
        rows or only query rows (`gmeta.io.tasks`). For a shard's index: ``bad_index``. Also ``unexposed``,
        which isn't an error: a user without exposures (`gmeta.io.sequences`). For histories
        (`gmeta.io.late`): ``deleted``, also not an error: an example of a user whose events were deleted;
        ``damaged_history``, which is returned empty; and ``other_history``, which differs from the ranker's,
        and whose records are skipped.
      messages: The first hundred messages about bad data, each "FILE at byte OFFSET: what; what to do".
      histories: Histories that were rebuilt from a store.
      history_reads: Reads of the store's files for these histories, without those of indexes.
      history_bytes: Bytes returned by these reads.
    """

    records: int = 0
    groups: int = 0
    skipped: int = 0
    bad: Mapping[str, int] = field(default_factory=dict)
    messages: tuple[str, ...] = ()
    histories: int = 0
    history_reads: int = 0
    history_bytes: int = 0


class ReaderStats:
    """Counters that datasets update while they are read.

    Pass one as ``stats=`` to `ReadOptions`, and call `read` at any time: during an epoch, from a callback, or
    after it. The counters add up over all iterations since the last `reset`. A buffer between the reader and
    the training loop (``prefetch``, shuffling) makes the counters run ahead of the loop.

    Example:
      >>> stats = ReaderStats()
      >>> for batch in tasks("data/warm", options=ReadOptions(on_bad="skip", stats=stats)):
      ...     train(batch)
      >>> stats.read().bad
      {'data_crc': 1}
    """

    def __init__(self) -> None:
        self._id: int = _library().gmeta_reader_stats_new()
        self._lock = threading.Lock()
        self._unsplit = ReaderCounts()
        self._finalizer = weakref.finalize(self, _library().gmeta_reader_stats_free, self._id)

    @property
    def id(self) -> int:
        """The number by which the native reader identifies the counters; never 0."""
        return self._id

    def read(self) -> ReaderCounts:
        """Return the counters' current values."""
        counts = (ctypes.c_int64 * (6 + len(_reasons())))()
        size = 0
        while True:  # messages may be added between asking for their size and reading them
            text = ctypes.create_string_buffer(size)
            wanted = _library().gmeta_reader_stats_read(self._id, counts, text, size)
            if wanted <= size:
                break
            size = wanted
        records, groups, skipped, histories, reads, read_bytes, *bad = counts
        reasons = {reason: count for reason, count in zip(_reasons(), bad, strict=True) if count}
        messages = tuple(text.raw[:wanted].decode(errors="replace").splitlines())
        with self._lock:
            later = self._unsplit
        return ReaderCounts(
            records - later.records,
            groups - later.groups,
            skipped + later.records,
            {**reasons, **later.bad},
            (*messages, *later.messages)[:_MESSAGES],
            histories,
            reads,
            read_bytes,
        )

    def leave_out(self, reason: str, records: Iterable[int], messages: Iterable[bytes]) -> np.int64:
        """Count as bad those groups that were counted as sound but lack required rows.

        Args:
          reason: The key in ``bad``.
          records: The number of records of each group.
          messages: One line for each group, in UTF-8.

        Returns:
          The number of groups.
        """
        sizes = [int(size) for size in records]
        if not sizes:
            return np.int64(0)
        lines = tuple(text.decode(errors="replace").removeprefix("gmeta: ") for text in messages)
        with self._lock:
            was = self._unsplit
            self._unsplit = ReaderCounts(
                was.records + sum(sizes),
                was.groups + len(sizes),
                bad={**was.bad, reason: was.bad.get(reason, 0) + len(sizes)},
                messages=(*was.messages, *lines)[:_MESSAGES],
            )
        return np.int64(len(sizes))

    def reset(self) -> None:
        """Set everything to zero."""
        _library().gmeta_reader_stats_reset(self._id)
        with self._lock:
            self._unsplit = ReaderCounts()


# Extraction of gmeta's one-line message from the errors that TensorFlow and Keras wrap around it.


# The native reader marks its line (ToStatus in io/group_batch/kernels.h); TensorFlow appends the node and
# the op, on the same line or the next. `tf.debugging.Assert` escapes the line, its end included.
_LINE = re.compile(r"gmeta: (?P<line>[^\n]*?)(?=\s*(?:\\n|\[\[\{\{node|\[Op:|\n|$))")
_PARTS = re.compile(r"(?P<path>.*?)(?: at byte (?P<offset>\d+))?: (?P<message>.*?)(?:; (?P<advice>[^;]*))?$")
_CARDINALITY = re.compile(
    r"Input dataset was expected to contain (\d+) elements but contained (only|at least) (\d+)"
)


def as_data_error(error: BaseException) -> DataError | None:
    """Return the data error inside a ``tf.errors.OpError``, or None if the error is about something else.

    During iteration, and especially in Keras' ``fit``, TensorFlow reports a bad record in a long text that
    includes the graph's node. This function extracts the reader's own line.

    Args:
      error: The error that was raised.

    Returns:
      An error whose text is "FILE at byte OFFSET: what; what to do", with ``path`` and ``offset`` set.

    Example:
      >>> try:
      ...     model.fit(tasks("data/warm"))
      ... except tf.errors.OpError as error:
      ...     raise (as_data_error(error) or error) from error
    """
    text = str(getattr(error, "message", error))
    if found := _LINE.search(text):
        line = _unescape(found["line"]) if text.startswith("\\n", found.end()) else found["line"]
        if parts := _PARTS.match(line):
            offset = parts["offset"]
            return DataError(
                parts["message"],
                path=parts["path"],
                offset=None if offset is None else int(offset),
                advice=parts["advice"],
            )
        return DataError(line)
    if found := _CARDINALITY.search(text):
        held = "fewer" if found[2] == "only" else "more"
        return DataError(
            f"the manifest promises {found[1]} batches, the shards hold {held}",
            advice="prepare the data again with `gmeta prepare`",
        )
    return None


def _unescape(line: str) -> str:
    """Remove C escapes of quotes, and of bytes in octal, from a line."""

    def byte(found: re.Match[bytes]) -> bytes:
        return bytes([int(found[1], 8)]) if found[1].isdigit() else found[1]

    return re.sub(rb"\\([0-3][0-7]{2}|.)", byte, line.encode()).decode(errors="replace")


@contextmanager
def data_errors() -> Iterator[None]:
    """Raise `DataError` instead of TensorFlow's error when a dataset finds bad data.

    Raises:
      DataError: A bad record, file or group was read inside the ``with`` block.

    Example:
      >>> with data_errors():
      ...     for batch in tasks("data/warm"):
      ...         ...
    """
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as error:
        found = as_data_error(error)
        if found is None:
            raise
        raise found from error

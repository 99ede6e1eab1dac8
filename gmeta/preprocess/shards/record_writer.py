"""The writer of rows to a TFRecord file, with a ``tf.train.Example`` per row or a record per group."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import sync, write_atomically
from gmeta.core.group_index import ENTRY, LAYOUTS, Codec, GroupIndex, Layout, checksum_of, index_path
from gmeta.core.schema import Column, Schema
from gmeta.preprocess.shards.record_encoder import GroupRuns, RecordEncoder, refuse_large

# The log of a shard's groups, kept while the shard is written.


class SplitGroupError(ValueError):
    """The error for a group that was written before and begins again at ``row``."""

    def __init__(self, row: int, key: tuple[int, int]) -> None:
        self.row, self.key = row, key
        super().__init__(row, key)


class GroupLog:
    """A log that cuts rows into groups, each a run of one key, and refuses a key that occurs again.

    Args:
      may_continue: Whether the first rows of the next call may continue the last group.
    """

    def __init__(self, *, may_continue: bool) -> None:
        self._may_continue = may_continue
        self._seen: set[tuple[int, int]] = set()
        self._last: tuple[int, int] | None = None
        self._parts: list[NDArray[Any]] = []
        self._bytes = self._rows = 0

    def runs(self, task: NDArray[np.int64], batch: NDArray[np.int64]) -> GroupRuns:
        """Cut rows with these keys, (N,) each, into groups, without adding the groups to the log.

        Raises:
          SplitGroupError: A key is in the log already, or its rows aren't consecutive.
        """
        changes = np.flatnonzero((task[1:] != task[:-1]) | (batch[1:] != batch[:-1])) + 1
        starts = np.concatenate([[0], changes]) if len(task) else changes
        keys = list(zip(task[starts].tolist(), batch[starts].tolist(), strict=True))
        continues = self._may_continue and bool(keys) and keys[0] == self._last
        fresh = keys[continues:]
        if len(set(fresh)) < len(fresh) or not self._seen.isdisjoint(fresh):
            seen = set(self._seen)
            for start, key in zip(starts[continues:].tolist(), fresh, strict=True):
                if key in seen:
                    raise SplitGroupError(start, key)
                seen.add(key)
        sizes, crcs = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.uint32)
        if continues:
            sizes[0] = self._bytes - self._parts[-1]["offset"][-1]
            crcs[0] = self._parts[-1]["crc"][-1]
        ends = np.append(starts[1:], len(task)).astype(np.int64) if len(task) else starts
        return GroupRuns(ends, sizes, crcs, keys, continues)

    def add(self, runs: GroupRuns) -> None:
        """Add groups that have been written to the log."""
        if not runs.keys or runs.sizes is None:
            return
        rows = np.diff(runs.ends, prepend=0)
        if runs.continues:
            last = self._parts[-1]
            self._bytes, self._rows = int(last["offset"][-1]), int(last["first_row"][-1])
            rows[0] += last["rows"][-1]
            self._parts[-1] = last[:-1]
        entries = np.zeros(len(rows), ENTRY)
        entries["offset"] = self._bytes + np.cumsum(runs.sizes) - runs.sizes
        entries["first_row"] = self._rows + np.cumsum(rows) - rows
        entries["rows"], entries["crc"] = rows, runs.crcs
        entries["task"], entries["batch_id"] = np.array(runs.keys, np.int64).T
        self._parts.append(entries)
        self._bytes += int(runs.sizes.sum())
        self._rows += int(rows.sum())
        self._seen.update(runs.keys)
        self._last = runs.keys[-1]

    @property
    def groups(self) -> int:
        """The number of groups in the log."""
        return sum(len(part) for part in self._parts)

    def index(self, layout: Layout) -> GroupIndex:
        """Build the index of the groups in the log."""
        return GroupIndex(layout, self._bytes, np.concatenate([np.zeros(0, ENTRY), *self._parts]))


# The file of a shard, which appears under its name whole, with its index beside it, or not at all.


class ShardFile:
    """A file to which bytes are only appended.

    Bytes go to ``<path>.<process id>.tmp``; `close` flushes that file to the disk and renames it. `discard`
    removes it, and an earlier file at ``path`` stays.

    Args:
      path: The file to write. Its folder must exist.

    Attributes:
      bytes: The number of bytes written so far.
      index: The checksum of the index, once it is written.

    Raises:
      OSError: The file can't be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self.index: int | None = None
        self.closed = True
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self._temporary_index = path.with_name(f"{index_path(path).name}.{os.getpid()}.tmp")
        # Open it exclusively: two writers of one path would mix their records.
        self._file = self._temporary.open("xb", buffering=0)
        self.closed = False

    def fileno(self) -> int:
        """Return the descriptor of the temporary file."""
        return self._file.fileno()

    def put(self, block: memoryview) -> None:
        """Append bytes.

        Raises:
          OSError: The disk is full; the error has the number of bytes written.
        """
        try:
            while block:
                written = self._file.write(block) or 0
                self.bytes += written
                block = block[written:]
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full, free some space or write elsewhere" if full else error.strerror
            raise OSError(error.errno, f"{reason} (after {self.bytes} bytes)", str(self.path)) from error

    def close(self, index: Callable[[], GroupIndex] | None = None) -> None:
        """Flush to the disk, and give the file and its index their final names. A second call does nothing.

        Args:
          index: Makes the index. None: no index is written, and an earlier one is removed, because it belongs
            to another file.

        Raises:
          OSError: The disk is full; the file is discarded.
        """
        if self.closed:
            return
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            if index is not None:
                data = index().to_bytes()
                write_atomically(self._temporary_index, data)
                self.index = checksum_of(data)
            # Remove the old index first: a crash then never leaves an index beside another shard's file.
            index_path(self.path).unlink(missing_ok=True)
            self._temporary.replace(self.path)
            if index is not None:
                self._temporary_index.replace(index_path(self.path))
        except OSError:
            self.discard()
            raise
        self.closed = True
        sync(self.path.parent)

    def discard(self) -> None:
        """Drop the written bytes, and leave ``path`` unchanged."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)
        self._temporary_index.unlink(missing_ok=True)


Values = npt.ArrayLike | tuple[npt.ArrayLike, npt.ArrayLike]
"""A column's rows: one value per row or, for a list column, ``(values, row_splits)``."""

_BLOCK = 4 << 20  # bytes to encode before they are written


class RecordWriter:
    """A writer of one TFRecord file; the file appears under its name only when it is whole.

    Rows go to ``<path>.<process id>.tmp``; `close` flushes that file to the disk and renames it. On an
    exception in the ``with`` block, or on `discard`, the temporary file is removed, and an earlier file at
    ``path`` stays.

    In the layout ``"example"``, a record is a row: a ``tf.train.Example`` with an ``int64_list`` or a
    ``float_list`` for each column, in the bytes of protobuf's deterministic serialisation. In the layout
    ``"columnar"``, a record is a group, all rows of one task and batch, with an array for each column
    (``io/records/columnar.h``); each call of `write` must bring whole groups. Equal rows make equal files.

    Args:
      path: The file to write. Its folder must exist.
      schema: The columns of every record.
      layout: ``"example"`` or ``"columnar"``.
      codec: ``"zstd"`` compresses each record of the columnar layout that it makes smaller.
      index: Whether to write an index of the groups too (`gmeta.core.group_index`), as ``<path>.gidx``.
        An earlier index at that path is always removed, because it belongs to another file.

    Attributes:
      rows: The number of rows written so far.

    Raises:
      ConfigError: The layout is unknown, or doesn't support the codec.
      OSError: The file can't be created, or the disk is full.
      NativeLibraryError: The native encoder was never built.

    Example:
      >>> schema = Schema((Column("task"), Column("batch_id"), Column("genre", is_list=True)))
      >>> with RecordWriter("warm.tfrecord", schema) as writer:
      ...     writer.write({"task": [7, 7], "batch_id": [0, 0], "genre": ([1, 2, 3], [0, 1, 3])})
      >>> writer.rows
      2
    """

    def __init__(
        self,
        path: str | Path,
        schema: Schema,
        *,
        layout: Layout = "example",
        codec: Codec | None = None,
        index: bool = False,
    ) -> None:
        if layout not in LAYOUTS:
            raise ConfigError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        self.path, self.schema, self.layout, self._index = Path(path), schema, layout, index
        self.rows = 0
        whole = layout == "columnar"
        self._log = GroupLog(may_continue=not whole) if whole or index else None
        self._encoder = RecordEncoder(schema, layout, codec)
        try:
            self._file = ShardFile(self.path)
        except OSError:
            self._encoder.close()
            raise

    @property
    def bytes(self) -> int:
        """The number of bytes written so far, framing included."""
        return self._file.bytes

    @property
    def groups(self) -> int:
        """The number of groups written so far; 0 if groups aren't logged (``"example"`` without an index)."""
        return self._log.groups if self._log is not None else 0

    @property
    def index(self) -> int | None:
        """The checksum of the index, once the writer is closed; None without one."""
        return self._file.index

    def write(self, columns: Mapping[str, Values]) -> None:
        """Append rows.

        Args:
          columns: Column name -> its rows, one entry for every column of the schema. A column with one value
            per row is a 1-D array. A list column is ``(values, row_splits)``; row ``r`` is
            ``values[row_splits[r]:row_splits[r + 1]]``. An int64 column accepts integers up to 64 bits
            signed, a float32 column accepts 16- and 32-bit floats and lists of Python numbers; nothing else
            is cast.

        Raises:
          DataError: A column is missing, unknown, of another type or of another length; a record would have
            more than `record_size.MAX_RECORD` bytes; or, in the columnar layout or with an index, a group was
            written before. The call then writes nothing.
          OSError: The disk is full; the file is discarded.
          ValueError: The writer is closed.
        """
        if self._file.closed:
            raise ValueError(f"{self.path}: the writer is closed; open another one")
        names = [column.name for column in self.schema]
        for wrong, what in ((set(names) - set(columns), "missing"), (set(columns) - set(names), "unknown")):
            if wrong:
                raise self._error(f"{what} column {', '.join(map(repr, sorted(wrong)))}", f"give {names}")
        values, splits, lengths = [], [], {}
        for column in self.schema:
            array, ends = self._take(column, columns[column.name])
            values.append(array)
            splits.append(ends)
            lengths[column.name] = len(array) if ends is None else len(ends) - 1
        if len(set(lengths.values())) != 1:
            raise self._error(f"columns of different lengths: {lengths}", "give every column the same rows")
        rows = lengths[names[0]]
        keys = values[names.index(self.schema.task)], values[names.index(self.schema.batch)]
        runs = self._runs(*keys)
        ends = runs.ends if self.layout == "columnar" else np.arange(1, rows + 1)
        refuse_large(self._encoder, values, splits, ends, keys, self.path)
        try:
            for block in self._encoder.blocks(values, splits, runs, _BLOCK):
                self._file.put(block)
        except BaseException:
            self.discard()
            raise
        if self._log is not None:
            self._log.add(runs)
        self.rows += rows

    def close(self) -> None:
        """Flush the file to the disk, rename it to ``path``, and write its index. A second call does nothing.

        Raises:
          OSError: The disk is full; the file is discarded.
        """
        log = self._log
        self._file.close((lambda: log.index(self.layout)) if self._index and log is not None else None)
        self._encoder.close()

    def discard(self) -> None:
        """Drop the written rows, and leave ``path`` unchanged."""
        self._file.discard()
        self._encoder.close()

    def _runs(self, task: NDArray[np.int64], batch: NDArray[np.int64]) -> GroupRuns:
        if self._log is None:  # groups don't matter
            return GroupRuns(np.full(min(len(task), 1), len(task), np.int64))
        try:
            return self._log.runs(task, batch)
        except SplitGroupError as error:
            raise self._error(
                f"row {error.row} begins the group of task {error.key[0]}, batch {error.key[1]} again",
                "sort the rows by task and batch"
                + (", and give all rows of a group in one call" if self.layout == "columnar" else ""),
            ) from None

    def _take(self, column: Column, given: Any) -> tuple[Any, Any]:
        """Convert a column's values and row splits to contiguous arrays of the native types."""
        splits: Any = None
        if column.is_list:
            if not isinstance(given, tuple) or len(given) != 2:
                raise self._error(
                    f"column {column.name!r} is a list column, got {type(given).__name__}",
                    "give (values, row_splits)",
                )
            given, splits = given[0], np.asarray(given[1])
            if splits.ndim != 1 or len(splits) < 1 or not np.can_cast(splits.dtype, np.int64):
                raise self._error(
                    f"column {column.name!r}: row_splits must be 1-D integers with at least the value 0, "
                    f"got {splits.dtype} of shape {splits.shape}"
                )
            splits = np.ascontiguousarray(splits, np.int64)
        elif isinstance(given, tuple) and len(given) == 2 and np.ndim(given[0]) > 0:
            raise self._error(
                f"column {column.name!r} has one value a record, got (values, row_splits)",
                "give the values, or declare it with is_list=True",
            )
        array = np.asarray(given)
        if array.ndim != 1:
            raise self._error(f"column {column.name!r} must be 1-D, got shape {array.shape}")
        # A Python float can only be a double, so it may be cast; an array of doubles has its type on purpose.
        plain = column.dtype == "float32" and not hasattr(given, "dtype")
        if array.size and not np.can_cast(array.dtype, column.dtype, "same_kind" if plain else "safe"):
            raise self._error(
                f"column {column.name!r} is {column.dtype}, got {array.dtype}",
                f"cast it with .astype({column.dtype!r}) where nothing is lost",
            )
        if splits is not None and (
            splits[0] != 0 or splits[-1] != len(array) or (splits[1:] < splits[:-1]).any()
        ):
            raise self._error(
                f"column {column.name!r}: row_splits must rise from 0 to {len(array)}, the number of values"
            )
        return np.ascontiguousarray(array, column.dtype), splits

    def _error(self, message: str, advice: str | None = None) -> DataError:
        return DataError(message, path=self.path, advice=advice)

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.discard()

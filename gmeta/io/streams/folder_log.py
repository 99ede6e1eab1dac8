"""A folder that grows, as a log: files that appear whole, in the order of their names.

Each folder is one partition. Its files, at any depth, are read in the order of their paths within it, so a
producer gives each new file a name after all earlier ones, such as ``2024-05-01/13-00.parquet``, and moves it
into place when it is complete. Names that begin with ``.`` or ``_``, and those that end with ``.tmp`` or
``.crc``, are ignored. The place in a partition is a file's name and the number of its rows that are read. A
file of which all rows are read may be deleted.

A file that appears before one that is already read is an error, or is skipped and counted, also if it appears
between two runs: a position holds, of each file that is there and read, the hash of its name, 8 bytes.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import tensorflow as tf

from gmeta.core.errors import DataError, first_line
from gmeta.io.streams.records import (
    Columns,
    Format,
    Ints,
    Rows,
    StreamCounts,
    columns_of,
    fit,
    infer_columns,
    parse,
)

_LINES = {".json", ".jsonl", ".ndjson"}
_TFRECORD = {".tfrecord", ".tfrecords"}
_HIDDEN = (".tmp", ".crc", ".inprogress", ".partial")
_AT_ONCE = 8192  # rows
_ALL = 1 << 62  # in place of a number of rows: the whole file


_HASH = 8  # bytes


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=_HASH).digest()


class _Name(NamedTuple):
    """What a file's name gives.

    Attributes:
      ending: The ending, without that of the compression.
      zipped: Whether it is compressed by gzip.
    """

    ending: str
    zipped: bool


def _read_name(path: str) -> _Name:
    name = path.lower()
    zipped = name.endswith(".gz")
    name = name.removesuffix(".gz")
    return _Name(name[name.rfind(".") :] if "." in name.rpartition("/")[2] else "", zipped)


@dataclass(frozen=True)
class FolderLog:
    """Folders or prefixes that grow, each a partition.

    Attributes:
      folders: The folders; TensorFlow's file systems read them, such as ``gs://``.
      latest: Whether a new reader begins after the files that are there, not before them.
    """

    folders: Sequence[str]
    latest: bool = False
    unit = None
    """Files have no times of their own."""

    @property
    def name(self) -> str:
        """The log, for messages."""
        return ", ".join(self.folders)

    def partitions(self) -> Sequence[str]:
        """Return the names of the partitions."""
        return self.folders

    def from_first(self) -> FolderLog:
        """Return the log with new readers that begin at the first file."""
        return replace(self, latest=False)

    def infer(self, form: Format | None) -> dict[str, str] | None:
        """Infer the columns from the first file; None if no folder has a file yet."""
        for folder in self.folders:
            files = list_files(folder)
            if not files:
                continue
            path = f"{folder.rstrip('/')}/{files[0]}"
            if _read_name(path).ending == ".parquet":
                return columns_of(_open_parquet(path).schema_arrow, path)
            return infer_columns(next(_values(path), []), _form_of(path, form), path)
        return None

    def open(
        self, partition: str, place: Any, columns: Columns, form: Format | None, counts: StreamCounts | None
    ) -> FolderReader:
        """Read a partition from a place on; None is its beginning."""
        if place is None and self.latest and (names := list_files(partition)):
            place = [names[-1], _ALL]
        return FolderReader(partition, place, columns, form, counts)


def list_files(folder: str) -> list[str]:
    """Return the paths, within the folder, of its files, in order.

    Raises:
      DataError: There is no such folder.
    """
    root = folder.rstrip("/")
    if not tf.io.gfile.isdir(root):
        raise DataError(
            "no such folder to read a stream from", path=folder, advice="create it, or name another source"
        )
    found = []
    for here, _, names in tf.io.gfile.walk(root):
        within = here.rstrip("/")[len(root) :].strip("/")
        if any(part[0] in "._" for part in within.split("/") if part):
            continue
        for name in names:
            path = f"{within}/{name}" if within else name
            if name[0] not in "._" and not name.endswith(_HIDDEN):
                found.append(path)
    return sorted(found)


class FolderReader:
    """The reader of a partition.

    Args:
      folder: The folder.
      place: [file, rows]; None: the beginning.
      columns: The columns.
      form: The form of records in TFRecord files.
      counts: Counters of skipped rows; None: a bad row is an error.
    """

    def __init__(
        self, folder: str, place: Any, columns: Columns, form: Format | None, counts: StreamCounts | None
    ) -> None:
        self.start, self.at_end = place, False
        self._folder = folder.rstrip("/")
        self._file, done = ("", 0) if place is None else (str(place[0]), int(place[1]))
        self._columns, self._form, self._counts = columns, form, counts
        self._rows = self._read(self._file, done) if self._file and done < _ALL else iter(())
        self._passed: set[str] | None = None  # files up to the current one
        self._seen: bytes | None = None  # those of an earlier reader
        self._waiting: list[str] = []

    @property
    def seen(self) -> bytes | None:
        """The hashes of the files up to the current one; None: not known."""
        return self._seen if self._passed is None else b"".join(map(_hash, sorted(self._passed)))

    @seen.setter
    def seen(self, hashes: bytes | None) -> None:
        self._seen = hashes

    def read(self) -> Rows | None:
        """Return the next rows; None if there is no further file yet.

        Raises:
          DataError: A row is bad, or a file appeared whose name is before one that is already read.
        """
        while (rows := next(self._rows, None)) is None:
            if not self._waiting:
                self._look()
            self.at_end = not self._waiting
            if self.at_end:
                return None
            self._file = self._waiting.pop(0)
            assert self._passed is not None
            self._passed.add(self._file)
            self._rows = self._read(self._file, 0)
        return rows

    def _look(self) -> None:
        names = list_files(self._folder)
        passed = {name for name in names if name <= self._file}
        late = passed - self._passed if self._passed is not None else self._unseen(passed)
        for name in sorted(late):
            why = f"the file appeared after {self._file}, which is already read"
            if self._counts is None:
                raise DataError(
                    f"{why}, so its rows would be lost",
                    path=f"{self._folder}/{name}",
                    advice="rename it, so that its name is after all others, and it is read; give each new "
                    "file such a name: begin it with the time",
                )
            self._counts.skip(f"{self._folder}/{name}: {why}, and isn't read")
            warnings.warn(f"{self._folder}/{name}: {why}: it isn't read", stacklevel=2)
        self._passed = passed
        self._waiting = [name for name in names if name > self._file]

    def _unseen(self, names: set[str]) -> set[str]:
        """Return the files that an earlier reader, which was past them, hasn't seen."""
        if self._seen is None:
            return set()
        known = {self._seen[at : at + _HASH] for at in range(0, len(self._seen), _HASH)}
        return {name for name in names if _hash(name) not in known}

    def _read(self, name: str, done: int) -> Iterator[Rows]:
        """Read a file from row ``done`` on."""
        path = f"{self._folder}/{name}"
        if not tf.io.gfile.exists(path):
            raise DataError(
                f"the file was read up to row {done:,} and is gone",
                path=path,
                advice="restore it, or start again without the checkpoint's position",
            )
        try:
            read = self._read_parquet if _read_name(path).ending == ".parquet" else self._read_values
            parts = ((first, batch, numbers) for first, batch, numbers in read(path, done) if len(numbers))
            part = next(parts, None)
            while part is not None:
                (first, batch, numbers), part = part, next(parts, None)
                yield Rows(batch, None, functools.partial(_place, name, first, numbers, part is None))
        except (OSError, EOFError, pa.ArrowException, tf.errors.OpError) as error:
            raise DataError(
                f"can't be read: {first_line(error)}",
                path=path,
                advice="write files under another name, and rename them when they are complete",
            ) from error

    def _read_parquet(self, path: str, done: int) -> Iterator[tuple[int, pa.RecordBatch, Ints]]:
        file, first = _open_parquet(path), 0
        names = [name for name in self._columns if name in file.schema_arrow.names]
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first + rows <= done:
                first += rows
                continue
            for batch in file.iter_batches(_AT_ONCE, row_groups=[group], columns=names):
                skipped = min(max(done - first, 0), batch.num_rows)
                try:
                    fitted = fit(batch.slice(skipped), self._columns)
                except (ValueError, pa.ArrowException) as error:
                    advice = "name the columns and their types, by columns="
                    raise DataError(first_line(error), path=path, advice=advice) from error
                yield first + skipped, fitted, np.arange(fitted.num_rows)
                first += batch.num_rows

    def _read_values(self, path: str, done: int) -> Iterator[tuple[int, pa.RecordBatch, Ints]]:
        form, first = _form_of(path, self._form), 0
        for values in _values(path):
            skipped = min(max(done - first, 0), len(values))
            first, values = first + skipped, values[skipped:]
            kept = [(number, value) for number, value in enumerate(values) if value.strip()]
            batch, numbers = parse(
                [value for _, value in kept],
                self._columns,
                form,
                functools.partial(_row, path, first, [number for number, _ in kept]),
                self._counts,
            )
            yield first, batch, np.array([number for number, _ in kept], np.int64)[numbers]
            first += len(values)

    def close(self) -> None:
        """Close the file."""
        self._rows = iter(())


def _open_parquet(path: str) -> pa.parquet.ParquetFile:
    if "://" not in path:
        return pa.parquet.ParquetFile(path)
    with tf.io.gfile.GFile(path, "rb") as file:  # which lacks what Arrow asks of a file
        return pa.parquet.ParquetFile(pa.BufferReader(file.read()))


def _place(name: str, first: int, numbers: Ints, last: bool, rows: int) -> list[Any]:
    """Return the place after some sound rows, which have these numbers, counted from row ``first`` on."""
    if last and rows == len(numbers):
        return [name, _ALL]
    return [name, first + (int(numbers[rows - 1]) + 1 if rows else 0)]


def _row(path: str, first: int, numbers: Sequence[int], row: int) -> str:
    return f"{path}: row {first + numbers[row] + 1}"


def _form_of(path: str, form: Format | None) -> Format:
    ending = _read_name(path).ending
    if ending in _TFRECORD:
        return form or "example"
    if ending in _LINES:
        return "json"
    raise DataError(
        f"a file that ends with {ending or 'nothing'} can't be read as a stream",
        path=path,
        advice="write Parquet (.parquet), JSON lines (.jsonl, .ndjson, .json, also with .gz) or TFRecord "
        "(.tfrecord, also with .gz), and move other files elsewhere",
    )


def _values(path: str) -> Iterator[list[bytes]]:
    """Read rows of a file of JSON lines or TFRecord as bytes, some at once."""
    name = _read_name(path)
    if name.ending in _TFRECORD:
        records = tf.data.TFRecordDataset(path, compression_type="GZIP" if name.zipped else "")
        for values in records.batch(_AT_ONCE).as_numpy_iterator():
            yield list(values)
        return
    with tf.io.gfile.GFile(path, "rb") as raw:
        source: Any = gzip.GzipFile(fileobj=raw) if name.zipped else raw
        while values := list(itertools.islice(source, _AT_ONCE)):
            yield values

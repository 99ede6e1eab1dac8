"""Arrow IPC files with one record batch for each logical shard, and the position of each batch.

Any Arrow reader opens such a file as a table. The checkpoint's manifest records the position of each batch,
so that a reader can read one batch alone: it is one run of bytes in the file, an Arrow message with its body.
The run's CRC-32, as ``zlib.crc32`` computes it, shows whether the bytes are still those that were written.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.core.errors import DataError

Arrays = Mapping[str, npt.NDArray[Any]]

_SCHEMA_BYTES = 1 << 20  # far more than a schema takes

RESTORE_ADVICE = "bring the file back from a copy, or load the checkpoint before"


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error for a file that a manifest names but that can't be opened."""
    return DataError(
        f"the checkpoint's manifest names this file, but it can't be read: {error.strerror}",
        path=path,
        advice=RESTORE_ADVICE,
    )


@dataclass(frozen=True)
class Segment:
    """Record batch in a file: the records of a logical shard.

    Attributes:
      shard: The logical shard; for a filter's counters, the first of the several shards that it covers.
      rows: Number of records.
      offset: Where the batch begins in the file, in bytes.
      bytes: Length of the batch in bytes.
      crc32: CRC-32 of these bytes.
    """

    shard: int
    rows: int
    offset: int
    bytes: int
    crc32: int


class _Tap:
    """Binary file that keeps views of the bytes written since the last `take`, without copying them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=0)
        self._written: list[memoryview] = []
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._written.append(view)
        rest = view.cast("B") if view.nbytes else view
        with self._name_file():
            while rest.nbytes:
                rest = rest[self._file.write(rest) :]
        return view.nbytes

    def take(self) -> list[memoryview]:
        written, self._written = self._written, []
        return written

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with self._file, self._name_file():
                os.fsync(self._file.fileno())

    @contextmanager
    def _name_file(self) -> Iterator[None]:
        """Name the file in errors such as a full disk, where the system doesn't name it."""
        try:
            yield
        except OSError as error:
            error.filename = str(self._path)
            raise


def rows_schema(dim: int, slot_floats: int) -> pa.Schema:
    """Return records' columns: ``key``, ``weights``, ``slots`` (if any), ``frequency``, ``last_step``."""
    vectors = {"weights": dim, "slots": slot_floats}
    return pa.schema(
        [
            pa.field("key", pa.int64(), nullable=False),
            *(
                pa.field(
                    name, pa.list_(pa.field("item", pa.float32(), nullable=False), width), nullable=False
                )
                for name, width in vectors.items()
                if width > 0
            ),
            pa.field("frequency", pa.uint32(), nullable=False),
            pa.field("last_step", pa.uint32(), nullable=False),
        ]
    )


def removed_schema() -> pa.Schema:
    """Return the column of removed keys: ``key``."""
    return pa.schema([pa.field("key", pa.int64(), nullable=False)])


def waiting_schema() -> pa.Schema:
    """Return the columns of keys that wait for admission: ``key``, and ``count``, its number of refusals."""
    return pa.schema(
        [pa.field("key", pa.int64(), nullable=False), pa.field("count", pa.uint32(), nullable=False)]
    )


def filter_schema() -> pa.Schema:
    """Return the column of an admission filter's counters: ``counter``."""
    return pa.schema([pa.field("counter", pa.uint8(), nullable=False)])


class RecordFileWriter:
    """Context manager that writes a file of record batches; on leaving, the bytes are on the disk.

    Args:
      path: The file; its folder must exist.
      schema: The columns.
      metadata: Stored in the file's schema, for readers without the manifest.

    Attributes:
      path: The file.
      segments: The batches written so far.
      bytes: The size of the file; set when it is closed.
    """

    def __init__(self, path: Path, schema: pa.Schema, metadata: Mapping[str, str]) -> None:
        self.path = path
        self._schema = schema.with_metadata(dict(metadata))
        self._tap = _Tap(path)
        self._sink = pa.PythonFile(self._tap, "w")
        self._writer = pa.ipc.new_file(self._sink, self._schema)
        self.segments: list[Segment] = []
        self.bytes = 0

    def write(self, shard: int, columns: Arrays) -> None:
        """Add a logical shard's records: (n,) or (n, width) contiguous arrays, by column."""
        arrays = []
        for field in self._schema:
            flat = pa.array(columns[field.name].reshape(-1))
            vectors = pa.types.is_fixed_size_list(field.type)
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, type=field.type) if vectors else flat)
        batch = pa.record_batch(arrays, schema=self._schema)
        size = pa.ipc.get_record_batch_size(batch)
        self._writer.write_batch(batch)
        # The bytes before the first batch are the schema.
        written = self._tap.take()
        before = sum(view.nbytes for view in written) - size
        crc = 0
        for view in written:
            if before > 0:
                before -= view.nbytes
            else:
                crc = zlib.crc32(view, crc)
        self.segments.append(Segment(shard, batch.num_rows, self._sink.tell() - size, size, crc))

    def __enter__(self) -> RecordFileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._writer.close()
            self.bytes = self._sink.tell()
        finally:
            self._tap.close()


class RecordFileReader:
    """Context manager that reads single batches of a file.

    Args:
      path: The file.
      schema: The expected columns.
      size: The expected size in bytes, from the manifest.

    Attributes:
      bytes_read: How many bytes have been read.

    Raises:
      DataError: The file is missing, or has another size or other columns.
    """

    def __init__(self, path: Path, schema: pa.Schema, size: int) -> None:
        self._path, self._schema, self.bytes_read = path, schema, 0
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise unreadable(path, error) from error
        found = os.fstat(self._file.fileno()).st_size
        if found != size:
            self._file.close()
            raise DataError(f"{found} bytes, the manifest says {size}", path=path, advice=RESTORE_ADVICE)
        if not self._has_columns():
            self._file.close()
            raise DataError("other columns than the manifest says", path=path, advice=RESTORE_ADVICE)

    def _has_columns(self) -> bool:
        """Return whether the file has the expected schema: a batch doesn't describe its own columns."""
        magic = b"ARROW1\0\0"
        start = os.pread(self._file.fileno(), len(magic) + 8, 0)
        length = int.from_bytes(start[-4:], "little")
        try:
            message = os.pread(self._file.fileno(), 8 + min(length, _SCHEMA_BYTES), len(magic))
            found = pa.ipc.read_schema(pa.py_buffer(message))
        except (pa.ArrowException, OSError):
            return False
        return start.startswith(magic) and bool(found.equals(self._schema))

    def read(self, segment: Segment) -> dict[str, npt.NDArray[Any]]:
        """Read the columns of one batch, (n,) or (n, width), as views of the bytes that were read.

        Raises:
          DataError: The bytes differ from those that were written.
        """
        data = self._bytes(segment)
        crc = zlib.crc32(data.data)
        if crc != segment.crc32:
            raise DataError(
                f"logical shard {segment.shard} is damaged: its CRC-32 is {crc:08x}, the manifest says "
                f"{segment.crc32:08x}",
                path=self._path,
                offset=segment.offset,
                advice=RESTORE_ADVICE,
            )
        batch = pa.ipc.read_record_batch(pa.py_buffer(data), self._schema)
        columns = {}
        for field in self._schema:
            column = batch.column(field.name)
            if pa.types.is_fixed_size_list(field.type):
                columns[field.name] = np.asarray(column.flatten()).reshape(-1, field.type.list_size)
            else:
                columns[field.name] = np.asarray(column)
        return columns

    def _bytes(self, segment: Segment) -> npt.NDArray[np.uint8]:
        data = np.empty(segment.bytes, np.uint8)
        rest, at = data.data, segment.offset
        while rest.nbytes:
            count = os.preadv(self._file.fileno(), [rest], at)
            if count == 0:
                raise DataError("the file ends here", path=self._path, offset=at, advice=RESTORE_ADVICE)
            rest, at = rest[count:], at + count
        self.bytes_read += segment.bytes
        return data

    def __enter__(self) -> RecordFileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

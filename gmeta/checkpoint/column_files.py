"""Writes a table's columns, batch by batch, as ``.npy`` files or as one Arrow file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gmeta.checkpoint.chain import Columns
from gmeta.checkpoint.record_file import RecordFileWriter
from gmeta.checkpoint.table_description import (
    ARROW_NAME,
    COLUMNS,
    DTYPES,
    Format,
    TableDescription,
    description_path,
)
from gmeta.core.errors import ConfigError, DataError, GmetaError, NotFiniteError, rows_not_finite
from gmeta.core.files import check_replaces, sync


class ColumnWriter(Protocol):
    """Context manager that writes batches of columns; on leaving, the bytes are on the disk."""

    def write(self, columns: Columns) -> None:
        """Add rows."""

    def __enter__(self) -> ColumnWriter: ...

    def __exit__(self, *_: object) -> None: ...


class NpyWriter:
    """Writer of one ``.npy`` file for each column, such as ``keys.npy``.

    The header contains the number of rows, which is known only at the end. NumPy pads headers, so a header
    for zero rows has the same length and is overwritten at the end.

    Args:
      folder: Where to write.
      description: Which columns there are, and their widths.
    """

    def __init__(self, folder: Path, description: TableDescription) -> None:
        self._description, self._rows = description, 0
        self._stack = ExitStack()
        self._files: dict[str, BinaryIO] = {}
        for name in description.columns:
            self._files[name] = self._stack.enter_context((folder / f"{name}.npy").open("wb"))
            self._write_header(name)

    def _write_header(self, name: str) -> None:
        width = self._description.width_of(name)
        shape = (self._rows,) if width is None else (self._rows, width)
        value = {"descr": np.dtype(DTYPES[name]).str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._files[name], value)  # type: ignore[no-untyped-call]

    def write(self, columns: Columns) -> None:
        """Add rows."""
        for name, file in self._files.items():
            file.write(np.ascontiguousarray(columns[name], DTYPES[name]).data)
        self._rows += len(columns["keys"])

    def __enter__(self) -> NpyWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            for name, file in self._files.items():
                file.seek(0)
                self._write_header(name)
                file.flush()
                os.fsync(file.fileno())


class ArrowWriter:
    """Writer of one Arrow IPC file, ``table.arrow``, with a record batch for each `write`.

    Args:
      folder: Where to write.
      description: Which columns there are, and their widths.
    """

    def __init__(self, folder: Path, description: TableDescription) -> None:
        self._columns = description.columns
        fields = [_field(name, description.width_of(name)) for name in description.columns]
        self._file = RecordFileWriter(folder / ARROW_NAME, pa.schema(fields), {})

    def write(self, columns: Columns) -> None:
        """Add rows."""
        self._file.write(
            0, {name: np.ascontiguousarray(columns[name], DTYPES[name]) for name in self._columns}
        )

    def __enter__(self) -> ArrowWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__()


def _field(name: str, width: int | None) -> pa.Field:
    kind = pa.from_numpy_dtype(DTYPES[name])
    listed = kind if width is None else pa.list_(pa.field("item", kind, nullable=False), width)
    return pa.field(name, listed, nullable=False)


WRITERS: dict[str, type[NpyWriter] | type[ArrowWriter]] = {"npy": NpyWriter, "arrow": ArrowWriter}
"""Format -> its writer."""


def write_table(
    folder: Path, form: Format, description: TableDescription, batches: Iterable[Columns], *, finite: bool
) -> TableDescription:
    """Write batches of a table into an empty folder, and ``_table.json`` after them.

    Args:
      folder: The folder.
      form: The format.
      description: Which columns there are, and their widths.
      batches: The rows.
      finite: Whether to refuse rows that hold NaN or infinity.

    Returns:
      The description with the number of rows that were written.

    Raises:
      NotFiniteError: A row isn't finite; the message names the table and the id.
    """
    rows = 0
    with WRITERS[form](folder, description) as writer:
        for columns in batches:
            bad = rows_not_finite(columns["values"]) if finite else np.zeros(0, np.int64)
            if len(bad):
                raise NotFiniteError(
                    f"table {description.table!r}: the row of id {columns['keys'][bad[0]]} holds NaN or "
                    "infinity: export an earlier checkpoint, or write it by finite=False (--no-finite)"
                )
            if len(columns["keys"]):
                writer.write(columns)
                rows += len(columns["keys"])
    written = replace(description, rows=rows)
    written.save(folder)
    sync(description_path(folder))
    sync(folder)
    return written


def check_target(out: Path, form: str, *, overwrite: bool) -> None:
    """Refuse an unknown format, and a folder that must not be replaced.

    Raises:
      ConfigError: There is no such format.
      GmetaError: ``out`` exists, and isn't an empty folder, or the folder of an exported table that may be
        replaced.
    """
    if form not in WRITERS:
        raise ConfigError(f"format must be one of {', '.join(WRITERS)}, got {form!r}")
    described = description_path(out)
    check_replaces(out, described.name, "an exported table")
    if described.is_file() and not overwrite:
        raise GmetaError(f"{out} exists already: name a folder that is to be made, or overwrite it")


def size_of(folder: Path) -> int:
    """Return the size of a folder's files in bytes."""
    return sum(path.stat().st_size for path in folder.iterdir())


# Reads columns piece by piece from ``.npy`` and Arrow files, of gmeta or of another program.

_ARROW = (".arrow", ".feather")
_ROWS = 1 << 14  # of a piece; an import costs as much as some hundreds of rows
_TAKES = "give a folder with keys.npy and values.npy, an Arrow file, or a folder of Arrow files"
_ARROW_START = b"ARROW1"
_OTHERS: Mapping[bytes, tuple[str, str]] = {
    b"\x93NUMPY": (
        "a .npy file holds one array, and a table has two, keys and values",
        "save both into a folder, np.save('table/keys.npy', ids) and np.save('table/values.npy', rows), and "
        "give the folder",
    ),
    b"PK\x03\x04": (
        "a .npz archive, or another zip file",
        "save its arrays into a folder as keys.npy and values.npy, and give the folder",
    ),
    b"PAR1": (
        "a Parquet file",
        "pyarrow.feather.write_feather(pyarrow.parquet.read_table(path), 'table.feather') converts it",
    ),
    b"\xff\xff\xff\xff": (
        "an Arrow IPC stream",
        "pyarrow.feather.write_feather(pyarrow.ipc.open_stream(path).read_all(), 'table.feather') converts "
        "it",
    ),
}
"""First bytes of a file -> its format, and how to convert it."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Piece:
    """Rows that follow each other in a file.

    Attributes:
      path: The file; a folder of ``.npy`` files counts as one.
      first: The number of the first row in it, counted from 0.
      columns: The columns, ``(n, ...)`` arrays as stored in the file.
    """

    path: Path
    first: int
    columns: Columns


class ColumnSource:
    """Columns of one or several files.

    Attributes:
      description: gmeta's description of them; None if another program wrote them.
      columns: The names of the columns in the files.
    """

    description: TableDescription | None
    columns: tuple[str, ...]

    def pieces(self, names: Sequence[str], most: int | None = None) -> Iterator[Piece]:
        """Iterate over the rows of some columns.

        Args:
          names: The columns.
          most: The maximum number of rows of a piece; None: as many as were written together.

        Raises:
          DataError: A file is damaged, or its columns can't be read as arrays.
        """
        raise NotImplementedError

    def short_pieces(self, names: Sequence[str]) -> Iterator[Piece]:
        """Iterate over the rows in pieces that take little memory."""
        return self.pieces(names, _ROWS)


def open_source(path: Path, names: Mapping[str, str] | None = None) -> ColumnSource:
    """Open the files of a table.

    Args:
      path: A folder of ``.npy`` files, one for each column; an Arrow file; or a folder of Arrow files, which
        are read in the order of their names.
      names: gmeta's column -> its name in the files, if it differs.

    Raises:
      ConfigError: ``names`` has a column that gmeta doesn't know.
      DataError: There are no such files, they are damaged, or they lack keys or values.
    """
    strange = sorted(set(names or {}) - set(COLUMNS))
    if strange:
        raise ConfigError(
            f"columns must name some of {', '.join(COLUMNS)}, got {', '.join(map(repr, strange))}"
        )
    named = {name: (names or {}).get(name, name) for name in COLUMNS}
    if not path.exists():
        raise DataError("no such file or folder", path=path, advice=_TAKES)
    files = sorted(p for p in path.iterdir() if p.suffix in _ARROW) if path.is_dir() else [path]
    arrays = {name: path / f"{own}.npy" for name, own in named.items() if (path / f"{own}.npy").exists()}
    if files and arrays:
        raise DataError("both .npy and Arrow files are here", path=path, advice="keep those to import")
    if not files and not arrays:
        inside = sorted(p.name for p in path.iterdir())
        wanted = " or ".join(f"{named[name]}.npy" for name in ("keys", "values")) if inside else ".npy"
        found = f": it has {', '.join(inside[:3])}{', ...' * (len(inside) > 3)}" if inside else ""
        raise DataError(f"neither {wanted} nor Arrow files are here{found}", path=path, advice=_TAKES)
    source = NpySource(path, arrays) if arrays else ArrowSource(files, named)
    noted = path.is_dir() or path.name == ARROW_NAME
    source.description = TableDescription.load(path if path.is_dir() else path.parent) if noted else None
    for name, own in named.items():
        needed = name in ("keys", "values") or name in (names or {})
        if needed and name not in source.columns:
            file = f"the file {own}.npy" if arrays else f"a column {own!r}"
            raise DataError(
                f"it lacks {file}, the table's {name}",
                path=path,
                advice="name the columns as they are called here, such as columns={'keys': 'item_id'}",
            )
    return source


class NpySource(ColumnSource):
    """Source of one ``.npy`` file for each column, which are mapped into memory.

    Args:
      folder: The folder.
      files: Column -> its file.

    Raises:
      DataError: A file is damaged, or they have different numbers of rows.
    """

    def __init__(self, folder: Path, files: Mapping[str, Path]) -> None:
        self._folder, self.columns = folder, tuple(files)
        self._arrays = {name: _map_array(path) for name, path in files.items()}
        rows = {files[name].name: len(array) for name, array in self._arrays.items()}
        if len(set(rows.values())) > 1:
            counts = ", ".join(f"{name} {count}" for name, count in rows.items())
            raise DataError(f"the files have different numbers of rows: {counts}", path=folder)

    def pieces(self, names: Sequence[str], most: int | None = None) -> Iterator[Piece]:
        """Iterate over the rows; without ``most``, yield one piece that maps all rows and reads none."""
        rows = len(next(iter(self._arrays.values())))
        step = most or max(rows, 1)
        for first in range(0, rows, step):
            yield Piece(
                self._folder, first, {name: self._arrays[name][first : first + step] for name in names}
            )


def _map_array(path: Path) -> Array:
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy reads the header as Python source, which fails in many ways
        raise DataError(f"not a whole .npy file of numbers or text: {error}", path=path) from error
    if array.ndim == 0:
        raise DataError("it holds one value, not a column", path=path)
    return array


class ArrowSource(ColumnSource):
    """Source of Arrow IPC files, which include Feather files.

    Args:
      files: The files.
      names: Column -> its name in the files.

    Raises:
      DataError: A file isn't an Arrow file, or the files have different columns.
    """

    def __init__(self, files: Sequence[Path], names: Mapping[str, str]) -> None:
        self._files, self._names = files, names
        found = [tuple(name for name in COLUMNS if names[name] in self._schema(path).names) for path in files]
        self.columns = found[0]
        for path, columns in zip(files, found, strict=True):
            if columns != self.columns:
                raise DataError(
                    f"it has {', '.join(columns) or 'no columns'}, but {files[0].name} has "
                    f"{', '.join(self.columns) or 'none'}",
                    path=path,
                )

    def _schema(self, path: Path) -> pa.Schema:
        with _open_arrow(path) as file:
            return file.schema

    def pieces(self, names: Sequence[str], most: int | None = None) -> Iterator[Piece]:
        """Iterate over the rows of all files, batch by batch."""
        for path in self._files:
            first = 0
            with _open_arrow(path) as file:
                for number in range(file.num_record_batches):
                    batch = file.get_batch(number)
                    batch.validate(full=True)
                    arrays = {name: batch.column(self._names[name]) for name in names}
                    step = most or max(batch.num_rows, 1)
                    for start in range(0, batch.num_rows, step):
                        parts = {name: array.slice(start, step) for name, array in arrays.items()}
                        read = {
                            name: _as_numpy(part, self._names[name], path) for name, part in parts.items()
                        }
                        yield Piece(path, first + start, read)
                    first += batch.num_rows


def _refuse_other_formats(path: Path) -> None:
    """Refuse a file that doesn't start like an Arrow IPC file.

    Raises:
      DataError: It is of another format; the message names the format and how to convert it.
    """
    with path.open("rb") as file:
        start = file.read(len(_ARROW_START))
    if start == _ARROW_START:
        return
    for other, (what, advice) in _OTHERS.items():
        if start.startswith(other):
            raise DataError(f"{what}, not an Arrow IPC file", path=path, advice=advice)
    raise DataError(f"{'not an Arrow IPC file' if start else 'an empty file'}", path=path, advice=_TAKES)


@contextmanager
def _open_arrow(path: Path) -> Iterator[pa.ipc.RecordBatchFileReader]:
    try:
        _refuse_other_formats(path)
        with pa.memory_map(os.fspath(path)) as source:
            yield pa.ipc.open_file(source)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"not a whole Arrow IPC file: {error}", path=path) from error


def _as_numpy(array: pa.Array, name: str, path: Path) -> Array:
    """Return a column as (n,) numbers or text, or as (n, width) numbers for lists of equal length."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    lists = pa.types.is_fixed_size_list(array.type) or pa.types.is_list(array.type)
    lists = lists or pa.types.is_large_list(array.type)
    flat = array.flatten() if lists else array
    if array.null_count or flat.null_count:
        raise DataError(f"column {name!r} has nulls", path=path, advice="leave those rows out")
    numbers: Array = flat.to_numpy(zero_copy_only=False)
    if not lists:
        return numbers
    lengths = pc.unique(pc.list_value_length(array)).to_pylist()
    if len(lengths) > 1:
        raise DataError(
            f"column {name!r} has lists of {min(lengths)} to {max(lengths)} numbers, and must have as many "
            "in each row as the table",
            path=path,
        )
    return numbers.reshape(len(array), *lengths)

"""Writes a table's columns, batch by batch, as ``.npy`` files or as one Arrow file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import pyarrow as pa

from gmeta.checkpoint.files.chain import Columns
from gmeta.checkpoint.files.record_file import RecordFileWriter
from gmeta.checkpoint.vocabulary.description import (
    ARROW_NAME,
    DTYPES,
    Format,
    TableDescription,
    description_path,
)
from gmeta.core.arguments import rows_not_finite
from gmeta.core.errors import ConfigError, GmetaError, NotFiniteError
from gmeta.core.files import sync


class ColumnWriter(Protocol):
    """Context manager that writes batches of columns; on leaving, the bytes are on the disk."""

    def write(self, columns: Columns) -> None:
        """Add rows."""

    def __enter__(self) -> ColumnWriter: ...

    def __exit__(self, *_: object) -> None: ...


class NpyWriter:
    """Writer of one ``.npy`` file for each column, such as ``keys.npy``.

    The header has the number of rows, which is known at the end. NumPy leaves room for it, so the header of
    no rows is as long and is then written over.

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
    """Refuse a format that there isn't, and a folder that must stay as it is.

    Raises:
      ConfigError: There is no such format.
      GmetaError: ``out`` exists, and isn't an empty folder, or the folder of an exported table that may be
        replaced.
    """
    if form not in WRITERS:
        raise ConfigError(f"format must be one of {', '.join(WRITERS)}, got {form!r}")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not description_path(out).is_file():
        raise GmetaError(
            f"{out} exists already and isn't an exported table: name a folder that is to be made"
        )
    if not overwrite:
        raise GmetaError(f"{out} exists already: name a folder that is to be made, or overwrite it")


def size_of(folder: Path) -> int:
    """Return the size of a folder's files in bytes."""
    return sum(path.stat().st_size for path in folder.iterdir())

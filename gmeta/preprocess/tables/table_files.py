"""The files of a table, and their formats."""

from __future__ import annotations

import csv
import glob
import io
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

import pyarrow as pa

from gmeta.core.errors import ConfigError, DataError, first_line
from gmeta.preprocess.table_spec import CsvForm

Format = Literal["parquet", "csv", "json"]
_SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
_COMPRESSED = (".gz", ".zst")
_LINE = 1 << 20  # bytes of a line that are read at once
_KNOWN = ", ".join([*_SUFFIXES, *(f".csv{end}" for end in _COMPRESSED)])


@dataclass(frozen=True)
class TableFile:
    """A file of a table."""

    path: Path
    format: Format

    @property
    def is_text(self) -> bool:
        """Whether its records are lines of text."""
        return self.format != "parquet"


def find_files(data: Sequence[str | os.PathLike[str]]) -> list[TableFile]:
    """Find the files that some paths name.

    Args:
      data: Files, folders, and patterns such as ``clicks/2024-*.parquet``. A folder stands for all files
        below it with a known ending, except names that begin with ``_`` or ``.``, which engines write for
        their own use.

    Returns:
      The files, sorted by name for each of ``data``.

    Raises:
      ConfigError: A file has no known ending, or is given twice.
      DataError: No file has such a name, or a file is empty.
    """
    found: list[TableFile] = []
    for given in data:
        path = Path(given)
        if path.is_dir():
            paths = [p for p in sorted(path.rglob("*")) if _is_part(p, path)]
            nothing = f"the folder has no file of a known ending ({_KNOWN}) and isn't MovieLens'"
        elif path.exists() or not glob.has_magic(str(path)):
            paths, nothing = [path], ""
        else:
            matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - patterns may be absolute
            paths, nothing = [Path(p) for p in matches if Path(p).is_file()], "no file has such a name"
        if not paths:
            raise DataError(nothing, path=path)
        found += [_file(p) for p in paths]
    real = [file.path.resolve() for file in found]
    if twice := [file.path for file, path in zip(found, real, strict=True) if real.count(path) > 1]:
        raise ConfigError(f"{twice[0]} is given twice: its rows would be too")
    return found


def _is_part(path: Path, folder: Path) -> bool:
    inside = path.relative_to(folder).parts
    return path.is_file() and format_of(path) is not None and not any(name[0] in "_." for name in inside)


def format_of(path: PurePath) -> Format | None:
    """Return the format that a file's ending names, or None."""
    suffix = path.suffix.lower()
    if suffix in _COMPRESSED:
        suffix = path.with_suffix("").suffix.lower()
        suffix = "" if suffix in (".parquet", ".pq") else suffix  # Parquet is compressed inside
    return _SUFFIXES.get(suffix)


def _file(path: Path) -> TableFile:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"can't read it: {error.strerror}", path=path) from error
    kind = format_of(path)
    if kind is None:
        raise ConfigError(f"{path}: its ending doesn't say what it is; known are {_KNOWN}")
    if not size:
        raise DataError("the file is empty", path=path, advice="fetch it again, or leave it out")
    return TableFile(path, kind)


def holds_records(path: Path, form: CsvForm) -> bool:
    """Return whether a file of a table has any record; reads no further than the first.

    Raises:
      DataError: The file can't be read.
    """
    try:
        if format_of(path) == "parquet":
            import pyarrow.parquet as pq

            return int(pq.read_metadata(path).num_rows) > 0
        before = int(format_of(path) == "csv" and form.header)
        with io.BufferedReader(pa.input_stream(str(path), compression="detect")) as stream:
            pieces = iter(lambda: stream.readline(_LINE), b"")
            lines = (piece for piece in pieces if piece.strip())
            return next(itertools.islice(lines, before, None), None) is not None
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"can't read it: {first_line(error)}", path=path) from error


def csv_delimiter(path: Path, form: CsvForm) -> str:
    """Return the separator of a file's fields."""
    return form.delimiter or ("\t" if ".tsv" in path.suffixes else ",")


def csv_names(path: Path, form: CsvForm) -> list[str]:
    """Return the columns of a CSV file, from its first line or from the form.

    Raises:
      DataError: The line can't be read, or names a column twice.
    """
    if not form.header:
        return list(form.names)
    try:
        with pa.input_stream(str(path), compression="detect") as stream:
            head = stream.read(1 << 20)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"can't read it: {first_line(error)}", path=path) from error
    line = head.decode("utf-8-sig", errors="replace").splitlines()[:1]
    fields = next(csv.reader(line, delimiter=csv_delimiter(path, form), quotechar=form.quote), [])
    names = [field.strip() for field in fields]
    if not any(names):
        raise DataError("the first line names no columns", path=path, line=1)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"the first line names {twice[0]!r} twice", path=path, line=1)
    return names

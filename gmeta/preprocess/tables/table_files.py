"""The files of a table, and their formats."""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
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
_LONGEST_HEADER = 32 << 20
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
    real = Counter(file.path.resolve() for file in found)
    if twice := [file.path for file in found if real[file.path.resolve()] > 1]:
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
        raise ConfigError(f"{path}: its ending doesn't name a format; known are {_KNOWN}")
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
    """Return the columns of a CSV file, from its first line or from the form; ``""`` for one without a name.

    Raises:
      DataError: The line can't be read, or names a column twice.
    """
    if not form.header:
        return list(form.names)
    try:
        with open_text(path) as text:
            head = io.StringIO(text.read(_LONGEST_HEADER), newline="")
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"can't read it: {first_line(error)}", path=path) from error
    names = names_of(head, path, form, csv_delimiter(path, form))
    if head.tell() == _LONGEST_HEADER:
        raise DataError(f"the first line has more than {_LONGEST_HEADER:,} characters", path=path, line=1)
    return names


def names_of(head: io.StringIO, path: str | os.PathLike[str], form: CsvForm, delimiter: str) -> list[str]:
    """Return the columns that the first record of a CSV file names; it may span lines.

    Raises:
      DataError: It names no column, or one twice.
    """
    try:
        fields = next(csv.reader(head, delimiter=delimiter, quotechar=form.quote), [])
    except csv.Error as error:
        raise DataError(f"can't read it: {error}", path=path, line=1) from error
    names = [field.strip() for field in fields]
    if not any(names):
        raise DataError("the first line names no columns", path=path, line=1)
    if twice := sorted(name for name, times in Counter(names).items() if times > 1 and name):
        raise DataError(f"the first line names {twice[0]!r} twice", path=path, line=1)
    return names


def open_text(path: Path) -> io.TextIOWrapper:
    """Open a text file, compressed or not, and keep its line ends."""
    stream = pa.input_stream(str(path), compression="detect")
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="")


# The digests of the files that are read, computed while they are read.

_BLOCK = 4 << 20


class FileDigests:
    """SHA-256 of some files, under names that distinguish them.

    Args:
      files: The files.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = tuple(files)
        self._digests: Future[dict[str, str]] | None = None

    def start(self) -> None:
        """Begin to digest the files, in parallel with other work; a second call does nothing."""
        if self._digests is None:
            self._digests, self._digested = Future(), self.stamps()
            # A daemon: if the run ends with an error, nothing waits for it.
            threading.Thread(target=self._digest, args=[self._digests], daemon=True).start()

    def _digest(self, found: Future[dict[str, str]]) -> None:
        try:
            found.set_result({name: sha256(f) for name, f in zip(self._names(), self._files, strict=True)})
        except BaseException as error:
            found.set_exception(error)

    def wait(self) -> Mapping[str, str]:
        """Wait for the digests and return them, file name -> SHA-256.

        Raises:
          DataError: A file can't be read, or has changed since its reading began.
        """
        self.start()
        assert self._digests is not None
        found = self._digests.result()
        for (name, then), now, file in zip(
            self._digested.items(), self.stamps().values(), self._files, strict=True
        ):
            if then != now:
                raise DataError(f"{name} changed while it was read", path=file, advice="start again")
        return found

    def stamps(self) -> dict[str, list[int]]:
        """Return file name -> size and time of the last change, which quickly show whether it has changed."""
        found = {}
        for name, file in zip(self._names(), self._files, strict=True):
            try:
                stat = file.stat()
            except OSError as error:
                raise DataError(f"can't read it: {error.strerror}", path=file) from error
            found[name] = [stat.st_size, stat.st_mtime_ns]
        return found

    def _names(self) -> list[str]:
        """Return the files' names: as much of their paths as makes them unique."""
        if len(self._files) == 1:
            return [self._files[0].name]
        folder = Path(os.path.commonpath([file.parent.absolute() for file in self._files]))
        return [str(file.absolute().relative_to(folder)) for file in self._files]


def refuse_equal(files: Sequence[Path], holds_records: Callable[[Path], bool]) -> None:
    """Refuse files of equal content: their rows would occur twice. Only files of one size are read.

    Args:
      files: The files.
      holds_records: Whether a file has records; those that have none may be equal.

    Raises:
      DataError: Two are equal, or a file can't be read.
    """
    by_size: dict[int, list[Path]] = {}
    for file in files:
        by_size.setdefault(file.stat().st_size if file.exists() else 0, []).append(file)
    seen: dict[str, Path] = {}
    for file in (file for alike in by_size.values() if len(alike) > 1 for file in alike):
        if (digest := sha256(file)) in seen and holds_records(file):
            raise DataError(
                f"it is equal to {seen[digest]}: its rows would occur twice",
                path=file,
                advice="leave one of them out",
            )
        seen[digest] = file


def sha256(path: Path) -> str:
    """Compute the digest of a file's bytes, in hexadecimal.

    Raises:
      DataError: The file can't be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise DataError(f"can't read it: {error.strerror}", path=path) from error
    return digest.hexdigest()

"""The files of a table: which they are, their formats, and how many records a text file has.

Records are counted independently of the engine that reads them, so that none is lost unnoticed. DuckDB loses
a line that is longer than its buffer. Where several threads read a file, it may also begin a record at a line
within quotes. Neither happens if the length of the longest record, and whether one spans lines, are known in
advance.

A line break ends a record if the number of quotes before it is even. This holds as long as quotes enclose
whole fields; where they don't, Python's parser of CSV counts, which is slower.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import itertools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, DataError, first_line
from gmeta.preprocess.table_spec import CsvForm, TableSpec
from gmeta.preprocess.tables.recognition import TableFile, format_of, open_bytes, open_text, recognise

_LINE = 1 << 20  # bytes of a line that are read at once


def find_files(data: Sequence[str | os.PathLike[str]], spec: TableSpec) -> list[TableFile]:
    """Find the files that some paths name.

    Args:
      data: Files, folders, and patterns such as ``clicks/2024-*.parquet``. A folder stands for all files
        below it with a known ending or, if there is none, for all files, except names that begin with ``_``
        or ``.``, which engines write for their own use.
      spec: The files' format and form, as far as they are given.

    Returns:
      The files, sorted by name for each of ``data``.

    Raises:
      ConfigError: A file's content shows no format, or more than one, or a file is given twice.
      DataError: No file has such a name, or a file is empty.
    """
    found: list[TableFile] = []
    for given in data:
        path = Path(given)
        if path.is_dir():
            parts = [p for p in sorted(path.rglob("*")) if _is_part(p, path)]
            paths = [p for p in parts if format_of(p) is not None] or parts
            nothing = "the folder has no file of a table"
        elif path.exists() or not glob.has_magic(str(path)):
            paths, nothing = [path], ""
        else:
            matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - patterns may be absolute
            paths, nothing = [Path(p) for p in matches if Path(p).is_file()], "no file has such a name"
        if not paths:
            raise DataError(nothing, path=path)
        found += [_file(p, spec) for p in paths]
    real = Counter(file.path.resolve() for file in found)
    if twice := [file.path for file in found if real[file.path.resolve()] > 1]:
        raise ConfigError(f"{twice[0]} is given twice: its rows would be too")
    return found


def _is_part(path: Path, folder: Path) -> bool:
    inside = path.relative_to(folder).parts
    return path.is_file() and not any(name[0] in "_." for name in inside)


def _file(path: Path, spec: TableSpec) -> TableFile:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"can't read it: {error.strerror}", path=path) from error
    if not size:
        raise DataError("the file is empty", path=path, advice="fetch it again, or leave it out")
    return recognise(path, spec)


def holds_records(path: Path, form: CsvForm) -> bool:
    """Return whether a file of a table has any record; read no further than the first.

    Raises:
      DataError: The file can't be read.
    """
    try:
        with path.open("rb") as file:
            is_parquet = file.read(4) == b"PAR1"
        if is_parquet:
            import pyarrow.parquet as pq

            return int(pq.read_metadata(path).num_rows) > 0
        before = int(format_of(path) != "json" and form.header)
        with io.BufferedReader(open_bytes(path)) as stream:
            pieces = iter(lambda: stream.readline(_LINE), b"")
            lines = (piece for piece in pieces if piece.strip())
            return next(itertools.islice(lines, before, None), None) is not None
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"can't read it: {first_line(error)}", path=path) from error


# The digests of the files that are read, computed while they are read.


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
          DataError: A file can't be read, or has changed since reading began.
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


_BLOCK = 4 << 20
_BOM = b"\xef\xbb\xbf"
_RETURN = ord("\r")

csv.field_size_limit(sys.maxsize)  # fields may have any length


class Records(NamedTuple):
    """The records of a text file; a line of names is one too.

    Attributes:
      full: The number of records with a character.
      blank: The number of lines without one.
      longest: The number of bytes of the longest record.
      spanning: Whether a record may span lines.
      unended: Whether the file may end within quotes.
    """

    full: int
    blank: int
    longest: int
    spanning: bool = False
    unended: bool = False


def count_csv(path: Path, delimiter: str, quote: str, escape: str | None = None) -> Records:
    """Count the records of a CSV file.

    Raises:
      DataError: The file can't be read.
    """
    try:
        found = None if escape else _count(path, delimiter.encode(), quote.encode())
        return found or _count_slowly(path, delimiter, quote, escape)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"can't be read: {first_line(error)}", path=path, advice="fetch it again") from error


def count_lines(path: Path, *, spaces: bool = False) -> Records:
    """Count the lines of a text file.

    Args:
      path: The file.
      spaces: Whether lines of spaces are blank too, which takes longer.

    Raises:
      DataError: The file can't be read.
    """
    try:
        if not spaces:
            return _count(path, b"", b"") or Records(0, 0, 0)
        with open_text(path) as text:
            sizes = [len(line.strip()) for line in text]
        return Records(len(sizes) - sizes.count(0), sizes.count(0), max(sizes, default=0))
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"can't be read: {first_line(error)}", path=path, advice="fetch it again") from error


def _count(path: Path, delimiter: bytes, quote: bytes) -> Records | None:
    """Count records by blocks of bytes; return None if only a parser can find what quotes enclose."""
    full = blank = longest = held = 0  # held: bytes of the record that continues in the next block
    spanning = is_open = ends_field = False
    before, line_end = ord("\n"), 0
    for block in _blocks(path):
        data = np.frombuffer(block, np.uint8)
        if not line_end and (b"\n" in block or b"\r" in block[:-1]):
            line_end = ord("\n") if b"\n" in block else _RETURN
            if line_end == _RETURN and quote and (is_open or quote in block):
                return None  # it may be part of a field
        ends = np.flatnonzero(data == line_end) if line_end else np.zeros(0, np.int64)
        if quote and (is_open or ends_field or quote in block):
            quotes = np.flatnonzero(data == quote[0])
            edges = {ord("\n"), _RETURN, quote[0]}
            opening, closing = quotes[is_open::2], quotes[1 - is_open :: 2]
            begins = np.where(opening > 0, data[opening - 1], before)
            follows = data[closing[closing + 1 < len(data)] + 1]
            if ends_field:
                follows = np.append(follows, data[0])
            if not (_all_in(begins, {*edges, delimiter[-1]}) and _all_in(follows, {*edges, delimiter[0]})):
                return None
            inside = (np.searchsorted(quotes, ends) + is_open) % 2 == 1
            spanning |= bool(inside.any())
            ends = ends[~inside]
            is_open = bool((len(quotes) + is_open) % 2)
            ends_field = bool(len(closing)) and int(closing[-1]) + 1 == len(data)
        sizes = np.diff(np.concatenate(([-1 - held], ends))) - 1
        held = len(data) - 1 - int(ends[-1]) if len(ends) else held + len(data)
        short = np.flatnonzero(sizes <= 1)
        empty = sizes[short] == 0
        last = np.where(ends[short] > 0, data[ends[short] - 1], before)
        empty |= last == _RETURN
        blank += int(empty.sum())
        full += len(ends) - int(empty.sum())
        longest = max(longest, int(sizes.max(initial=0)), held)
        before = int(data[-1])
    if held and not (held == 1 and before == _RETURN):
        full += 1
    return Records(full, blank, longest, spanning or is_open, is_open)


def _blocks(path: Path) -> Iterator[bytes]:
    with open_bytes(path) as stream:
        block = stream.read(_BLOCK).removeprefix(_BOM)
        while block:
            yield block
            block = stream.read(_BLOCK)


def _all_in(found: NDArray[np.uint8], allowed: set[int]) -> bool:
    return bool(np.isin(found, list(allowed)).all())


def _count_slowly(path: Path, delimiter: str, quote: str, escape: str | None) -> Records:
    full = blank = longest = 0
    with open_text(path) as text:
        reader = csv.reader(
            text, delimiter=delimiter, quotechar=quote, escapechar=escape, skipinitialspace=True
        )
        for fields in reader:
            full, blank = full + bool(fields), blank + (not fields)
            longest = max(longest, sum(map(len, fields)) * 4)  # bytes, at most
    return Records(full, blank, longest, spanning=True, unended=True)

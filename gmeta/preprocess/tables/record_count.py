"""Counts the records of a text file, apart from the engine that reads them, so that none is lost unnoticed.

DuckDB loses a line that is longer than its buffer. Where several threads read a file, it may also begin a
record at a line within quotes. Neither happens if the length of the longest record is known in advance, and
whether one spans lines.

A line break ends a record if the number of quotes before it is even. This holds as long as quotes enclose
whole fields; where they don't, Python's parser of CSV counts, which is slower.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gmeta.core.errors import DataError, first_line
from gmeta.preprocess.tables.recognition import open_bytes, open_text

_BLOCK = 4 << 20
_BOM = b"\xef\xbb\xbf"
_RETURN = ord("\r")

csv.field_size_limit(sys.maxsize)  # fields are as long as they are


class Records(NamedTuple):
    """The records of a text file; a line of names is one too.

    Attributes:
      full: How many have a character.
      blank: How many lines have none.
      longest: The most bytes of a record.
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

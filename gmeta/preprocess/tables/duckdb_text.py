"""The interface to DuckDB: names and texts in SQL, and its errors as gmeta's."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from gmeta.core.errors import DataError, GmetaError

if TYPE_CHECKING:
    import duckdb

# The first is the Python package's message, if it has seen the signal, the second is DuckDB's.
_INTERRUPTED = re.compile(r"^Query interrupted|^INTERRUPT Error")
_SPECIAL = re.compile(r"[^\w /.,:=+@%#&~-]")
_NO_ROOM = r"No space left|disk is full|temp_directory|temporary (file|block)|File too large"


def sql_text(text: str) -> str:
    """Quote a text for SQL."""
    return "'" + text.replace("'", "''") + "'"


def sql_name(column: str) -> str:
    """Quote a column's name for SQL."""
    return '"' + column.replace('"', '""') + '"'


class PlainPath:
    """A path that names exactly one file to DuckDB, with any characters in it.

    DuckDB reads a path with ``*``, ``?`` or ``[`` as a pattern, cuts it at backslashes, and replaces a tilde
    at its beginning. A path with such a character is read through a link with a plain name.

    Args:
      path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._plain = path, str(path.absolute())
        if _SPECIAL.search(self._plain):
            self._folder = tempfile.TemporaryDirectory(prefix="gmeta-")  # deleted with this object
            ends = "".join(end for end in path.suffixes[-2:] if end.isascii() and end[1:].isalnum())
            link = Path(self._folder.name) / f"file{ends}"
            link.symlink_to(path.absolute())
            self._plain = str(link)

    def __str__(self) -> str:
        return self._plain

    def name_file(self, message: str) -> str:
        """Replace the link's path in a message of DuckDB by the path that was given."""
        return message.replace(self._plain, str(self._path))


@contextmanager
def explain_errors(path: Path, plain: PlainPath | None = None) -> Iterator[None]:
    """Turn DuckDB's errors into gmeta's, in one line.

    Args:
      path: The file that is read.
      plain: The path under which DuckDB reads it.

    Raises:
      DataError: The file is damaged, or isn't of the expected format.
      GmetaError: There is too little memory or disk space.
      KeyboardInterrupt: Ctrl-C ended a query.
    """
    import duckdb

    try:
        yield
    except (duckdb.Error, RuntimeError) as error:
        if _INTERRUPTED.search(str(error)):
            raise KeyboardInterrupt from error
        if not isinstance(error, duckdb.Error):
            raise
        text = one_line(str(error) if plain is None else plain.name_file(str(error)))
        if str(error).startswith("Out of Memory"):
            raise GmetaError(f"{path}: too little memory: {text}; allow more with --memory-limit") from error
        if re.search(_NO_ROOM, str(error)):
            raise GmetaError(f"can't write temporary files while reading {path}: {text}") from error
        line = re.search(r"\bin line (\d+)", text)
        raise DataError(
            f"can't be read: {text}",
            path=path,
            line=int(line[1]) if line else None,
            advice="mend it, fetch it again, or leave it out",
        ) from error


def arrow_batches(result: duckdb.DuckDBPyRelation, rows: int) -> Iterator[pa.RecordBatch]:
    """Yield a result in batches of at most ``rows`` rows; each is released after use.

    Raises:
      duckdb.Error: Any error of DuckDB. After the first rows, Arrow passes on only its text, as an
        ``OSError``, as if a file couldn't be written; it is raised as ``duckdb.Error`` again.
    """
    import duckdb

    reader = result.to_arrow_reader(rows)
    try:
        yield from reader
    except OSError as error:
        raise duckdb.Error(str(error)) from error
    finally:
        del reader  # an open result would keep the cursor


def one_line(message: str) -> str:
    """Return the first line of a message, without the name of its class."""
    line = message.strip().splitlines()[0] if message.strip() else "unknown error"
    return re.sub(r"^[A-Z][A-Za-z ]* Error: ", "", line).strip()

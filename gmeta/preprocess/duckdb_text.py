"""What stands between DuckDB and the rest: names and texts in SQL, and its errors as ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gmeta.core.errors import DataError, GmetaError

_NO_ROOM = r"No space left|disk is full|temp_directory|temporary (file|block)|File too large"


def quoted(text: str) -> str:
    """A text in SQL."""
    return "'" + text.replace("'", "''") + "'"


def named(column: str) -> str:
    """A column's name in SQL."""
    return '"' + column.replace('"', '""') + '"'


@contextmanager
def errors_explained(path: Path) -> Iterator[None]:
    """DuckDB's errors as ours, in one line.

    Raises:
      DataError: The file is damaged, or not what it is taken for.
      GmetaError: There is too little memory or room on the disk.
    """
    import duckdb

    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise GmetaError(
            f"{path}: too little memory: {one_line(str(error))}; allow more with --memory-limit"
        ) from error
    except duckdb.Error as error:
        text = one_line(str(error))
        if re.search(_NO_ROOM, str(error)):
            raise GmetaError(f"can't write temporary files while reading {path}: {text}") from error
        line = re.search(r"\bin line (\d+)", text)
        raise DataError(
            f"can't be read: {text}",
            path=path,
            line=int(line[1]) if line else None,
            advice="mend it, fetch it again, or leave it out",
        ) from error


def one_line(message: str) -> str:
    """The first line of a message, without the name of its class."""
    line = message.strip().splitlines()[0] if message.strip() else "unknown error"
    return re.sub(r"^[A-Z][A-Za-z ]* Error: ", "", line).strip()

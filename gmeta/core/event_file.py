"""Files of events in the form in which a store of histories keeps them.

`gmeta.io.RecentHistories` writes such a file, and `gmeta history append` reads it. It is a Parquet file whose
numbers are those of the store: what a store's spec does to a table (hashes of text, units of times, other
names) was done before. Its columns therefore have names that no table has, so that nothing takes the file for
a table and does it again. The file's metadata names the columns, and the file's origin: two files with equal
events of different origin differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import DataError, first_line
from gmeta.core.history_manifest import HistoryManifest
from gmeta.core.json_values import items, mapping, text
from gmeta.core.schema import Column

SUFFIX = ".events.parquet"
"""The end of the name of such a file."""
_KEY, _PREFIX = b"gmeta_events", "_gmeta_event_"


@dataclass(frozen=True)
class EventForm:
    """The columns of a store's events.

    Attributes:
      user: The name of the column of users.
      time: The name of the column of times.
      columns: The columns of all groups.
    """

    user: str
    time: str
    columns: tuple[Column, ...]

    @classmethod
    def of(cls, manifest: HistoryManifest) -> EventForm:
        """Return the form of a store's events."""
        columns = tuple(column for own in manifest.groups.values() for column in own)
        return cls(manifest.spec["user"], manifest.spec["time"], columns)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EventForm:
        """Read a form from what `to_json` returns; raise ValueError, KeyError or TypeError."""
        columns = tuple(Column(**mapping(one, "a column")) for one in items(value["columns"], "columns"))
        return cls(text(value["user"], "user"), text(value["time"], "time"), columns)

    def to_json(self) -> dict[str, Any]:
        """Return the form as JSON values."""
        return {"user": self.user, "time": self.time, "columns": [asdict(one) for one in self.columns]}

    @property
    def words(self) -> tuple[Column, ...]:
        """The user, the time and all columns: the words of an event."""
        return (Column(self.user), Column(self.time), *self.columns)


def write_events(path: Path, form: EventForm, words: NDArray[np.int64], origin: str) -> None:
    """Write a file of events; the same arguments give the same bytes.

    Args:
      path: The file.
      form: The columns.
      words: (N, 2 + columns) int64: the users, the times and all columns; a float32 is its bits.
      origin: What distinguishes this file from all others.

    Raises:
      OSError: The disk is full.
    """
    import pyarrow as pa
    from pyarrow import parquet

    columns = {
        _PREFIX + column.name: _values(words[:, place], column) for place, column in enumerate(form.words)
    }
    note = json.dumps({**form.to_json(), "origin": origin}, sort_keys=True)
    table = pa.table(columns).replace_schema_metadata({_KEY: note})
    parquet.write_table(table, path, compression="zstd")


def is_event_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a file that `write_events` wrote."""
    return os.fspath(path).endswith(SUFFIX) and Path(path).is_file() and _note(Path(path)) is not None


def event_form(path: Path) -> EventForm:
    """Return the columns of a file of events.

    Raises:
      DataError: The file is damaged.
    """
    try:
        return EventForm.from_json(json.loads((_note(path) or b"").decode()))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"not a file of events: {first_line(error)}", path=path) from error


def read_events(path: Path) -> NDArray[np.int64]:
    """Return the words of a file's events, (N, 2 + columns) int64, as `write_events` takes them.

    Raises:
      DataError: The file is damaged.
    """
    import pyarrow as pa
    from pyarrow import parquet

    form = event_form(path)
    try:
        table = parquet.read_table(path)
        words = np.empty((table.num_rows, len(form.words)), np.int64)
        for place, column in enumerate(form.words):
            values = table[_PREFIX + column.name].to_numpy()
            words[:, place] = values.view(np.uint32) if column.dtype == "float32" else values
    except (pa.ArrowInvalid, OSError, KeyError) as error:
        raise DataError(f"can't read it: {first_line(error)}", path=path) from error
    return words


def _values(words: NDArray[np.int64], column: Column) -> NDArray[Any]:
    return words.astype(np.uint32).view(np.float32) if column.dtype == "float32" else words


def _note(path: Path) -> bytes | None:
    """Return the file's own metadata; None if it has none, or isn't Parquet."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return (parquet.read_schema(path).metadata or {}).get(_KEY)
    except (pa.ArrowInvalid, OSError):
        return None

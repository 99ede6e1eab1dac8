"""Parquet read by DuckDB: one query joins the file with all requests of a call.

A query for each request takes milliseconds, several times as long as a request here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from parts.history_formats.events import READ, Events
from parts.history_formats.newest import Histories
from parts.history_formats.pyarrow_form import write

_QUERY = f"""
  SELECT request, {", ".join(READ)} FROM (
    SELECT asked.request, {", ".join(f"events.{name}" for name in READ)}, events.file_row_number AS place
    FROM events JOIN asked ON events.user = asked.user AND events.time < asked.until
      AND events.birth <= asked.generation
    QUALIFY row_number() OVER (PARTITION BY asked.request ORDER BY events.file_row_number DESC) <= ?)
  ORDER BY request, place
"""


class DuckDB:
    """A Parquet file as a view in DuckDB, on one thread.

    Args:
      folder: An empty one, for its file.
      events: The events to store.
      **options: Arguments of `write`.

    Attributes:
      size: Bytes of its file.
    """

    def __init__(self, folder: Path, events: Events, **options: Any) -> None:
        path = folder / "events.parquet"
        write(path, events, **options)
        self.size = path.stat().st_size
        self._database = duckdb.connect(config={"threads": 1})
        self._database.execute("SET parquet_metadata_cache = true")
        self._database.execute(
            f"CREATE VIEW events AS SELECT * FROM read_parquet('{path}', file_row_number = true)"
        )

    def scan(self, requests: NDArray[np.void], longest: int) -> Histories:
        """Answer requests; see `GMeta.scan`."""
        names = ("user", "until", "generation")
        asked = pa.table({"request": np.arange(len(requests)), **{name: requests[name] for name in names}})
        self._database.register("asked", asked)
        found = self._database.execute(_QUERY, [longest]).fetchnumpy()
        counts = np.bincount(found["request"], minlength=len(requests))
        return Histories(np.concatenate([[0], np.cumsum(counts)]), [found[name] for name in READ])

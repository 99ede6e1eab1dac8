"""Requests on disk: as fat rows, which contain their histories, and as examples, which don't."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gmeta
from gmeta.preprocess import ColumnSpec, PrepareConfig, TableSpec, prepare

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from parts.history_store.days import OWN, Grown, Requests

_CHUNK = 512  # requests


def fat_rows(folder: Path, grown: Grown, requests: Requests, longest: int) -> dict[str, float]:
    """Write requests with their histories, and return the bytes of a request in each form.

    ``fat`` is a prepared data set with a record for each request, ``fat_zstd`` the same with compressed
    records, ``fat_zstd_by_user`` with one compressed record for all requests of a user, and
    ``parquet_by_user`` a Parquet file by zstd in the order of users.

    Args:
      folder: An empty one.
      grown: The store.
      requests: The requests.
      longest: The most events of a history, the newest.
    """
    by_user = requests[np.lexsort((requests.time, requests.user))]
    table = folder / "rows.parquet"
    with _writer(table, next(_tables(grown, by_user[:1], longest)).schema) as writer:
        for chunk in _tables(grown, by_user, longest):
            writer.write_table(chunk)
    found = {"parquet_by_user": table.stat().st_size}
    configs = {
        "fat": PrepareConfig(batch_rows=1),
        "fat_zstd": PrepareConfig(batch_rows=1, codec="zstd"),
        "fat_zstd_by_user": PrepareConfig(codec="zstd"),
    }
    lists = {f"history_{name}": ColumnSpec(is_list=True) for name in ("time", *OWN)}
    spec = TableSpec("user", time="time", label="click", columns=lists)
    for name, config in configs.items():
        prepare(table, folder / name, config, spec=spec)
        found[name] = folder_bytes(folder / name)
    return {name: size / len(requests) for name, size in found.items()}


def examples(folder: Path, requests: Requests, lengths: np.ndarray) -> tuple[Path, Path]:
    """Write requests without histories, as prepared data sets.

    Args:
      folder: An empty one.
      requests: The requests.
      lengths: (R,) int64: events of each history, which an example notes.

    Returns:
      The data set with a record for each request, and that with one for all requests of a user.
    """
    columns = {"generation": pa.array(requests.generation), "history_length": pa.array(lengths)}
    pq.write_table(_exposures(requests, columns), folder / "examples.parquet")
    spec, made = TableSpec("user", time="time", label="click"), (folder / "examples", folder / "by-user")
    for path, batch_rows in zip(made, (1, None), strict=True):
        prepare(folder / "examples.parquet", path, PrepareConfig(batch_rows=batch_rows), spec=spec)
    return made


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _tables(grown: Grown, requests: Requests, longest: int) -> Iterator[pa.Table]:
    store = gmeta.io.HistoryStore(grown.path)
    for begin in range(0, len(requests), _CHUNK):
        own = requests[slice(begin, begin + _CHUNK)]
        found = store.read(
            own.user, ["time", *OWN], until=own.time, generation=own.generation, longest=longest
        )
        columns = {
            f"history_{name}": pa.LargeListArray.from_arrays(values.row_splits.numpy(), values.values.numpy())
            for name, values in found.items()
        }
        yield _exposures(own, columns)


def _exposures(requests: Requests, more: dict[str, pa.Array]) -> pa.Table:
    """Return a table of the columns that both forms have, and more columns."""
    rng = np.random.default_rng(requests.time[0])
    shown = {
        "user": requests.user,
        "time": requests.time,
        "item": rng.integers(0, 1_000_000, len(requests)),
        "click": rng.integers(0, 2, len(requests)),
    }
    return pa.table({**shown, **more})


def _writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(path, schema, compression="zstd")

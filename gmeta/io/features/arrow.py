"""Features in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.schema import Column
from gmeta.io.features.cells import FetchPolicy, arrow_schema, column_of
from gmeta.io.features.feature_source import FeatureSource

Ints = npt.NDArray[np.int64]


class ArrowSource(FeatureSource):
    """Features in Arrow tables in memory, such as that of a Parquet file.

    Rows are sorted once by (key, version). A binary search finds all keys of a request at once.

    Args:
      tables: Name -> a ``pyarrow.Table`` or RecordBatch. It has the key column, the version column if
        ``version`` names one, and feature columns of int64, float (32 bits) or lists of them. If several rows
        have the same key and version, the last one is used.
      key: The column of keys.
      version: The column of versions. None: the tables have no versions, each key appears once, and every
        value has version 0.
      policy: How rows are fetched; a cache helps little here, and a timeout isn't needed.

    Raises:
      ConfigError: A table lacks the key or version column.
      DataError: A column is of another type, a key or version is null, or a key appears twice in a table
        without versions.

    Example:
      >>> prices = pa.table({"key": [7, 7], "version": [10, 20], "price": [1, 2]})
      >>> source = ArrowSource({"item": prices}, version="version")
      >>> source.multi_get("item", [7, 7], ["price"], as_of=[19, 20])["price"].to_pylist()
      [1, 2]
    """

    def __init__(
        self,
        tables: Mapping[str, Any],
        *,
        key: str = "key",
        version: str | None = None,
        policy: FetchPolicy | None = None,
    ) -> None:
        super().__init__("ArrowSource", policy or FetchPolicy(timeout=None, cache_rows=0))
        self._tables = {name: _Table(name, table, key, version) for name, table in tables.items()}

    @property
    def tables(self) -> Mapping[str, Sequence[Column]]:
        """The columns of each table, except keys and versions."""
        return {name: table.columns for name, table in self._tables.items()}

    def fetch(self, table: str, keys: Ints, columns: Sequence[Column], as_of: Ints | None) -> Any:
        """See `FeatureSource.fetch`."""
        found = self._tables[table].rows(keys, columns, as_of)
        return pa.RecordBatch.from_arrays(found, schema=arrow_schema(columns))

    def _put(self, table: str, keys: Ints, rows: Any, columns: Sequence[Column], version: int) -> None:
        # Sorts the whole table again: intended for tables that are loaded once, and for tests.
        with self._lock:
            self._tables[table] = self._tables[table].extend(keys, rows, version)


class _Table:
    """The rows of a table, and for each column the places of the rows that have a value in it."""

    def __init__(self, name: str, table: Any, key: str, version: str | None) -> None:
        names = list(table.schema.names)
        for role in (key, version):
            if role is not None and role not in names:
                raise ConfigError(f"ArrowSource: table {name!r} has no column {role!r}; it has {names}")
        table = table if isinstance(table, pa.Table) else pa.Table.from_batches([table])
        self.columns = [column_of(f.name, f.type) for f in table.schema if f.name not in (key, version)]
        keys = _ints(name, table, key)
        versions = (
            np.zeros(len(keys), np.int64) if version is None else _ints(name, table, version, times=True)
        )
        if version is None and len(np.unique(keys)) < len(keys):
            twice = np.unique(keys, return_counts=True)
            raise DataError(
                f"ArrowSource: table {name!r} has key {twice[0][twice[1] > 1][0]} twice and no column of "
                "versions; name it with version="
            )
        values = table.select([c.name for c in self.columns]).cast(arrow_schema(self.columns))
        arrays = [_one_array(column) for column in values.columns]
        self._index(keys, versions, arrays)

    def _index(self, keys: Ints, versions: Ints, arrays: list[Any]) -> None:
        self._keys, self._versions, self._arrays = keys, versions, arrays
        all_rows = _Order(keys, versions, np.arange(len(keys)))
        self._orders = [
            all_rows
            if array.null_count == 0
            else _Order(keys, versions, np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False)))
            for array in arrays
        ]

    def rows(self, keys: Ints, columns: Sequence[Column], as_of: Ints | None) -> list[Any]:
        """Return the arrays of some columns, with a value for each key."""
        found: dict[int, Any] = {}  # columns without nulls share an order
        arrays = []
        for column in columns:
            place = self.columns.index(column)
            order = self._orders[place]
            if id(order) not in found:
                found[id(order)] = order.newest(keys, as_of)
            arrays.append(self._arrays[place].take(found[id(order)]))
        return arrays

    def extend(self, keys: Ints, rows: Any, version: int) -> _Table:
        """Return this table with some rows added; its own rows don't change."""
        new = object.__new__(_Table)
        new.columns = self.columns
        arrays = []
        for column, array in zip(self.columns, self._arrays, strict=True):
            there = column.name in rows.schema.names
            arrays.append(
                pa.concat_arrays([array, rows[column.name] if there else pa.nulls(len(keys), array.type)])
            )
        versions = np.concatenate([self._versions, np.full(len(keys), version, np.int64)])
        new._index(np.concatenate([self._keys, keys]), versions, arrays)
        return new


class _Order:
    """Rows sorted by (key, version); the number of a pair is key's place * versions + version's place."""

    def __init__(self, keys: Ints, versions: Ints, rows: Ints) -> None:
        self._keys, key_at = np.unique(keys[rows], return_inverse=True)
        self._versions, version_at = np.unique(versions[rows], return_inverse=True)
        pairs = key_at * max(1, len(self._versions)) + version_at
        order = np.argsort(pairs, kind="stable")  # among equal pairs, the last row is used
        self._pairs, self._rows = pairs[order], rows[order]

    def newest(self, keys: Ints, as_of: Ints | None) -> Any:
        """Find each key's newest row not after as_of, as an Arrow array; null if there is none."""
        if len(self._rows) == 0:
            return pa.nulls(len(keys), pa.int64())
        key_at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        count = len(self._versions)
        before = count if as_of is None else np.searchsorted(self._versions, as_of, side="right")
        last = np.searchsorted(self._pairs, key_at * count + before) - 1
        there = (self._keys[key_at] == keys) & (last >= 0) & (self._pairs[last] // count == key_at)
        return pa.array(self._rows[last], mask=~there)


def _ints(name: str, table: Any, column: str, *, times: bool = False) -> Ints:
    array = _one_array(table[column])
    if not pa.types.is_integer(array.type) or array.null_count:
        raise DataError(
            f"ArrowSource: table {name!r}: column {column!r} must be integers without nulls, it is "
            f"{array.type} with {array.null_count} nulls"
        )
    if pa.types.is_uint64(array.type) and not times:
        return array.to_numpy().view(np.int64)  # the same bits, as for requested keys
    try:
        return array.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise DataError(f"ArrowSource: table {name!r}: column {column!r}: {error}") from error


def _one_array(chunked: Any) -> Any:
    return pa.concat_arrays(chunked.chunks) if chunked.num_chunks else pa.nulls(0, chunked.type)

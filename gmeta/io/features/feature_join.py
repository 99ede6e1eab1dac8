"""Joining features into the elements of a dataset while it is read, and features in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import tensorflow as tf

from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.core.schema import Column
from gmeta.io.features.cells import FetchPolicy, arrow_schema, column_of, default_of
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


@tf.autograph.experimental.do_not_convert
def join_features(
    dataset: tf.data.Dataset,
    source: FeatureSource,
    table: str,
    *,
    key: str,
    columns: Sequence[str],
    as_of: str | None = None,
    prefix: str = "",
    num_parallel_calls: int = 2,
) -> tf.data.Dataset:
    """Add the features of the keys in a column to each element (9N-LLM's join while reading).

    Each element makes one call of `FeatureSource.multi_get`: its keys are fetched together, and equal keys
    once.

    The join runs in Python. The call holds Python's global lock except while it waits for the store, so
    ``num_parallel_calls`` hides the store's latency, but uses no more than one core of this process. To use
    more cores, join in workers: open the source in the function that `gmeta.io.distribute` sends to them. The
    dataset refers to an object of this process, so its graph can't be saved.

    Args:
      dataset: A dataset of dicts with ``"columns"``, as `gmeta.io.groups` makes them, or with
        ``"features"``, as `gmeta.io.tasks` makes them: name -> (N,) tensor, or RaggedTensor (N, None).
      source: The source of the features. Its policy must not return nulls, which tensors can't represent.
      table: The source's table.
      key: The column of keys, int64, (N,) or (N, None).
      columns: Columns of the table.
      as_of: The column of versions, such as ``"timestamp"``, int64 (N,), so that a row gets the features as
        of its own time. None: the newest features.
      prefix: A prefix of the new columns' names.
      num_parallel_calls: Number of elements that are joined in parallel; their order is kept.

    Returns:
      The dataset, whose elements have the new columns in the same dict: int64 or float32, with the shape of
      the key's column, plus one ragged dimension for a list.

    Raises:
      ConfigError: A column doesn't exist, exists already, or is of the wrong form.
      tf.errors.OpError: While iterating; `gmeta.io.reader_stats.data_errors` reduces it to one line.

    Example:
      >>> source = RocksDBSource("features", policy=FetchPolicy(missing="default"))  # doctest: +SKIP
      >>> warm = groups("data/warm", groups_per_element=32)
      >>> joined = join_features(warm, source, "item", key="item", columns=["price"], as_of="timestamp")
    """
    wanted = source.columns(table, columns)
    part = _part(dataset.element_spec)
    spec = dataset.element_spec[part]
    names = [prefix + column.name for column in wanted]
    _check(spec, part, key, as_of, names)
    if source.policy.missing == "null":
        raise ConfigError(
            "join_features: tensors hold no nulls; take FetchPolicy(missing='default'), or 'raise'"
        )
    if source.policy.missing == "default":
        for column in wanted:
            default_of(column, source.policy)
    types = [dtype for column in wanted for dtype in _types(column)]

    def fetch(keys: Any, when: Any) -> list[Any]:
        try:
            rows = source.multi_get(table, keys, columns, when if as_of else None)
        except GmetaError as error:
            raise RuntimeError(f"gmeta: {error}") from error
        return [
            array
            for column, values in zip(wanted, rows.columns, strict=True)
            for array in _numpy(column, values)
        ]

    def join(element: dict[str, Any]) -> dict[str, Any]:
        keys = element[part][key]
        ragged = isinstance(keys, tf.RaggedTensor)
        when = element[part][as_of] if as_of else tf.zeros([0], tf.int64)
        if ragged and as_of:
            when = tf.repeat(when, keys.row_lengths())
        # Stateless: an element's features depend on its keys and versions alone, so iterators can be saved.
        arrays = iter(
            tf.numpy_function(fetch, [keys.flat_values if ragged else keys, when], types, stateful=False)
        )
        added = {}
        for name, column in zip(names, wanted, strict=True):
            values = tf.ensure_shape(next(arrays), [None])
            if column.is_list:
                splits = tf.ensure_shape(next(arrays), [None])
                values = tf.RaggedTensor.from_row_splits(values, splits, validate=False)
            added[name] = keys.with_flat_values(values) if ragged else values
        return {**element, part: {**element[part], **added}}

    return dataset.map(join, num_parallel_calls=num_parallel_calls, deterministic=True)


def _part(spec: Any) -> str:
    for part in ("columns", "features"):
        if isinstance(spec, dict) and isinstance(spec.get(part), dict):
            return part
    raise ConfigError(
        "join_features: an element must be a dict with 'columns' or 'features' in it, as groups and "
        f"tasks make them, not {spec}"
    )


def _check(spec: dict[str, Any], part: str, key: str, as_of: str | None, names: list[str]) -> None:
    for role, name, ranks in (("key", key, (1, 2)), ("as_of", as_of, (1,))):
        if name is None:
            continue
        if name not in spec:
            raise ConfigError(
                f"join_features: no column {role}={name!r} in {part!r}; it has {', '.join(spec)}"
                + ("; name it in tasks(features=...)" if part == "features" else "")
            )
        if spec[name].dtype != tf.int64 or spec[name].shape.rank not in ranks:
            raise ConfigError(f"join_features: column {role}={name!r} must be int64, got {spec[name]}")
    there = [name for name in names if name in spec]
    if there:
        raise ConfigError(
            f"join_features: {part!r} has {', '.join(there)} already; give a prefix, or leave it out"
        )


def _types(column: Column) -> list[Any]:
    return [tf.as_dtype(column.dtype)] + [tf.int64] * column.is_list


def _numpy(column: Column, values: Any) -> list[Any]:
    """Return the arrays of a column without nulls: its values and, for a list, its row splits."""
    if not column.is_list:
        return [values.to_numpy()]
    return [
        values.flatten().to_numpy(),
        np.asarray(values.offsets.to_numpy() - values.offsets[0].as_py(), np.int64),
    ]

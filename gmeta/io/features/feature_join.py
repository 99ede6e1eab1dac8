"""Joining features into the elements of a dataset while it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError, GmetaError
from gmeta.core.schema import Column
from gmeta.io.features.cells import default_of
from gmeta.io.features.feature_source import FeatureSource


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

"""Rows that an exported model reads for ids that were never trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection
from gmeta.layers.embedding.merge_plan import MergedTable
from gmeta.ops import HashTable, UnknownRows, initial_rows_of

Unknown: TypeAlias = "Literal['initial', 'zeros'] | Mapping[str, npt.ArrayLike]"
"""``"initial"``: the row that training would have started the id with, as an evaluation reads it.
``"zeros"``: a row of zeros. A mapping: embedding table -> the one row, (dim,), that all its unknown ids read;
tables that the mapping doesn't name use ``"initial"``."""


def unknown_rows(
    unknown: Unknown, collections: Iterable[EmbeddingCollection]
) -> Callable[[HashTable], UnknownRows]:
    """Make the function that gives `gmeta.ops.portable_ops` the rows of unknown keys in a physical table.

    Raises:
      ConfigError: ``unknown`` is another word, or names a table that doesn't exist, or has a row of another
        width, or one that isn't finite.
    """
    if unknown == "initial":
        return initial_rows_of
    if unknown == "zeros":
        return _zeros
    if not isinstance(unknown, Mapping):
        raise ConfigError(f"unknown must be 'initial', 'zeros' or rows by table, got {unknown!r}")
    merged_of = {
        id(table): merged
        for collection in collections
        for table, merged in zip(collection.tables, collection.merged, strict=True)
    }
    names = [name for merged in merged_of.values() for name in merged.tables]
    strange = sorted(set(unknown) - set(names))
    if strange:
        raise ConfigError(f"unknown names {', '.join(strange)}, but the tables are {', '.join(names)}")

    def rows_of(table: HashTable) -> UnknownRows:
        merged = merged_of.get(id(table))
        return initial_rows_of(table) if merged is None else _take_rows(unknown, table, merged)

    return rows_of


def _zeros(table: HashTable) -> UnknownRows:
    return lambda keys: tf.zeros([tf.size(keys), table.dim])


def _take_rows(unknown: Mapping[str, npt.ArrayLike], table: HashTable, merged: MergedTable) -> UnknownRows:
    rows = np.zeros((len(merged.tables), merged.dim), np.float32)
    for number, name in enumerate(merged.tables):
        if name in unknown:
            row = np.asarray(unknown[name], np.float32)
            if row.shape != (merged.dim,):
                raise ConfigError(
                    f"unknown[{name!r}] must have shape ({merged.dim},), the table's width; got {row.shape}"
                )
            if not np.isfinite(row).all():
                raise ConfigError(f"unknown[{name!r}] must hold finite numbers, got {row}")
            rows[number] = row
    given = np.array([name in unknown for name in merged.tables])
    initial = initial_rows_of(table)

    def read(keys: tf.Tensor) -> tf.Tensor:
        number = tf.bitwise.right_shift(keys, tf.constant(merged.id_bits, tf.int64))
        fixed = tf.gather(tf.constant(rows), number)
        if given.all():
            return fixed
        return tf.where(tf.gather(tf.constant(given), number)[:, tf.newaxis], fixed, initial(keys))

    return read

"""Embeddings of many features out of few dynamic tables, looked up together.

A lookup belongs to the call, not to the layer: it returns the unique rows as a plain tensor and, for every
feature, the positions of its ids among them. A model gathers from the rows, tapes watch them, and their
gradient goes back to the same keys. So one step may make any number of lookups, inside any nesting of
tapes, and support and query ids that stand in one batch are fetched once (G-Meta section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers.feature_config import FeatureConfig
from gmeta.layers.merge_plan import MergedTable, merge_tables
from gmeta.ops.hash_table import HashTable
from gmeta.ops.optimizers import Adam, SparseOptimizer

Ids: TypeAlias = "tf.Tensor | tf.RaggedTensor"
"""A feature's int64 ids: (samples,), or ragged (samples, None) where it has a pooling."""


class CollectionLookup(NamedTuple):
    """The rows that a batch needs, each once.

    Attributes:
      rows: One (unique, dim) float32 tensor for each merged table. Watch these.
      keys: One (unique,) int64 tensor for each merged table.
      positions: Feature -> indices into its table's rows, shaped as the feature's ids.
    """

    rows: tuple[tf.Tensor, ...]
    keys: tuple[tf.Tensor, ...]
    positions: dict[str, Ids]


class EmbeddingCollection(tf.keras.layers.Layer):
    """Dynamic embeddings of categorical features.

    Args:
      features: The features. Tables of equal width and equal initial rows are merged into one physical
        table (see `gmeta.layers.merge_plan`); `plan` tells how.
      optimizer: The sparse optimizer, fused into the tables' update.
      seed: Initial rows are a pure function of (seed, key).

    Raises:
      ConfigError: Features that contradict each other.
      tf.errors.InvalidArgumentError: In a lookup, an id that is negative or too large; it names the
        feature and the limit.

    Example:
      >>> collection = EmbeddingCollection([FeatureConfig("user", 4), FeatureConfig("tags", 4, "mean")])
      >>> ids = {"user": tf.constant([7, 8]), "tags": tf.ragged.constant([[1, 2, 3], []], dtype=tf.int64)}
      >>> vectors = collection(ids)
      >>> vectors["tags"].shape
      TensorShape([2, 4])
    """

    def __init__(
        self,
        features: Sequence[FeatureConfig],
        *,
        optimizer: SparseOptimizer | None = None,
        seed: int = 0,
        name: str = "embeddings",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        self.features = tuple(features)
        self.merged: tuple[MergedTable, ...] = merge_tables(self.features)
        self.tables = [
            HashTable(
                merged.dim,
                optimizer=optimizer or Adam(),
                initializer=merged.initializer,
                seed=seed,
                name=f"{name}/{'+'.join(merged.tables)}",
            )
            for merged in self.merged
        ]

    def plan(self) -> str:
        """How features became tables, one line for each physical table."""
        return "\n".join(
            f"{merged.dim} wide, ids below 2^{merged.id_bits}: "
            + ", ".join(
                f.name if f.name == f.table_name else f"{f.name} -> {f.table_name}" for f in merged.features
            )
            for merged in self.merged
        )

    def lookup(self, inputs: Mapping[str, Ids], *, insert: bool = True) -> CollectionLookup:
        """Fetch the rows of all features' ids, each row once.

        Args:
          inputs: Feature name -> ids. Names that the collection doesn't know are ignored.
          insert: Whether an id that was never seen gets a row of its own; otherwise it reads the row that
            it would start with, and nothing is stored.
        """
        rows, keys, positions = [], [], {}
        for table, merged in zip(self.tables, self.merged, strict=True):
            ids = [self._ids(inputs, feature) for feature in merged.features]
            flat = [_flat(value) for value in ids]
            found = table.lookup(
                tf.concat([_keys(v, merged, f) for v, f in zip(flat, merged.features, strict=True)], axis=0),
                insert=insert,
            )
            rows.append(found.rows)
            keys.append(found.keys)
            parts = tf.split(found.inverse, [tf.shape(value)[0] for value in flat], num=len(flat))
            for feature, value, part in zip(merged.features, ids, parts, strict=True):
                positions[feature.name] = _like(value, part)
        return CollectionLookup(tuple(rows), tuple(keys), positions)

    def embed(self, lookup: CollectionLookup) -> dict[str, tf.Tensor]:
        """Feature -> (samples, dim) vectors, gathered from the lookup's rows and pooled."""
        vectors = {}
        for rows, merged in zip(lookup.rows, self.merged, strict=True):
            for feature in merged.features:
                vectors[feature.name] = _pool(rows, lookup.positions[feature.name], feature)
        return vectors

    def concat(self, lookup: CollectionLookup) -> tf.Tensor:
        """All features' vectors side by side, in the features' order: (samples, sum of dims)."""
        vectors = self.embed(lookup)
        return tf.concat([vectors[feature.name] for feature in self.features], axis=-1)

    def apply_gradients(
        self,
        lookup: CollectionLookup,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
        learning_rate: tf.Tensor | float | None = None,
    ) -> None:
        """Update the rows of a lookup with the gradients of a loss with respect to ``lookup.rows``."""
        for table, keys, gradient in zip(self.tables, lookup.keys, gradients, strict=True):
            table.apply_gradients(keys, tf.convert_to_tensor(gradient), learning_rate=learning_rate)

    def call(self, inputs: Mapping[str, Ids], training: bool | None = None) -> dict[str, tf.Tensor]:
        """Feature -> (samples, dim) vectors; ids are given rows of their own only in training."""
        return self.embed(self.lookup(inputs, insert=bool(training)))

    def _ids(self, inputs: Mapping[str, Ids], feature: FeatureConfig) -> Ids:
        if feature.name not in inputs:
            raise ConfigError(
                f"feature {feature.name!r} is missing from the input; it has {', '.join(inputs)}"
            )
        ids = inputs[feature.name]
        ragged = isinstance(ids, tf.RaggedTensor)
        if ragged != (feature.pooling is not None):
            wanted = "a RaggedTensor" if feature.pooling else "a Tensor of shape (samples,)"
            raise ConfigError(
                f"feature {feature.name!r} has pooling={feature.pooling!r} and takes {wanted}, "
                f"got a {'RaggedTensor' if ragged else 'Tensor'} of shape {ids.shape}"
            )
        return tf.cast(ids, tf.int64)


def _flat(ids: Ids) -> tf.Tensor:
    return ids.flat_values if isinstance(ids, tf.RaggedTensor) else ids


def _like(ids: Ids, flat: tf.Tensor) -> Ids:
    return ids.with_flat_values(flat) if isinstance(ids, tf.RaggedTensor) else flat


def _keys(ids: tf.Tensor, merged: MergedTable, feature: FeatureConfig) -> tf.Tensor:
    """Raw ids as keys of the merged table; a negative or too large one is refused."""
    # An arithmetic shift leaves 0 for the ids that fit, and for those alone: negative ones leave -1.
    excess = tf.bitwise.right_shift(ids, tf.constant(merged.id_bits, tf.int64))
    check = tf.debugging.Assert(
        tf.reduce_all(tf.equal(excess, 0)),
        [
            f"feature {feature.name}: ids must be in [0, {merged.id_limit}); got some in the range of",
            tf.reduce_min(ids),
            "to",
            tf.reduce_max(ids),
        ],
    )
    with tf.control_dependencies([check] if check is not None else []):
        return tf.bitwise.bitwise_or(ids, tf.constant(merged.key_prefix(feature), tf.int64))


def _pool(rows: tf.Tensor, positions: Ids, feature: FeatureConfig) -> tf.Tensor:
    if not isinstance(positions, tf.RaggedTensor):
        return tf.gather(rows, positions)
    samples = positions.nrows()
    total = tf.math.unsorted_segment_sum(
        tf.gather(rows, positions.flat_values), positions.value_rowids(), samples
    )
    if feature.pooling == "sum":
        return total
    count = tf.cast(positions.row_lengths(), rows.dtype)[:, tf.newaxis]
    return tf.math.divide_no_nan(total, tf.sqrt(count) if feature.pooling == "sqrtn" else count)

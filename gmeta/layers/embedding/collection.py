"""Embeddings of many features out of few dynamic tables, looked up together.

A lookup belongs to the call, not to the layer: it returns the unique rows as a plain tensor and, for every
feature, the positions of its ids among them. A model gathers from the rows, tapes watch them, and their
gradient goes back to the same keys. So one step may make any number of lookups, inside any nesting of
tapes, and support and query ids that stand in one batch are fetched once (G-Meta section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.layers.embedding import keras_config as settings
from gmeta.layers.embedding.feature_config import FeatureConfig
from gmeta.layers.embedding.ids import Ids, feature_ids, flat_ids, like_ids, numbers_of_texts
from gmeta.layers.embedding.merge_plan import MergedTable, merge_tables
from gmeta.layers.embedding.plan_check import PlanCheck
from gmeta.layers.embedding.plan_text import plan_table
from gmeta.layers.embedding.pooling import pool
from gmeta.layers.embedding.table_arrays import load_table, save_table
from gmeta.layers.embedding.table_config import check_optimizer
from gmeta.layers.embedding.table_weights import HoldsTables
from gmeta.layers.exchange.pieces import SentKeys, exchange_values, fetch_rows, send_keys
from gmeta.layers.exchange.recorded_lookups import RecordedLookups, active_recording
from gmeta.layers.exchange.sample_counts import active_step_samples
from gmeta.ops.device import DEVICE_NAMES, Device, Place
from gmeta.ops.keys.key_merge import merge_keys
from gmeta.ops.portable import is_portable
from gmeta.ops.table.hash_table import HashTable
from gmeta.ops.table.optimizer_change import take_records_of
from gmeta.optimizers import Adam, SparseOptimizer

WIRE_DTYPES = ("float32", "float16", "bfloat16")


class CollectionLookup(NamedTuple):
    """The rows that a batch needs, each once.

    Attributes:
      rows: One (unique, dim) float32 tensor for each merged table. Watch these.
      keys: One (unique,) int64 tensor for each merged table.
      positions: Feature -> indices into its table's rows, shaped as the feature's ids.
      sent: The exchange that the rows came by, on several ranks; the gradients go back by it.
    """

    rows: tuple[tf.Tensor, ...]
    keys: tuple[tf.Tensor, ...]
    positions: dict[str, Ids]
    sent: SentKeys | None = None


class _Found(NamedTuple):
    """For each table rows, their keys, and where among them those stand that were asked for."""

    rows: tuple[tf.Tensor, ...]
    keys: tuple[tf.Tensor, ...]
    inverse: tuple[tf.Tensor, ...]
    sent: SentKeys | None


@tf.keras.saving.register_keras_serializable("gmeta")
class EmbeddingCollection(HoldsTables, tf.keras.layers.Layer):
    r"""Dynamic embeddings of categorical features, as a layer of any Keras model.

    Called on a dict of ids, it gives a dict of vectors:

    =============================================  =================  =========================
    ids of a feature (see below)                   combiner           its vectors
    =============================================  =================  =========================
    Tensor (samples,)                              None               (samples, dim)
    Tensor (samples, length)                       None               (samples, length, dim)
    RaggedTensor or SparseTensor (samples, None)   None               ragged (samples, None, dim)
    Tensor, RaggedTensor or SparseTensor, rank 2   sum, mean, sqrtn   (samples, dim)
    =============================================  =================  =========================

    Ids are integers from 0 on, below the limit that `plan` shows; with ``FeatureConfig(hash=True)`` they are
    strings, or any 64-bit integers. Where samples have different numbers of ids, pass them ragged or sparse;
    or, for a feature with a combiner, as a dense Tensor filled up with -1 (``""`` among strings), which
    stands for no id. Rows are float32; under a ``mixed_float16`` policy the vectors that ``call`` gives are
    float16.

    Training: inside a `gmeta.models.Model`, or within `record_lookups`, the layer may be called any number of
    times in a step and shared between towers; gradients to the same key are summed before one update of each
    table. With ``training=False`` nothing is stored: an id that was never seen reads the row that it would
    start with. So it is too while ``layer.trainable`` is False.

    Args:
      features: The features. Tables of equal width and policy (initial rows, admission, eviction,
        precision, optimizer) are merged into one physical table (see `gmeta.layers.embedding.merge_plan`);
        `plan` tells how.
      optimizer: The sparse optimizer, fused into the tables' update: one of `gmeta.optimizers`; a table's own
        comes first. Where its
        ``learning_rate`` is a number or a schedule, that is the tables' rate; where it is None, they follow
        the current rate of the Keras optimizer, schedules and callbacks included. What else the Keras
        optimizer has is then for dense weights alone. None: the tables follow the Keras optimizer that a
        model is compiled with, in kind, hyperparameters, rate, decay and clipping
        (`gmeta.models.training.optimizer.table_rule`); in loops without `compile` they have
        ``Adam(learning_rate=None)``.
      seed: Initial rows are a pure function of (seed, key).
      wire_dtype: What rows and gradients travel as between ranks. ``"float16"`` and ``"bfloat16"`` halve the
        bytes and round, whatever the numbers' magnitude; `gmeta.ops.pack_rows` says by how much.
      device: Where the tables are, as `gmeta.ops.HashTable` takes it. On ``"gpu"``, what a lookup gives stays
        there: rows, positions, and the gradients that come back.
      device_rows: How many rows of each table a GPU's memory is to hold, likewise.

    On several ranks (after ``gmeta.init()`` under a launcher) each rank holds the rows of the keys that it
    owns, and a lookup fetches the others': the ids of all tables in one exchange, their rows in another (see
    `gmeta.layers.exchange.pieces`). All ranks then make the same lookups, with no ids where they have none.

    Raises:
      ConfigError: Features that contradict each other; inputs of a shape that doesn't go with their feature;
        a call with ``training=True`` where nothing records the lookups, so that the rows wouldn't be trained.
      tf.errors.InvalidArgumentError: In a lookup, an id that is negative or too large; it names the
        feature, the id, its position and the limit.

    Example:
      >>> tags = FeatureConfig("tags", dim=4, combiner="mean")
      >>> collection = EmbeddingCollection([FeatureConfig("user", dim=4), tags])
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
        wire_dtype: str = "float32",
        device: Device = "auto",
        device_rows: int | None = None,
        name: str = "embeddings",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        check_optimizer(optimizer, name)
        if wire_dtype not in WIRE_DTYPES:
            raise ConfigError(f"wire_dtype must be one of {', '.join(WIRE_DTYPES)}, got {wire_dtype!r}")
        self.features = tuple(features)
        self._optimizer = optimizer
        self.seed = seed
        self.wire_dtype = wire_dtype
        self.device = device
        self.device_rows = device_rows
        self.merged: tuple[MergedTable, ...] = merge_tables(self.features)
        self.tables = [
            HashTable(
                merged.dim,
                optimizer=merged.policy.optimizer or optimizer or Adam(learning_rate=None),
                initializer=merged.policy.initializer,
                admission=merged.policy.admission,
                eviction=merged.policy.eviction,
                precision=merged.policy.precision,
                seed=seed,
                name=f"{name}/{'+'.join(merged.tables)}",
                device=device,
                device_rows=device_rows,
            )
            for merged in self.merged
        ]
        for merged, table in zip(self.merged, self.tables, strict=True):
            if optimizer is None and merged.policy.optimizer is None:
                table.chosen_by, table.take_records_of = "nobody", take_records_of
        self._plan_check = PlanCheck(self.name, self.merged)

    def plan(self, print_fn: Callable[[str], Any] | None = None) -> None:
        """Print how features became tables, one line for each physical table.

        Args:
          print_fn: Is called with the text; `print` where it isn't said.
        """
        (print_fn or print)(plan_table(self.merged, self.tables))

    def lookup(self, inputs: Mapping[str, Any], *, insert: bool | tf.Tensor = True) -> CollectionLookup:
        """Fetch the rows of all features' ids, each row once.

        Args:
          inputs: Feature name -> ids. Names that the collection doesn't know are ignored.
          insert: Whether an id that was never seen gets a row of its own; otherwise it reads the row that
            it would start with, and nothing is stored.
        """
        ids = numbers_of_texts({feature.name: feature_ids(inputs, feature) for feature in self.features})
        keys = [self._keys(merged, ids) for merged in self.merged]
        found = self._lookup_here(keys, insert) if self._has_all_rows() else self._exchange(keys, insert)
        positions: dict[str, Ids] = {}
        for merged, table, inverse in zip(self.merged, self.tables, found.inverse, strict=True):
            if table.device == "gpu":  # TensorFlow cuts int32 in host memory
                inverse = tf.cast(inverse, tf.int64)
            sizes = [tf.shape(flat_ids(ids[feature.name]))[0] for feature in merged.features]
            for feature, part in zip(merged.features, tf.split(inverse, sizes, num=len(sizes)), strict=True):
                positions[feature.name] = like_ids(ids[feature.name], part)
        return CollectionLookup(found.rows, found.keys, positions, found.sent)

    def _keys(self, merged: MergedTable, ids: Mapping[str, Ids]) -> tf.Tensor:
        return merge_keys(
            [merged.ids_of(feature, flat_ids(ids[feature.name])) for feature in merged.features],
            features=[feature.name for feature in merged.features],
            prefixes=[merged.key_prefix(feature) for feature in merged.features],
            id_bits=merged.id_bits,
        )

    def _has_all_rows(self) -> bool:
        """Whether this rank can answer alone.

        Raises:
          ConfigError: It is to answer alone, in an exported graph, and can't.
        """
        size = collectives.world().size
        if is_portable() and size > 1:
            raise ConfigError(
                f"{self.name!r} can't be exported by one of {size} ranks, which has only the rows that it "
                "owns: save a sharded checkpoint, and export from a process of one rank that has loaded it"
            )
        return size == 1

    def _lookup_here(self, keys: Sequence[tf.Tensor], insert: bool | tf.Tensor) -> _Found:
        found = [table.lookup(each, insert) for table, each in zip(self.tables, keys, strict=True)]
        return _Found(
            tuple(each.rows for each in found),
            tuple(each.keys for each in found),
            tuple(each.inverse for each in found),
            None,
        )

    def _exchange(self, keys: Sequence[tf.Tensor], insert: bool | tf.Tensor) -> _Found:
        step = active_step_samples()
        device = self._place()
        sent = send_keys(keys, samples=0 if step is None else step.own, device=device, name=self.name)
        if step is not None:
            step.hear(sent.owned.notes)
        rows = exchange_values(
            sent,
            fetch_rows(sent, self.tables, insert=insert),
            [table.dim for table in self.tables],
            wire_dtype=tf.as_dtype(self.wire_dtype),
            device=device,
            name=self.name,
        )
        return _Found(rows, sent.routed.keys, sent.routed.inverse, sent)

    def _place(self) -> Place:
        """Where all tables are; host memory where they are in different places."""
        return "gpu" if {table.device for table in self.tables} == {"gpu"} else "cpu"

    def embed(self, lookup: CollectionLookup) -> dict[str, Any]:
        """Feature -> its float32 vectors, gathered from the lookup's rows and pooled."""
        return {
            feature.name: pool(rows, lookup.positions[feature.name], feature.combiner)
            for rows, merged in zip(lookup.rows, self.merged, strict=True)
            for feature in merged.features
        }

    def concat(self, lookup: CollectionLookup) -> tf.Tensor:
        """All features' vectors side by side, in the features' order: (samples, sum of dims).

        Raises:
          ConfigError: A feature has a vector for each of several ids a sample.
        """
        single = [f.name for f in self.features if _is_single(f, lookup.positions[f.name])]
        if len(self.merged) == 1 and len(single) == len(self.features):
            side_by_side = tf.gather(lookup.rows[0], self._stack(lookup, single, axis=1))
            return tf.reshape(side_by_side, [-1, len(single) * self.features[0].dim])
        vectors: dict[str, Any] = {}
        for rows, merged in zip(lookup.rows, self.merged, strict=True):
            # One gather of those with one id a sample: of several, all gradients would have to be added up.
            together = [feature.name for feature in merged.features if feature.name in single]
            if together:
                of_each = tf.unstack(tf.gather(rows, self._stack(lookup, together, axis=0)))
                vectors |= zip(together, of_each, strict=True)
            for feature in merged.features:
                if feature.name not in single:
                    vectors[feature.name] = pool(rows, lookup.positions[feature.name], feature.combiner)
        for name, vector in vectors.items():
            if vector.shape.rank != 2:
                raise ConfigError(
                    f"feature {name!r} has vectors of shape {vector.shape} and can't stand beside the "
                    "others: give it a combiner"
                )
        return tf.concat([vectors[feature.name] for feature in self.features], axis=-1)

    def _stack(self, lookup: CollectionLookup, names: Sequence[str], axis: int) -> tf.Tensor:
        # Where the positions are; from host memory one copy to a GPU rather than one a feature.
        with tf.device(DEVICE_NAMES[self._place()]):
            return tf.stack([lookup.positions[name] for name in names], axis=axis)

    def apply_gradients(
        self,
        lookup: CollectionLookup,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
        learning_rate: tf.Tensor | float | None = None,
    ) -> None:
        """Update the rows of a lookup with the gradients of a loss with respect to ``lookup.rows``.

        Args:
          lookup: The lookup.
          gradients: One for each of its ``rows``. On several ranks they are added up: give each rank's share
            of the gradient of the global loss.
          learning_rate: The tables' rate where their optimizer has none of its own.
        """
        self.recording_of(lookup).apply_gradients(gradients, learning_rate)

    def recording_of(self, lookup: CollectionLookup) -> RecordedLookups:
        """A lookup that was made by hand, as `record_lookups` would have recorded it."""
        lookups = RecordedLookups()
        lookups.add(self.tables, lookup, tf.as_dtype(self.wire_dtype))
        return lookups

    @tf.autograph.experimental.do_not_convert  # has no Python branch on a tensor: tracing is quicker so
    def call(self, inputs: Mapping[str, Any], training: bool | tf.Tensor | None = None) -> dict[str, Any]:
        """Feature -> vectors, in the layer's compute dtype."""
        train = False if training is None or not self.trainable else training
        lookup = self.lookup(inputs, insert=train)
        if train is not False:
            self._record(lookup)
        return {name: tf.cast(v, self.compute_dtype) for name, v in self.embed(lookup).items()}

    def _record(self, lookup: CollectionLookup) -> None:
        recording = active_recording()
        if recording is None:
            raise ConfigError(
                f"{self.name!r} is called with training=True where nothing records its lookups, so its rows "
                "would not be trained: use gmeta.models.Model in place of tf.keras.Model, or in a loop of "
                "your own `with gmeta.layers.record_lookups(tape) as lookups:`; to read, call it with "
                "training=False"
            )
        recording.add(self.tables, lookup, tf.as_dtype(self.wire_dtype))

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this layer again, as JSON can hold them; its rows start anew."""
        return {
            **super().get_config(),
            "features": [settings.to_config(feature) for feature in self.features],
            "optimizer": settings.to_config(self._optimizer),
            "seed": self.seed,
            "wire_dtype": self.wire_dtype,
            "device": self.device,
            "device_rows": self.device_rows,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EmbeddingCollection:
        """The layer that `get_config` described."""
        made = {
            "features": [settings.from_config(feature) for feature in config["features"]],
            "optimizer": settings.from_config(config["optimizer"]),
        }
        return cls(**{**config, **made})

    # Keras' own formats, `.keras` and `.weights.h5`. tf.train.Checkpoint finds the tables by itself.

    def save_own_variables(self, store: Any) -> None:
        """Write the tables' whole records."""
        store["plan"] = self._plan_check.as_array()
        for index, table in enumerate(self.tables):
            save_table(table, store, f"table{index}")

    def load_own_variables(self, store: Any) -> None:
        """Read what `save_own_variables` wrote, in place of what the tables hold."""
        self._plan_check.check_array(store["plan"])
        for index, table in enumerate(self.tables):
            load_table(table, store, f"table{index}")


def _is_single(feature: FeatureConfig, positions: Ids) -> bool:
    """Whether samples have one id each."""
    return feature.combiner is None and isinstance(positions, tf.Tensor) and positions.shape.rank == 1

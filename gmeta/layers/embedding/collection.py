"""Embeddings of many features, looked up together in a few dynamic tables.

A lookup belongs to the call, not to the layer: it returns the unique rows as a plain tensor and, for every
feature, the positions of its ids among them. A model gathers from the rows, tapes watch them, and their
gradient goes back to the same keys. So one step may make any number of lookups, inside any nesting of
tapes, and a batch's support and query ids are fetched once (G-Meta section 2.1.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.merged_tables import Fold, check_fold, fold_of
from gmeta.core.step import begin_span, step_context
from gmeta.layers.embedding import feature_config as settings
from gmeta.layers.embedding.feature_config import (
    FeatureConfig,
    Ids,
    feature_ids,
    flat_ids,
    is_single,
    like_ids,
    numbers_of_texts,
)
from gmeta.layers.embedding.merge_plan import FeatureOrder, MergedTable, merge_tables, plan_table
from gmeta.layers.embedding.pooling import join_vectors, pool
from gmeta.layers.embedding.saved_tables import SavesItsTables
from gmeta.layers.embedding.table_config import check_optimizer
from gmeta.layers.embedding.table_weights import HoldsTables
from gmeta.layers.exchange.fetch import Fetch, Requested, hear_samples, note, prefetch
from gmeta.layers.exchange.pieces import SentKeys
from gmeta.layers.exchange.recorded_lookups import RecordedLookups
from gmeta.ops.device import DEVICE_NAMES, Device, freeze, is_portable, shared_place, split_numbers
from gmeta.ops.id_hash import merge_keys
from gmeta.ops.row_buffers import WIRE_DTYPES
from gmeta.ops.table.hash_table import HashTable
from gmeta.optimizers import Adam, SparseOptimizer
from gmeta.policies import Tiers


class CollectionLookup(NamedTuple):
    """The unique rows that a batch needs.

    Attributes:
      rows: One (unique, dim) float32 tensor for each merged table. Watch these.
      keys: One (unique,) int64 tensor for each merged table.
      positions: Feature -> indices into its table's rows, shaped as the feature's ids. A feature of several
        tables has such indices for each, by the names of its `gmeta.layers.FeatureConfig.parts`.
      sent: On several ranks, the exchange that brought the rows; the gradients go back the same way.
      distinct: Whether a table's keys are distinct.
    """

    rows: tuple[tf.Tensor, ...]
    keys: tuple[tf.Tensor, ...]
    positions: dict[str, Ids]
    sent: SentKeys | None = None
    distinct: bool = True


@tf.keras.saving.register_keras_serializable("gmeta")
class EmbeddingCollection(HoldsTables, SavesItsTables, tf.keras.layers.Layer):
    r"""Dynamic embeddings of categorical features, as a layer for any Keras model.

    The layer maps a dict of ids to a dict of vectors:

    =============================================  =================  =========================
    ids of a feature (see below)                   combiner           its vectors
    =============================================  =================  =========================
    Tensor (samples,)                              None               (samples, dim)
    Tensor (samples, length)                       None               (samples, length, dim)
    RaggedTensor or SparseTensor (samples, None)   None               ragged (samples, None, dim)
    Tensor, RaggedTensor or SparseTensor, rank 2   sum, mean, sqrtn   (samples, dim)
    =============================================  =================  =========================

    dim is ``FeatureConfig.width``. A feature of several tables reads its ids once, and its vectors are those
    of the tables, side by side or added up. It trains like features of one table each that are fed the same
    ids, bit for bit, and their checkpoints load into it.

    Ids are integers from 0 on, below the limit that `plan` shows. With ``FeatureConfig(hash=True)`` they are
    strings or any 64-bit integers; uint64 are taken as the int64 of the same bits. If samples have different
    numbers of ids, pass them ragged or sparse. A feature with a combiner also accepts a dense Tensor padded
    with -1 (``""`` for strings), which stands for no id. Rows are float32; under a ``mixed_float16`` policy
    ``call`` returns float16 vectors.

    Training: inside a `gmeta.models.Model`, or within `record_lookups`, a step may call the layer any number
    of times and share it between towers. Gradients to the same key are summed before one update of each
    table. With ``training=False``, or while ``layer.trainable`` is False, nothing is stored: an unseen id
    reads the row that it would start with.

    Args:
      features: The features. Tables of equal width and policy (initial rows, admission, eviction,
        precision, optimizer) are merged into one physical table (see `gmeta.layers.embedding.merge_plan`);
        `plan` shows the result.
      optimizer: The sparse optimizer, one of `gmeta.optimizers`, fused into the tables' update. A table's own
        optimizer takes precedence. If the optimizer's ``learning_rate`` is a number or a schedule, the tables
        use that rate. If the rate is None, they follow the current rate of the Keras optimizer, schedules and
        callbacks included; the Keras optimizer's other settings then apply to dense weights only.
        None: the tables follow the Keras optimizer that a model is compiled with, in kind, hyperparameters,
        rate, decay and clipping (`gmeta.training.table_rule`); in loops without `compile`
        they use ``Adam(learning_rate=None)``.
      seed: Initial rows are a pure function of (seed, key).
      wire_dtype: The dtype in which rows and gradients travel between ranks. ``"float16"`` and
        ``"bfloat16"`` halve the bytes and round, whatever the numbers' magnitude;
        `gmeta.ops.row_buffers.pack_rows` gives the errors.
      tiers: `gmeta.policies.Tiers`. ``Tiers(host_bytes, ssd)`` bounds the rows of all tables in host memory,
        and the others are on a drive; ``Tiers(hbm_rows=n)`` bounds those of each table in the GPU's memory,
        and the others are in host memory; all three arguments together make three tiers.
      device: Where the tables are, as in `gmeta.ops.HashTable`. On ``"gpu"``, a lookup's rows, its positions
        and the gradients that come back stay on the GPU.
      name: The layer's name, with which the names of its tables begin. None: ``"embeddings"``; in a
        functional `gmeta.models.Model` of several collections without names, the further ones are
        ``"embeddings_1"``, ….
      fold: How 64-bit numbers become the ids of features with ``hash=True`` (`gmeta.ops.id_hash.fold_ids`).
        ``"xor"`` is for tables from before gmeta had ``"mix"``. It is rarely needed: a layer takes the fold
        of a checkpoint that it loads, and of a config.

    On several ranks (after ``gmeta.init()`` under a launcher) each rank holds the rows of the keys that it
    owns. A lookup fetches the other rows from their owners: one exchange sends the ids of all tables, another
    returns the rows (see `gmeta.layers.exchange.pieces`). All ranks must then make the same lookups; a rank
    without data looks up no ids.

    Raises:
      ConfigError: Features contradict each other; an input's shape doesn't fit its feature; or the layer is
        called with ``training=True`` while nothing records the lookups, so the rows wouldn't be trained.
      tf.errors.InvalidArgumentError: In a lookup, an id is negative or too large. The message names the
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
        tiers: Tiers | None = None,
        device: Device = "auto",
        fold: Fold = "mix",
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.has_own_name = name is not None
        name = name or "embeddings"
        super().__init__(name=name, **kwargs)
        check_optimizer(optimizer, name)
        if wire_dtype not in (names := [dtype.name for dtype in WIRE_DTYPES]):
            raise ConfigError(f"wire_dtype must be one of {', '.join(names)}, got {wire_dtype!r}")
        self.features = tuple(features)
        self._optimizer = optimizer
        self.seed = seed
        self.wire_dtype = wire_dtype
        self.tiers = tiers
        self.device = device
        self.merged: tuple[MergedTable, ...] = merge_tables(self.features, check_fold(f"{name!r}", fold))
        optimizers = [each.policy.optimizer or optimizer or Adam(learning_rate=None) for each in self.merged]
        widths = [m.dim + own.slot_floats(m.dim) for m, own in zip(self.merged, optimizers, strict=True)]
        shares = [None] * len(widths) if tiers is None else tiers.divide([8 + 4 * width for width in widths])
        tables = [
            HashTable(
                merged.dim,
                optimizer=own,
                initializer=merged.policy.initializer,
                admission=merged.policy.admission,
                eviction=merged.policy.eviction,
                precision=merged.policy.precision,
                seed=seed,
                name=merged.name_in(name),
                tiers=share,
                device=device,
                follows=optimizer is None and merged.policy.optimizer is None,
            )
            for merged, own, share in zip(self.merged, optimizers, shares, strict=True)
        ]
        for merged, table in zip(self.merged, tables, strict=True):
            table.merged_keys, table.divided = merged.keys(fold), True
        self._order = FeatureOrder(self.name, self.features)
        self._hold(tables, self._order)
        self.fetch = Fetch(self.tables, tf.as_dtype(wire_dtype), self.name)

    @property
    def fold(self) -> Fold:
        """The fold of hashed ids, which is that of the rows that were loaded last."""
        hashing = zip(self.merged, self.tables, strict=True)
        return "xor" if any(merged.hashed and table.fold == "xor" for merged, table in hashing) else "mix"

    def rename(self, name: str) -> None:
        """Give the layer another name, and its tables names that begin with it."""
        self._name = name
        for merged, table in zip(self.merged, self.tables, strict=True):
            table.rename(merged.name_in(name))
        self._saved.owner = self._order.owner = name
        self.fetch.name = name

    def plan(self, print_fn: Callable[[str], Any] | None = None) -> None:
        """Print how features were merged into tables, one line for each physical table.

        Args:
          print_fn: The function that receives the text. None: `print`.
        """
        (print_fn or print)(plan_table(self.merged, self.tables))

    def lookup(self, inputs: Mapping[str, Any], *, insert: bool | tf.Tensor = True) -> CollectionLookup:
        """Fetch the rows of all features' ids, each row once.

        Args:
          inputs: Feature name -> ids. Names that the collection doesn't know are ignored.
          insert: Whether an unseen id gets a row of its own. If not, it reads the row that it would start
            with, and nothing is stored.
        """
        ids, keys = self._read(inputs)
        self._check_rows()
        end_lookup = begin_span("lookup", self.name, keys)
        requested, rows = note(self.fetch, keys) or self._fetch(keys, insert)
        end_lookup(rows)
        positions: dict[str, Ids] = {}
        for merged, table, inverse in zip(self.merged, self.tables, requested.inverse, strict=True):
            if table.device == "gpu":
                inverse = tf.cast(inverse, tf.int64)
            sizes = [tf.size(flat_ids(ids[feature.name])) for feature in merged.features]
            parts = split_numbers(inverse, sizes, len(sizes), device=table.device)
            for feature, part in zip(merged.features, parts, strict=True):
                positions[feature.name] = like_ids(ids[feature.name], part)
        return CollectionLookup(rows, requested.keys, positions, requested.sent, requested.distinct)

    def prefetch(self, inputs: Mapping[str, Any]) -> None:
        """Bring the rows of a later batch to the fast tier (`gmeta.policies.Tiers`); results don't change.

        Models with `gmeta.Pipeline` of a depth do so automatically. In a custom loop:

        * Tables in host memory, whose other rows are on a drive: call this where batches are made, so that it
          runs while a step computes. It returns when the rows have arrived.
        * Tables on a GPU, whose other rows are in host memory: call it between steps, once per batch, one or
          two batches ahead (``Tiers.lookahead`` counts these calls). It returns at once.

        Without tiers, nothing happens. On several ranks it sends keys to their owners: all ranks must call
        it, between the same steps.

        Args:
          inputs: Feature name -> ids, as for `lookup`.

        Raises:
          ConfigError: As in `lookup`.
          tf.errors.InvalidArgumentError: As in `lookup`.

        Example:
          >>> collection = EmbeddingCollection([FeatureConfig("user", dim=4)])
          >>> data = tf.data.Dataset.from_tensor_slices({"user": [7, 8, 7, 9]}).batch(2)
          >>> def ahead(batch):  # with rows on a drive
          ...     collection.prefetch(batch)
          ...     return batch
          >>> for batch in data.map(ahead).prefetch(1):
          ...     vectors = collection(batch)
          >>> batches = list(data)
          >>> for batch, later in zip(batches, [*batches[1:], None]):  # with tables on a GPU
          ...     if later is not None:
          ...         collection.prefetch(later)
          ...     vectors = collection(batch)
        """
        if all(table.tiers is None for table in self.tables):
            return
        prefetch([(self.fetch, self.fetch.request(self.keys_of(inputs)))])

    def keys_of(self, inputs: Mapping[str, Any]) -> list[tf.Tensor]:
        """Compute for each merged table the keys, (n,) int64, that a `lookup` of these ids would look up."""
        return self._read(inputs)[1]

    def has_rows(self, feature: str, ids: Any) -> Ids:
        """Return which ids of a feature have a row of their own, bool in the shape of the ids.

        Nothing is stored. On several ranks, only the rows that this rank owns count.

        Args:
          feature: The name of the feature.
          ids: Ids, as for `lookup`. A feature of several tables must have a row in each of them.

        Raises:
          ConfigError: The feature is unknown, or it doesn't take these ids.

        Example:
          >>> collection = EmbeddingCollection([FeatureConfig("user", dim=4)])
          >>> _ = collection.lookup({"user": [7, 8]})
          >>> collection.has_rows("user", [7, 9]).numpy().tolist()
          [True, False]
        """
        names = [each.name for each in self.features]
        if feature not in names:
            raise ConfigError(f"{self.name!r} has no feature {feature!r}: it has {', '.join(names)}")
        config = self.features[names.index(feature)]
        given = numbers_of_texts({feature: feature_ids({feature: ids}, config)})[feature]
        found = tf.ones_like(flat_ids(given), tf.bool)
        for merged, table in zip(self.merged, self.tables, strict=True):
            for part in (each for each in config.parts if each in merged.features):
                keys = self._keys(merged, table, {part.name: given}, [part])
                copy = freeze(table, insert=False)
                found &= table.contains(keys) if copy is None else copy.contains(keys)
        return like_ids(given, found)

    def _read(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Ids], list[tf.Tensor]]:
        read = numbers_of_texts({feature.name: feature_ids(inputs, feature) for feature in self.features})
        ids = {part.name: read[feature.name] for feature in self.features for part in feature.parts}
        keys = [self._keys(*each, ids) for each in zip(self.merged, self.tables, strict=True)]
        return ids, keys

    def _keys(
        self,
        merged: MergedTable,
        table: HashTable,
        ids: Mapping[str, Ids],
        features: Sequence[FeatureConfig] | None = None,
    ) -> tf.Tensor:
        """Return the keys of some features of a merged table, one feature after another; None: of all."""
        features = merged.features if features is None else features
        given = [ids[feature.name] for feature in features]
        place = shared_place([e.flat_values if isinstance(e, tf.RaggedTensor) else e for e in given])
        return merge_keys(
            [flat_ids(each) for each in given],
            features=[feature.name for feature in features],
            prefixes=[merged.key_prefix(feature) for feature in features],
            id_bits=merged.id_bits,
            hashed=[feature.hash for feature in features],
            mix=table.mixes_ids,
            device=place if table.device == "gpu" else "cpu",
        )

    def _check_rows(self) -> None:
        size = collectives.world().size
        if is_portable() and size > 1:
            raise ConfigError(
                f"{self.name!r} can't be exported by one of {size} ranks, which has only the rows that it "
                "owns: save a sharded checkpoint, and export from a process of one rank that has loaded it"
            )

    def _fetch(
        self, keys: Sequence[tf.Tensor], insert: bool | tf.Tensor
    ) -> tuple[Requested, tuple[tf.Tensor, ...]]:
        lookups = step_context().fetched
        found = None if lookups is None else lookups.bring(self.fetch, insert)
        if found is not None:
            return found
        step = step_context().samples
        requested = self.fetch.request(keys, 0 if step is None else step.own)
        hear_samples(requested)
        return requested, self.fetch.rows(requested, insert)

    def embed(self, lookup: CollectionLookup) -> dict[str, Any]:
        """Gather and pool the lookup's rows: feature -> its float32 vectors."""
        return self._join(
            {
                part.name: pool(rows, lookup.positions[part.name], part.combiner)
                for rows, merged in zip(lookup.rows, self.merged, strict=True)
                for part in merged.features
            }
        )

    def _join(self, vectors: Mapping[str, Any]) -> dict[str, Any]:
        """Make the vectors of features from those of their parts."""
        return {
            feature.name: join_vectors([vectors[part.name] for part in feature.parts], feature.join)
            for feature in self._order.features
        }

    def in_order(self, reader: str) -> tuple[FeatureConfig, ...]:
        """Return the features in the order of `concat`, which is fixed from then on.

        Args:
          reader: What computes positions from the order, for the error that refuses weights of another one.
        """
        self._order.fix(reader)
        return self._order.features

    def concat(self, lookup: CollectionLookup) -> tf.Tensor:
        """Concatenate all features' vectors: (samples, sum of widths).

        The vectors are in the order of the collection's features. Loading weights that were saved with the
        features in another order changes it to that order, so that dense weights fit.

        Raises:
          ConfigError: A feature has several vectors per sample.
        """
        self._order.note_concat()
        parts = [part for feature in self._order.features for part in feature.parts]
        single = [part.name for part in parts if is_single(part, lookup.positions[part.name])]
        adds = any(feature.join == "sum" for feature in self.features)
        if len(self.merged) == 1 and len(single) == len(parts) and not adds:
            side_by_side = tf.gather(lookup.rows[0], self._stack(lookup, single, axis=1))
            return tf.reshape(side_by_side, [-1, len(single) * self.merged[0].dim])
        vectors: dict[str, Any] = {}
        for rows, merged in zip(lookup.rows, self.merged, strict=True):
            # One gather for all features with one id per sample. With several gathers, TensorFlow would have
            # to add up their gradients.
            together = [feature.name for feature in merged.features if feature.name in single]
            if together:
                of_each = tf.unstack(tf.gather(rows, self._stack(lookup, together, axis=0)))
                vectors |= zip(together, of_each, strict=True)
            for feature in merged.features:
                if feature.name not in single:
                    vectors[feature.name] = pool(rows, lookup.positions[feature.name], feature.combiner)
        joined = self._join(vectors)
        for name, vector in joined.items():
            if vector.shape.rank != 2:
                raise ConfigError(
                    f"feature {name!r} has vectors of shape {vector.shape} and can't stand beside the "
                    "others: give it a combiner"
                )
        return tf.concat(list(joined.values()), axis=-1)

    def _stack(self, lookup: CollectionLookup, names: Sequence[str], axis: int) -> tf.Tensor:
        # Stack where the positions are: from host memory, a GPU then gets one copy, not one per feature.
        with tf.device(DEVICE_NAMES[self.fetch.place]):
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
          gradients: One for each of its ``rows``. Several ranks' gradients are added up: pass each rank's
            share of the gradient of the global loss.
          learning_rate: The rate for tables whose optimizer has none of its own.
        """
        self.recording_of(lookup).apply_gradients(gradients, learning_rate)

    def recording_of(self, lookup: CollectionLookup) -> RecordedLookups:
        """Wrap a lookup that was made by hand as `record_lookups` would have recorded it."""
        lookups = RecordedLookups()
        lookups.add(self.tables, lookup, tf.as_dtype(self.wire_dtype))
        return lookups

    def call(self, inputs: Mapping[str, Any], training: bool | tf.Tensor | None = None) -> dict[str, Any]:
        """Look up and pool all features: feature -> vectors, in the layer's compute dtype."""
        train = False if training is None or not self.trainable else training
        lookup = self.lookup(inputs, insert=train)
        if train is not False:
            self._record(lookup)
        self._order.note_call()
        return {name: tf.cast(v, self.compute_dtype) for name, v in self.embed(lookup).items()}

    def _record(self, lookup: CollectionLookup) -> None:
        recording = step_context().recording
        if recording is None:
            raise ConfigError(
                f"{self.name!r} is called with training=True where nothing records its lookups, so its rows "
                "would not be trained. For fit, use gmeta.models.Model in place of tf.keras.Model. In a "
                "custom loop or train_step, compute the loss within `with tf.GradientTape() as tape, "
                "gmeta.layers.record_lookups(tape) as lookups:` and call step(gradients, variables, "
                "lookups) of a gmeta.models.JointOptimizer, which a gmeta.models.Model has as "
                "joint_optimizer; instead of its train_step you can also override its learn(data). To read "
                "rows, call it with training=False"
            )
        recording.add(self.tables, lookup, tf.as_dtype(self.wire_dtype))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer without its rows, in a form that JSON can hold."""
        return {
            **super().get_config(),
            "features": [settings.to_config(feature) for feature in self.features],
            "optimizer": settings.to_config(self._optimizer),
            "seed": self.seed,
            "wire_dtype": self.wire_dtype,
            "tiers": settings.to_config(self.tiers),
            "device": self.device,
            "fold": self.fold,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EmbeddingCollection:
        """Recreate the layer from what `get_config` returned.

        A layer whose tables were on a GPU can be recreated on a machine without one. All rows are in host
        memory then, with a warning if the tables had `gmeta.policies.Tiers`.
        """
        made = {
            "features": [settings.from_config(feature) for feature in config["features"]],
            "optimizer": settings.from_config(config["optimizer"]),
            "tiers": settings.tiers_here(config),
            "fold": fold_of(config),
        }
        layer = cls(**{**{key: value for key, value in config.items() if key != "device_rows"}, **made})
        layer.tiers = settings.tiers_of(config)  # as they are to be saved again
        return layer

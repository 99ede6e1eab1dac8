"""A two-tower model of the items that a user takes, whatever their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError, finite_number, whole_number
from gmeta.layers import EmbeddingCollection
from gmeta.losses.multi_task import mean_loss
from gmeta.losses.softmax import set_softmax
from gmeta.metrics.next_item import Retrieval, catalogue_ranks
from gmeta.models.sequence.catalogue import Catalogue, Items
from gmeta.models.sequence.history_model import HistoryModel
from gmeta.models.sequence.negatives import CandidateDraw, Candidates, Law
from gmeta.ops import Jagged, jagged
from gmeta.training.rank_steps import rank_step

if TYPE_CHECKING:
    from gmeta.models.sequence.nearest_items import NearestItems

_WHOLE = 2**31  # a history's longest length


class _Batch(NamedTuple):
    """What a step reads of a batch, and what it draws.

    Attributes:
      known: The numbers of all items of each user, right ones too.
      kept: Those that the user tower reads.
      right: The right items.
      candidates: The right items and the negatives of all users.
    """

    known: Jagged
    kept: Jagged
    right: Jagged
    candidates: Candidates


@tf.keras.saving.register_keras_serializable("gmeta")
class TwoTower(HistoryModel):
    r"""A model that retrieves items for users: one tower makes a user's vector, another one those of items.

    .. math::
       q_u &= f\Big(e_u,\; |H_u|^{-p} \sum_{i \in H_u} h_i,\; \text{columns of } u\Big), \quad
       x_i = g(e_i,\; \text{columns of } i) \\
       s_{ui} &= \langle q_u, x_i \rangle / \tau + b_i

    :math:`H_u` is the set of a user's items; their order doesn't matter. Without ``hidden`` layers, a tower
    adds up its inputs, so a model of user ids and item ids alone is a matrix factorization. With them, it
    concatenates its inputs and applies dense layers.

    In training, all items of a user are right, and the user tower reads a random part of them, as a denoising
    autoencoder does. The loss is a softmax over the right item and negatives that the user doesn't have
    (`gmeta.losses.softmax.set_softmax`). ``law`` determines the negatives: ``"in-batch"``: the right
    items of the batch's other users, with Yi et al.'s correction by log Q; ``"uniform"``: drawn evenly;
    ``"popularity"``: drawn in proportion to how often items occur, with the same correction. Several laws
    may be given together.

    A batch is a dict of columns: ``item`` ragged, one row per user, and the columns of users, dense or
    ragged. Where the right items are others than those of the history, give them as labels: ``(x, y)`` with y
    ragged. `evaluate` needs such labels, and measures HR, recall and NDCG (`gmeta.metrics.next_item`) over
    the whole catalogue, by default without the items of the history.

    Args:
      collection: The embedding of ``item``; of ``history``, if the user tower reads it; and of columns of
        users and items. Features of columns may have a combiner. Without ``hidden``, all have one width.
      items: The catalogue, as for `gmeta.models.NextItemModel`.
      item: The name of the item column and of its feature.
      history: The feature that embeds the items of a history; it may share the table of ``item``. None: the
        user tower doesn't read the history.
      item_columns: Feature -> a column of the catalogue in the order of ``items``: (V,) ids, or ragged (V,
        None) for a feature with a combiner. All other features are columns of users, read from the batch.
      bias: The feature, of width 1, that embeds a number of each item that is added to its scores. None:
        there is none. Vectors then have a number more, so that a score is their product as before.
      law: One law of negatives, or several.
      negatives: m, how many negatives are drawn in a step for each drawn law. None: 8,192, or, if the
        catalogue has at most as many items and the law is ``"uniform"``, each item once.
      popularity: How often each item occurs in training, (V,) numbers from 0 on; for the laws
        ``"in-batch"`` and ``"popularity"``.
      hidden: The widths of each tower's hidden layers; the last layer has the width of ``item``.
      pooling: p, from 0 (sum) to 1 (mean).
      item_dropout: The share of a history that the user tower doesn't read in training.
      dropout: The share of the user vector's numbers that are dropped in training.
      temperature: :math:`\tau`.
      normalize: Whether vectors of users and items are divided by their lengths.
      max_length: The longest history that is read, from its end. None: all of it.
      seed: The seed of the draws.
      ks: The cutoffs k of the metrics.

    Raises:
      ConfigError: The parts don't go together.

    Example:
      >>> features = [FeatureConfig(name, dim=16) for name in ("user", "item", "history")]
      >>> model = TwoTower(EmbeddingCollection(features), items=100, history="history")
      >>> model.compile("adam")
      >>> batch = {"user": tf.constant([7, 8]), "item": tf.ragged.constant([[3, 7, 5], [9]])}
      >>> model.predict(batch, verbose=0).shape  # to be compared with model.item_vectors()
      (2, 16)

    References:
      Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations" (RecSys
      2019). Yang et al., "Mixed Negative Sampling for Learning Two-tower Neural Networks in Recommendations"
      (WWW 2020), of several laws together.
    """

    refused_settings: ClassVar[Mapping[str, str]] = {
        **HistoryModel.refused_settings,
        "metrics": "HR, recall and NDCG are measured in evaluate, at the ks= that the model was made with",
    }

    answers_popular = False
    leave_out_seen = _leaves_out_seen = True

    def __init__(
        self,
        collection: EmbeddingCollection,
        *,
        items: Items,
        item: str = "item",
        history: str | None = None,
        item_columns: Mapping[str, Any] | None = None,
        bias: str | None = None,
        law: Law | Sequence[Law] = "uniform",
        negatives: int | None = None,
        popularity: Any = None,
        hidden: Sequence[int] = (),
        pooling: float = 0.5,
        item_dropout: float = 0.5,
        dropout: float = 0.0,
        temperature: float = 1.0,
        normalize: bool = False,
        max_length: int | None = None,
        seed: int = 0,
        ks: Sequence[int] = (10, 20),
        name: str = "two_tower",
    ) -> None:
        super().__init__(name=name)
        self.collection = collection
        features = {feature.name: feature for feature in collection.features}
        columns = {} if item_columns is None else dict(item_columns)
        missing = [
            each for each in (item, history, bias, *columns) if each is not None and each not in features
        ]
        if missing:
            raise ConfigError(
                f"{name}: the collection lacks {', '.join(missing)}; it has {', '.join(features)}"
            )
        for each in (item, history, bias):
            if each is not None and features[each].combiner is not None:
                raise ConfigError(
                    f"{name}: feature {each!r} has a combiner, and is read by item: leave it out"
                )
            if each is not None and features[each].hash != features[item].hash:
                raise ConfigError(
                    f"{name}: features {item!r} and {each!r} read the same ids: give both one hash="
                )
        self.feature, self.dim = features[item], features[item].width
        self.item, self.time, self.pooled = item, None, history  # Keras has an attribute history
        self.bias = bias
        if bias is not None and features[bias].width != 1:
            raise ConfigError(f"{name}: bias={bias!r} must have width 1, got {features[bias].width}")
        self.user_columns = [each for each in features if each not in (item, history, bias, *columns)]
        if not self.user_columns and history is None:
            raise ConfigError(f"{name}: the user tower reads nothing: give history=, or a feature of users")
        self.catalogue = Catalogue(items, name, self.feature)
        self.item_columns = {each: _column(name, each, columns[each], self.items) for each in columns}
        self.negatives = CandidateDraw(name, law, negatives, popularity, self.items, seed)
        self.pooling = finite_number(f"{name}: pooling", pooling)
        self.item_dropout, self.dropout = (
            _share(f"{name}: {what}", value)
            for what, value in (("item_dropout", item_dropout), ("dropout", dropout))
        )
        self.temperature = finite_number(f"{name}: temperature", temperature)
        if self.temperature <= 0:
            raise ConfigError(f"{name}: temperature must be above 0, got {temperature}")
        self.normalize = normalize
        self.read_length = max_length
        self.max_length = (
            _WHOLE if max_length is None else whole_number(f"{name}: max_length", max_length, least=1)
        )
        self.hidden = [whole_number(f"{name}: hidden", width, least=1) for width in hidden]
        self.seed = seed
        self.user_tower, self.item_tower = (self._tower(of) for of in ("user_tower", "item_tower"))
        self.ranking = Retrieval(ks)
        self.mean = tf.keras.metrics.Mean(name="loss")
        if not self.hidden and len({features[each].width for each in features if each != bias}) > 1:
            raise ConfigError(
                f"{name}: without hidden layers a tower adds up its inputs, and the features have the widths "
                f"{', '.join(f'{each} {features[each].width}' for each in features)}: make them alike"
            )
        # Create all weights now: a model needs them before weights can be loaded.
        if self.hidden:
            of_user = [*self.user_columns, *([] if history is None else [history])]
            towers: Any = (self.user_tower, of_user), (self.item_tower, [item, *columns])
            for tower, read in towers:
                tower.build([None, sum(features[each].width for each in read)])
        self.built = True

    def _tower(self, name: str) -> tf.keras.layers.Layer | None:
        if not self.hidden:
            return None
        layers = [tf.keras.layers.Dense(width, "relu") for width in self.hidden]
        return tf.keras.Sequential([*layers, tf.keras.layers.Dense(self.dim)], name=name)

    def call(self, x: Mapping[str, Any], training: bool | None = None) -> tf.Tensor:
        """Compute users' vectors, (users, d), to be compared with those of items."""
        kept = self._numbers(x, self.max_length)
        inputs = self._of_user(x, kept)
        return self._user_vectors(self._vectors_of(inputs), kept, training=bool(training))

    def item_inputs(self, numbers: tf.Tensor) -> dict[str, Any]:
        """Return the input of the item tower's lookup, by numbers (n,) of items in the catalogue."""
        return self._of_one_tower(self._of_items(numbers))

    def item_vectors(self, numbers: Any = None) -> tf.Tensor:
        """Compute vectors of items, (n, d); untrained items have their initial vectors.

        Args:
          numbers: (n,) int64, numbers of items in the catalogue. None: all items, (V, d).
        """
        numbers = tf.range(self.items, dtype=tf.int64) if numbers is None else numbers
        return self._item_vectors(self._vectors_of(self._of_items(numbers)), training=False)

    def new_item_vectors(self, columns: Mapping[str, Any]) -> tf.Tensor:
        """Compute the vectors of items that the catalogue lacks, (n, d), by their columns alone.

        They have no row of their own, and no bias. Compare them with users' vectors as those of
        `item_vectors`.

        Args:
          columns: Feature of ``item_columns`` -> (n,) ids, or ragged (n, None).

        Raises:
          ConfigError: The model reads no columns of items, or one is missing.

        Example:
          >>> features = [FeatureConfig(name, dim=4) for name in ("user", "item", "genre")]
          >>> model = TwoTower(EmbeddingCollection(features), items=3, item_columns={"genre": [0, 1, 1]})
          >>> model.new_item_vectors({"genre": [1, 0]}).shape
          TensorShape([2, 4])
        """
        missing = [name for name in self.item_columns if name not in columns]
        if missing or not self.item_columns:
            needed = ", ".join(self.item_columns) or "a model with item_columns="
            raise ConfigError(
                f"{self.name}: new_item_vectors needs {needed}, and got {', '.join(columns) or 'nothing'}"
            )
        vectors = dict(self._vectors_of({name: _as_ids(columns[name]) for name in self.item_columns}))
        rows = tf.shape(vectors[next(iter(self.item_columns))])[0]
        for name in (self.item, *([] if self.bias is None else [self.bias])):
            vectors[name] = tf.zeros([rows, vectors[name].shape[-1]])
        return self._item_vectors(vectors, training=False)

    def recommend(
        self,
        x: Mapping[str, Any],
        k: int = 10,
        *,
        leave_out_seen: bool = True,
        leave_out: Any = None,
        allow: Any = None,
        nearest: NearestItems | None = None,
        vectors: Any = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Find the k items with the highest scores.

        Args:
          x: A batch.
          k: The number of items.
          leave_out_seen: Whether to leave out the items of the history.
          leave_out: Ids of further items to leave out, as for `gmeta.models.NextItemModel.recommend`.
          allow: bool (V,), which items are allowed, as there.
          nearest: An index of this model's `item_vectors`, as there.
          vectors: The result of `item_vectors`, if it is known already.

        Returns:
          (users, k) ids, the highest score first, and (users, k) scores. If fewer than k items are left, the
          rest is -1 or the empty text, with the score -inf.

        Raises:
          ConfigError: The catalogue has fewer than k items; or a filter has another form.
        """
        ids = self._sequences(x, None)[0]
        left = [self._blocked(ids, leave_out)]
        if leave_out_seen:
            left.append(jagged.to_ragged(ids._replace(values=self.catalogue.find(ids.values))))
        left = [each for each in left if each is not None]
        filters = {
            "leave_out": tf.concat(left, axis=1) if left else None,
            "allow": self.catalogue.mask(allow),
        }
        queries = self(x, training=False)
        numbers, scores = self._best(queries, k, vectors=vectors, nearest=nearest, **filters)
        return self._ids(numbers), scores / self.temperature

    def learn(self, data: Any) -> tuple[tf.Tensor, tf.Tensor, Callable[[], dict[str, tf.Tensor]]]:
        """Compute the mean loss of the right items, and their number."""
        x, batch = self._read(data)
        candidates = batch.candidates
        self.catalogue.count(batch.right.values)
        vectors = self.collection(self._wanted(x, batch), training=True)
        queries = self._user_vectors(vectors, batch.kept, training=True)
        scores = (
            tf.matmul(queries, self._item_vectors(vectors, training=True), transpose_b=True)
            / self.temperature
        )
        losses = set_softmax(
            scores,
            _holds(batch.known, candidates.numbers),
            jagged.row_ids(batch.right),
            tf.searchsorted(candidates.numbers, batch.right.values, out_type=tf.int64),
            log_counts=candidates.log_counts,
            log_q=candidates.log_q,
        )
        loss, samples = mean_loss(losses), tf.size(losses)

        def measure() -> dict[str, tf.Tensor]:
            self.mean.update_state(loss, sample_weight=samples)
            return {"loss": self.mean.result()}

        return loss, samples, measure

    def lookup_inputs(self, data: Any) -> list[tuple[EmbeddingCollection, Any]]:
        """Return the one lookup of a train step: of users, histories and candidates."""
        return [(self.collection, self._wanted(*self._read(data)))]

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """The training loss and the metrics of evaluation, reset at each epoch."""
        return [self.mean, self.ranking]

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Measure the ranks of the labels, (users, None), among all items (`evaluate`)."""
        x, y = self._asked(data)
        if y is None:
            raise ConfigError(
                f"{self.name}: evaluation needs the right items as labels: batches (x, y), with y ragged"
            )
        with rank_step(self, data) as step:
            right = y._replace(values=self.catalogue.numbers(y.values))
            owner = jagged.row_ids(right)
            seen = None
            if self._leaves_out_seen:
                seen = tf.gather(jagged.to_ragged(self._numbers(x, None)), owner)
            queries = tf.gather(self(x, training=False), owner)
            ranks = catalogue_ranks(queries, self.item_vectors(), right.values, seen=seen)
            self.ranking.update_state(jagged.to_ragged(right._replace(values=ranks)))
            return step.end_forward(self.ranking.result())

    def _read(self, data: Any) -> tuple[Mapping[str, Any], _Batch]:
        x, y = self._asked(data)
        history, whole = (
            ids._replace(values=self.catalogue.numbers(ids.values))
            for ids in (self._sequences(x, longest)[0] for longest in (self.max_length, None))
        )
        if y is None:
            known, right = whole, history
        else:
            right = y._replace(values=self.catalogue.numbers(y.values))
            known = jagged.concat(whole, right)
        # The step is the same on all ranks, whose users are others, and which may draw alike.
        seeds = tf.stack([tf.constant(self.seed, tf.int64), tf.cast(self.step_number, tf.int64)])
        drawn = tf.random.stateless_uniform(tf.shape(history.values), seeds)
        kept = jagged.mask(history, drawn >= self.item_dropout)
        return x, _Batch(known, kept, right, self.negatives(right, self.step_number))

    def _of_items(self, numbers: tf.Tensor) -> dict[str, Any]:
        """Return the inputs of the item tower's features."""
        columns = {name: tf.gather(column, numbers) for name, column in self.item_columns.items()}
        keys = self.catalogue.keys(numbers)
        return {self.item: keys, **columns, **({} if self.bias is None else {self.bias: keys})}

    def _of_user(self, x: Mapping[str, Any], kept: Jagged) -> dict[str, Any]:
        """Return the inputs of the user tower's features."""
        missing = [name for name in self.user_columns if name not in x]
        if missing:
            raise ConfigError(f"{self.name}: the batch lacks {', '.join(missing)}; it has {', '.join(x)}")
        found = {name: x[name] for name in self.user_columns}
        return found if self.pooled is None else {**found, self.pooled: self.catalogue.keys(kept.values)}

    def _wanted(self, x: Mapping[str, Any], batch: _Batch) -> dict[str, Any]:
        """Return the input of a step's lookup."""
        return {**self._of_user(x, batch.kept), **self._of_items(batch.candidates.numbers)}

    def _of_one_tower(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the input of a lookup for one tower; the features of the other get no ids."""
        nothing = {
            feature.name: tf.zeros([0] if feature.combiner is None else [0, 0], tf.int64)
            for feature in self.collection.features
        }
        return {**nothing, **inputs}

    def _vectors_of(self, inputs: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        """Look up the features of one tower."""
        found: dict[str, tf.Tensor] = self.collection(self._of_one_tower(inputs), training=False)
        return found

    def _user_vectors(self, vectors: Mapping[str, tf.Tensor], kept: Jagged, training: bool) -> tf.Tensor:
        inputs = [vectors[name] for name in self.user_columns]
        if self.pooled is not None:
            lengths = jagged.lengths(kept)
            rows = tf.cast(vectors[self.pooled], tf.float32)
            total = tf.math.unsorted_segment_sum(rows, jagged.row_ids(kept), tf.size(lengths))
            inputs.append(total / tf.cast(tf.maximum(lengths, 1), tf.float32)[:, tf.newaxis] ** self.pooling)
        found = self._join(inputs, self.user_tower, training)
        if training and self.dropout:
            seeds = tf.stack([tf.constant(self.seed + 1, tf.int64), tf.cast(self.step_number, tf.int64)])
            found = tf.nn.experimental.stateless_dropout(found, self.dropout, seeds)
        if self.bias is None:
            return found
        return tf.concat([found, tf.fill([tf.shape(found)[0], 1], self.temperature)], axis=1)

    def _item_vectors(self, vectors: Mapping[str, tf.Tensor], training: bool) -> tf.Tensor:
        inputs = [vectors[name] for name in (self.item, *self.item_columns)]
        found = self._join(inputs, self.item_tower, training)
        return (
            found
            if self.bias is None
            else tf.concat([found, tf.cast(vectors[self.bias], tf.float32)], axis=1)
        )

    def _join(self, inputs: Sequence[tf.Tensor], tower: Any, training: bool) -> tf.Tensor:
        parts = [tf.cast(each, tf.float32) for each in inputs]
        found = tf.add_n(parts) if tower is None else tower(tf.concat(parts, axis=1), training=training)
        return tf.math.l2_normalize(found, axis=-1, epsilon=1e-12) if self.normalize else found

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this model, in a form that JSON can hold."""
        names = ("item", "bias", "hidden", "pooling", "item_dropout", "dropout", "temperature")
        return {
            "collection": tf.keras.saving.serialize_keras_object(self.collection),
            "items": self.catalogue.config,
            "item_columns": {
                name: (column.to_list() if isinstance(column, tf.RaggedTensor) else column.numpy().tolist())
                for name, column in self.item_columns.items()
            },
            "history": self.pooled,
            **self.negatives.config,
            "max_length": self.read_length,
            "ks": self.ranking.ks,
            **{name: getattr(self, name) for name in (*names, "normalize", "seed", "name")},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> TwoTower:
        """Create the model that a config from `get_config` describes."""
        made = tf.keras.saving.deserialize_keras_object(config["collection"], custom_objects)
        columns = {
            name: tf.ragged.constant(values, tf.int64) if isinstance(values[0], list) else values
            for name, values in config["item_columns"].items()
        }
        return cls(**{**config, "collection": made, "item_columns": columns})


def _as_ids(values: Any) -> Any:
    return values if isinstance(values, tf.RaggedTensor) else tf.constant(np.asarray(values))


def _column(owner: str, name: str, values: Any, items: int) -> Any:
    """Return a column of the catalogue as a tensor."""
    column = _as_ids(values)
    if column.shape[0] != items:
        raise ConfigError(
            f"{owner}: item_columns has {column.shape[0]} values of {name!r}, and the catalogue {items} items"
        )
    return column


def _share(what: str, value: float) -> float:
    if not 0 <= finite_number(what, value) < 1:
        raise ConfigError(f"{what} must be at least 0 and below 1, got {value}")
    return value


def _holds(known: Jagged, candidates: tf.Tensor) -> tf.Tensor:
    """Return (users, candidates) bool: which candidates, ascending numbers, each user has."""
    size = tf.size(candidates, tf.int64)
    places = tf.minimum(tf.searchsorted(candidates, known.values, out_type=tf.int64), size - 1)
    here = tf.boolean_mask(
        tf.stack([jagged.row_ids(known), places], axis=1), tf.gather(candidates, places) == known.values
    )
    shape = tf.stack([tf.size(jagged.lengths(known), tf.int64), size])
    return tf.scatter_nd(here, tf.ones(tf.shape(here)[:1], tf.int32), shape) > 0

"""A model of what comes next in a history: embedded items, a backbone over sequences, sampled negatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.errors import ConfigError
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.layers.sequence.view import sequence_view
from gmeta.losses import SampledSoftmax, mean_loss, uniform_negatives
from gmeta.metrics import NextItem, catalogue_ranks
from gmeta.models.sequence.catalogue import Catalogue, Items, top_items
from gmeta.models.training.compile_settings import only_columns, refuse_settings
from gmeta.models.training.model import Model
from gmeta.models.training.ranks.step import rank_step
from gmeta.ops import Jagged, jagged

_INSTEAD = {
    "loss": "the loss is that of the model, made with loss=gmeta.losses.SampledSoftmax(...)",
    "metrics": "hit rate, NDCG and MRR are measured in evaluate, at the ks= that the model was made with",
    "loss_weights": "there is one loss",
    "weighted_metrics": "histories have no weights",
}


@tf.keras.saving.register_keras_serializable("gmeta")
class NextItemModel(Model):
    r"""Learns to tell, at every token of a history, the item that comes next.

    .. math::
       H = \mathrm{backbone}(\mathrm{dropout}(\sqrt{d}\, E[i_1 \dots i_{L-1}] + P)), \quad
       l_k = -\log \frac{e^{s(H_k, E[i_{k+1}])}}{e^{s(H_k, E[i_{k+1}])} + \sum_{j \in N} e^{s(H_k, E[j])}}

    with learned places P, and negatives N that are drawn from the catalogue at each step, for all tokens
    together. Histories, positives and negatives are embedded by one lookup. The loss is the mean over tokens
    that something follows, of all ranks. It is the training of HSTU's research form and of SASRec alike (Zhai
    et al., "Actions Speak Louder than Words", ICML 2024, section 4.1.1): the backbone makes the difference.

    Batches are dicts of ragged columns, a row a user, in the order of time, with the item's id and whatever
    else there is; ``time`` names a column of int64 times, which go to the backbone. Of histories longer than
    ``max_length + 1`` the last are taken. Measured is a history's last item, at its rank among all of the
    catalogue (`gmeta.metrics.NextItem`): ``hr@10``, ``ndcg@10``, ``mrr``.

    Args:
      collection: The embedding of ``item``, its only feature.
      backbone: A layer over jagged sequences, such as `gmeta.layers.HSTU` or `gmeta.layers.FuXi`.
      items: The catalogue: V, for the ids from 0 to V - 1; or a vector of ids, any int64 or texts, of a
        feature with ``hash=True``. A text and the hash that ``gmeta prepare`` writes of it are one item,
        whichever of them the catalogue and a batch have. Negatives are drawn from it, all of it is ranked,
        and `fit` and `evaluate` refuse histories with another id.
      max_length: The longest history that is read, as the backbone's.
      item: The column of items, and their feature.
      time: The column of times; None: the backbone gets none.
      negatives: How many are drawn for a step of the optimizer, the same on all ranks.
      loss: Of samples.
      dropout: The share of the numbers of embedded tokens that are dropped in training.
      seed: Of places, dropout and negatives.
      ks: The k of what is measured.

    Raises:
      ConfigError: Parts that don't go together.

    Example:
      >>> collection = EmbeddingCollection([FeatureConfig("item", dim=16)])
      >>> hstu = HSTU(blocks=2, heads=1, attention_dim=16, value_dim=16, max_length=50)
      >>> model = NextItemModel(collection, hstu, items=1000, max_length=50, time="time")
      >>> model.compile("adam")
      >>> batch = {"item": tf.ragged.constant([[3, 7, 5]]), "time": tf.ragged.constant([[1, 2, 9]])}
      >>> model.predict(batch, verbose=0).shape  # what to look for among the items' vectors
      (1, 16)
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        backbone: tf.keras.layers.Layer,
        *,
        items: Items,
        max_length: int,
        item: str = "item",
        time: str | None = None,
        negatives: int = 128,
        loss: SampledSoftmax | None = None,
        dropout: float = 0.0,
        seed: int = 0,
        ks: Sequence[int] = (10, 50),
        name: str = "next_item",
    ) -> None:
        super().__init__(name=name)
        self.collection, self.backbone = collection, backbone
        feature = _item_feature(name, collection, item)
        self.dim = feature.dim
        if time is None and backbone.needs_times:
            raise ConfigError(
                f"{name}: {backbone.name} needs times: name their column by time=, or make it with "
                "bias_by_time=False and a mask that isn't by_time"
            )
        self.catalogue = Catalogue(items, name, feature)
        self.max_length = whole_number(f"{name}: max_length", max_length, least=1)
        self.negatives = whole_number(f"{name}: negatives", negatives, least=1)
        self.item, self.time, self.seed = item, time, seed
        self.loss_of = loss or SampledSoftmax(in_batch=False)
        self.drop = tf.keras.layers.Dropout(dropout, seed=seed)
        initializer = tf.keras.initializers.TruncatedNormal(stddev=self.dim**-0.5, seed=seed)
        self.places = self.add_weight(
            name="places", shape=(self.max_length, self.dim), initializer=initializer
        )
        self.ranking = NextItem(ks)
        self.mean = tf.keras.metrics.Mean(name="loss")
        # All weights from the start: a model that is loaded has to have them.
        nothing = Jagged(tf.zeros([0, self.dim]), tf.zeros([2], tf.int64))
        self.backbone(nothing, times=None if time is None else tf.zeros([0], tf.int64))
        self.built = True

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        metrics: Any = None,
        loss_weights: Any = None,
        weighted_metrics: Any = None,
        *args: Any,
        accumulate_steps: int = 1,
        **kwargs: Any,
    ) -> None:
        """As `gmeta.models.Model.compile`, but for the loss and the metrics, which the model has.

        Args:
          optimizer: As in Keras.
          loss: None.
          metrics: None.
          loss_weights: None.
          weighted_metrics: None.
          *args: As in Keras.
          accumulate_steps: As for `gmeta.models.Model.compile`.
          **kwargs: As there.

        Raises:
          ConfigError: A loss, metrics or weights; and as there.
        """
        given = {"loss": loss, "metrics": metrics, "loss_weights": loss_weights}
        refuse_settings(self.name, {**given, "weighted_metrics": weighted_metrics}, _INSTEAD)
        none = (None,) * 4  # what was refused
        super().compile(optimizer, *none, *args, accumulate_steps=accumulate_steps, **kwargs)

    @tf.autograph.experimental.do_not_convert
    def call(self, x: Mapping[str, Any], training: bool | None = None) -> tf.Tensor:
        """(users, d): what comes after each history, to be compared with the items' vectors.

        The last item looks back from its own time, as when the next one will come isn't known. Of an empty
        history it is 0.
        """
        ids, times = self._sequences(x, self.max_length)
        vectors = self.collection({self.item: ids.values}, training=training)[self.item]
        return self._normalize(
            jagged.last(self._queries(Jagged(vectors, ids.offsets), times, None, training))
        )

    @tf.autograph.experimental.do_not_convert
    def item_vectors(self) -> tf.Tensor:
        """(V, d): the vectors of the catalogue; items that were never trained have their initial ones."""
        return self._normalize(
            self.collection({self.item: self.catalogue.all_keys}, training=False)[self.item]
        )

    @property
    def items(self) -> int:
        """V, the size of the catalogue."""
        return self.catalogue.size

    @tf.autograph.experimental.do_not_convert
    def recommend(
        self, x: Mapping[str, Any], k: int = 10, *, leave_out_seen: bool = False, vectors: Any = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The items that most likely come next, among all of the catalogue.

        Args:
          x: A batch.
          k: How many.
          leave_out_seen: Whether the items of a history, as far as it is read, are left out.
          vectors: Those of `item_vectors`, where they are known already.

        Returns:
          (users, k) ids, the likeliest first, and (users, k) scores, their products with what `predict`
          gives. Where fewer than k are left, -1 or the empty text, of score -inf.

        Raises:
          ConfigError: The catalogue has fewer than k items.
        """
        k = whole_number(f"{self.name}: k", k, least=1)
        if k > self.items:
            raise ConfigError(f"{self.name}: k must be at most {self.items}, the catalogue's size, got {k}")
        vectors = self.item_vectors() if vectors is None else vectors
        seen = None
        if leave_out_seen:
            ids = self._sequences(x, self.max_length)[0]
            seen = jagged.to_ragged(Jagged(self.catalogue.find(ids.values), ids.offsets))
        numbers, scores = top_items(self(x, training=False), vectors, k, without=seen)
        found = self.catalogue.ids(tf.maximum(numbers, 0))
        return tf.where(numbers < 0, self.catalogue.nothing, found), scores

    # AutoGraph would rewrite 200 functions, most of them Keras' own, for the first step: 8 s for nothing.
    @tf.autograph.experimental.do_not_convert
    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """One batch: forward, backward, and a step of dense weights and rows."""
        return super().train_step(data)

    def learn(self, data: Any) -> tuple[tf.Tensor, tf.Tensor, Callable[[], dict[str, tf.Tensor]]]:
        """Every token's loss at telling the next."""
        x = only_columns(self.name, data)
        ids, times = self._sequences(x, self.max_length + 1)
        numbers = self.catalogue.numbers(ids.values)
        # The optimizer's steps are those of all ranks, of one that has no users in a step too.
        step = self.optimizer.iterations
        drawn = uniform_negatives(self.negatives, self.items, seed=self.seed, step=step)
        # Embedded are ids that have been found in the catalogue.
        found = {self.item: self.catalogue.keys(tf.concat([numbers, drawn], axis=0))}
        vectors, total = self.collection(found, training=True)[self.item], tf.size(ids.values)
        queries, positives = self._ask(Jagged(vectors[:total], ids.offsets), times, training=True)
        losses = self.loss_of(
            queries.values,
            positives.values,
            _but_first(Jagged(numbers, ids.offsets)).values,
            negatives=vectors[total:],
            negative_ids=drawn,
        )
        loss, samples = mean_loss(losses), tf.size(losses)

        def measure() -> dict[str, tf.Tensor]:
            self.mean.update_state(loss, sample_weight=samples)
            return {"loss": self.mean.result()}

        return loss, samples, measure

    @tf.autograph.experimental.do_not_convert
    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Each history's last item, at its rank among all; a history of one item counts nothing."""
        x = only_columns(self.name, data)
        with rank_step(self, data) as step:
            ids, times = self._sequences(x, self.max_length + 1)
            numbers = Jagged(self.catalogue.numbers(ids.values), ids.offsets)
            found = self.catalogue.keys(numbers.values)
            vectors = self.collection({self.item: found}, training=False)[self.item]
            queries, _ = self._ask(Jagged(vectors, ids.offsets), times, training=False)
            last = self._normalize(jagged.last(queries))
            ranks = catalogue_ranks(last, self.item_vectors(), jagged.last(numbers))
            known = tf.cast(jagged.lengths(ids) > 1, tf.float32)
            self.ranking.update_state(ranks, sample_weight=known)
            return step.end_forward(self.ranking.result())

    def _ask(self, tokens: Jagged, times: Jagged | None, training: bool) -> tuple[Jagged, Jagged]:
        """A query of each token that something follows, and the vectors of what does."""
        following = None if times is None else _but_first(times)
        earlier = None if times is None else _but_last(times)
        return self._queries(_but_last(tokens), earlier, following, training), _but_first(tokens)

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """The loss of training and the ranks of evaluation; reset at each epoch."""
        return [self.mean, self.ranking]

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this model again, as JSON can hold them."""
        serialize = tf.keras.saving.serialize_keras_object
        names = ("max_length", "item", "time", "negatives", "seed", "name")
        return {
            "collection": serialize(self.collection),
            "backbone": serialize(self.backbone),
            "loss": to_mapping(self.loss_of),
            "dropout": self.drop.rate,
            "ks": self.ranking.ks,
            "items": self.catalogue.config,
            **{name: getattr(self, name) for name in names},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> NextItemModel:
        """The model that `get_config` described."""
        made = {
            part: tf.keras.saving.deserialize_keras_object(config[part], custom_objects)
            for part in ("collection", "backbone")
        }
        return cls(**{**config, **made, "loss": from_mapping(SampledSoftmax, config["loss"], "loss")})

    def _sequences(self, x: Mapping[str, Any], longest: int) -> tuple[Jagged, Jagged | None]:
        """Ids and times, of each user the last ``longest``."""
        columns = [self.item] if self.time is None else [self.item, self.time]
        missing = [name for name in columns if name not in x]
        if missing:
            raise ConfigError(f"{self.name}: the batch lacks {', '.join(missing)}; it has {', '.join(x)}")
        found = []
        for name in columns:
            column = self._column(name, x[name])
            if column.values.dtype.is_integer:
                column = column._replace(values=tf.cast(column.values, tf.int64))
            found.append(jagged.slice_(column, tf.maximum(jagged.lengths(column) - longest, 0)))
        return found[0], found[1] if self.time is not None else None

    def _column(self, name: str, column: Any) -> Jagged:
        sequences = jagged.as_jagged(column)
        if sequences is None:
            raise ConfigError(
                f"{self.name}: {name} must be ragged, a row a user, or a gmeta.ops.Jagged, got "
                f"{type(column).__name__}; tf.ragged.boolean_mask(x, x != -1) makes it of a matrix padded "
                "with -1"
            )
        dtype = sequences.values.dtype
        if not dtype.is_integer and (name != self.item or dtype != tf.string):
            wanted = "integers or texts" if name == self.item else "integers, such as seconds"
            raise ConfigError(f"{self.name}: {name} must be {wanted}, got {dtype.name}")
        return sequences

    def _queries(
        self, tokens: Jagged, times: Jagged | None, following: Jagged | None, training: bool | None
    ) -> Jagged:
        places = jagged.take(tf.convert_to_tensor(self.places), jagged.positions(tokens))
        entered = self.drop(tokens.values * self.dim**0.5 + places, training=training)
        view = sequence_view(
            self.backbone.mask, tokens.offsets, times=None if times is None else times.values
        )
        if following is not None:
            view = view._replace(row_times=following.values)
        return self.backbone(Jagged(entered, tokens.offsets), view=view, training=training)

    def _normalize(self, vectors: tf.Tensor) -> tf.Tensor:
        return tf.math.l2_normalize(vectors, axis=-1, epsilon=1e-12) if self.loss_of.normalize else vectors


def _item_feature(name: str, collection: EmbeddingCollection, item: str) -> FeatureConfig:
    features = {feature.name: feature for feature in collection.features}
    if item not in features:
        raise ConfigError(f"{name}: item={item!r} is no feature of the collection: {', '.join(features)}")
    others = [each for each in features if each != item]
    if others:
        raise ConfigError(
            f"{name}: the collection embeds {', '.join(others)} besides {item!r}, which nothing would read: "
            "leave them out"
        )
    if features[item].combiner is not None:
        raise ConfigError(f"{name}: feature {item!r} has a combiner, and every item is a token: leave it out")
    return features[item]


def _but_first(sequences: Jagged) -> Jagged:
    return jagged.slice_(sequences, tf.minimum(jagged.lengths(sequences), 1))


def _but_last(sequences: Jagged) -> Jagged:
    return jagged.split(sequences, tf.maximum(jagged.lengths(sequences) - 1, 0))[0]

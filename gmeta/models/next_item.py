"""A model of what comes next in a history: embedded items, a backbone over sequences, sampled negatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.config import from_mapping, to_mapping
from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection
from gmeta.layers.sequence_view import sequence_view
from gmeta.losses import SampledSoftmax, mean_loss, uniform_negatives
from gmeta.metrics import NextItem, catalogue_ranks
from gmeta.models.model import Model
from gmeta.models.ranks.step import rank_step
from gmeta.ops import Jagged, jagged


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
      collection: The embeddings; of them ``item``'s alone is looked up.
      backbone: A layer over jagged sequences, such as `gmeta.layers.HSTU` or `gmeta.layers.FuXi`.
      items: V; the catalogue's ids are from 0 to V - 1.
      max_length: The longest history that is read, as the backbone's.
      item: The column of items, and their feature.
      time: The column of times; None: the backbone gets none.
      negatives: How many are drawn for a step of the optimizer, the same on all ranks.
      loss: Of samples.
      dropout: The share of the numbers of embedded tokens that are dropped in training.
      seed: Of places, dropout and negatives.
      ks: The k of what is measured.

    Example:
      >>> collection = EmbeddingCollection([FeatureConfig("item", 16)])
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
        items: int,
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
        dims = {feature.name: feature.dim for feature in collection.features}
        if item not in dims:
            raise ConfigError(f"{name}: item={item!r} is no feature of the collection: {', '.join(dims)}")
        self.collection, self.backbone, self.dim = collection, backbone, dims[item]
        self.items = whole_number(f"{name}: items", items, least=1)
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

    @tf.autograph.experimental.do_not_convert
    def call(self, x: Mapping[str, Any], training: bool | None = None) -> tf.Tensor:
        """(users, d): what comes after each history, to be compared with the items' vectors.

        The last item looks back from its own time, as when the next one will come isn't known. Of an empty
        history it is 0.
        """
        ids, times = self._sequences(x, self.max_length)
        vectors = self.collection({self.item: ids.values}, training=training)[self.item]
        return self._normed(jagged.last(self._queries(Jagged(vectors, ids.offsets), times, None, training)))

    @tf.autograph.experimental.do_not_convert
    def item_vectors(self) -> tf.Tensor:
        """(V, d): the vectors of the catalogue; items that were never trained have their initial ones."""
        ids = tf.range(self.items, dtype=tf.int64)
        return self._normed(self.collection({self.item: ids}, training=False)[self.item])

    # AutoGraph would rewrite 200 functions, most of them Keras' own, for the first step: 8 s for nothing.
    @tf.autograph.experimental.do_not_convert
    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """One batch: forward, backward, and a step of dense weights and rows."""
        return super().train_step(data)

    def learn(self, data: Any) -> tuple[tf.Tensor, tf.Tensor, Callable[[], dict[str, tf.Tensor]]]:
        """Every token's loss at telling the next."""
        x, _, _ = tf.keras.utils.unpack_x_y_sample_weight(data)
        ids, times = self._sequences(x, self.max_length + 1)
        # The optimizer's steps are those of all ranks, of one that has no users in a step too.
        step = self.optimizer.iterations
        drawn = uniform_negatives(self.negatives, self.items, seed=self.seed, step=step)
        found = {self.item: tf.concat([ids.values, drawn], axis=0)}
        vectors, total = self.collection(found, training=True)[self.item], tf.size(ids.values)
        queries, positives = self._asked(Jagged(vectors[:total], ids.offsets), times, training=True)
        losses = self.loss_of(
            queries.values,
            positives.values,
            _but_first(ids).values,
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
        x, _, _ = tf.keras.utils.unpack_x_y_sample_weight(data)
        with rank_step(self, data) as step:
            ids, times = self._sequences(x, self.max_length + 1)
            vectors = self.collection({self.item: ids.values}, training=False)[self.item]
            queries, _ = self._asked(Jagged(vectors, ids.offsets), times, training=False)
            last = self._normed(jagged.last(queries))
            ranks = catalogue_ranks(last, self.item_vectors(), jagged.last(ids))
            known = tf.cast(jagged.lengths(ids) > 1, tf.float32)
            self.ranking.update_state(ranks, sample_weight=known)
            return step.end_forward(self.ranking.result())

    def _asked(self, tokens: Jagged, times: Jagged | None, training: bool) -> tuple[Jagged, Jagged]:
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
        names = ("items", "max_length", "item", "time", "negatives", "seed", "name")
        return {
            "collection": serialize(self.collection),
            "backbone": serialize(self.backbone),
            "loss": to_mapping(self.loss_of),
            "dropout": self.drop.rate,
            "ks": self.ranking.ks,
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
            if not isinstance(x[name], tf.RaggedTensor):
                kind = type(x[name]).__name__
                raise ConfigError(f"{self.name}: {name} must be ragged, a row a user, got {kind}")
            column = jagged.from_ragged(x[name])
            column = column._replace(values=tf.cast(column.values, tf.int64))
            found.append(jagged.slice_(column, tf.maximum(jagged.lengths(column) - longest, 0)))
        return found[0], found[1] if self.time is not None else None

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

    def _normed(self, vectors: tf.Tensor) -> tf.Tensor:
        return tf.math.l2_normalize(vectors, axis=-1, epsilon=1e-12) if self.loss_of.normalize else vectors


def _but_first(sequences: Jagged) -> Jagged:
    return jagged.slice_(sequences, tf.minimum(jagged.lengths(sequences), 1))


def _but_last(sequences: Jagged) -> Jagged:
    return jagged.split(sequences, tf.maximum(jagged.lengths(sequences) - 1, 0))[0]

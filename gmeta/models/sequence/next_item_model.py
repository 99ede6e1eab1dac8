"""A model of the next item in a history: embedded items, a backbone over sequences, sampled negatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError, finite_number, whole_number
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.layers import EmbeddingCollection
from gmeta.layers.sequence.reading import sequence_view
from gmeta.losses import SampledSoftmax
from gmeta.losses.multi_task import mean_loss
from gmeta.metrics import NextItem
from gmeta.metrics.next_item import catalogue_ranks
from gmeta.models.sequence.catalogue import Catalogue, Items
from gmeta.models.sequence.history_model import (
    HistoryModel,
    ReadHistories,
    but_first,
    but_last,
    check_times,
    item_feature,
)
from gmeta.models.sequence.negatives import (
    DrawnLaw,
    NegativeDraw,
    Per,
    corrections,
    popularity_shares,
    shape_as,
)
from gmeta.ops import Jagged, jagged
from gmeta.ops.hstu_layer import layer_norm
from gmeta.training.compile_settings import only_columns
from gmeta.training.rank_steps import rank_step
from gmeta.training.windows import column_keys

if TYPE_CHECKING:
    from gmeta.models.sequence.nearest_items import NearestItems

_DRAWN = "gmeta/negatives"  # a column of a part of a batch: what was drawn for it as a part of the whole
_REPEAT_SCALE = 32.0  # at Adam's rate of 1e-3, a hundred steps move the bias by 3
_NEGATIVES = 8192

Places = Literal["from_start", "from_end"]


@tf.keras.saving.register_keras_serializable("gmeta")
class NextItemModel(HistoryModel):
    r"""A model that predicts the next item at every token of a history.

    .. math::
       H &= \mathrm{LN}(\mathrm{backbone}(\mathrm{dropout}(\sqrt{d}\, E[i_1 \dots i_{L-1}] + P))) \\
       s_{kj} &= H_k \cdot E[j] + \beta\, [j \in \{i_1 \dots i_k\}], \quad
       l_k = -\log \frac{e^{s_{k i_{k+1}}}}{e^{s_{k i_{k+1}}} + \sum_{j \in N_k} e^{s_{kj} - \log Q_j}}

    P are learned position vectors, counted from a history's end. The negatives :math:`N_k` are the history's
    own items up to k, and items drawn from the catalogue at each step. :math:`\log Q_j` corrects for the
    former being certain and the latter being drawn. :math:`\beta` is learned: how likely an item repeats.
    Without it a model ranks the items of the history first, because they are most similar to it, even where
    items never repeat. One lookup embeds histories, positives and negatives. The loss is the mean over all
    tokens with a successor, on all ranks. SASRec with sampled softmax trains in this way (Tikhonovich et al.,
    "eSASRec", arXiv 2508.06450), and HSTU's research form on cosines (Zhai et al., "Actions Speak Louder than
    Words", ICML 2024, section 4.1.1); they differ in the backbone.

    A batch is a dict of ragged columns, one row per user in order of time, with the item's id and any other
    columns; ``time`` names a column of int64 times for the backbone. A history longer than ``max_length + 1``
    is cut to its last items. Evaluation measures the rank of a history's last item in the whole catalogue
    (`gmeta.metrics.NextItem`): ``hr@10``, ``ndcg@10``, ``mrr``.

    It trains with a `gmeta.Pipeline`: the negatives of a batch are known before its step. Micro-batches have
    whole users, and a token sees the negatives that it would see in the undivided batch, except those of a
    loss with ``in_batch``, which are the positives of its micro-batch.

    Args:
      collection: The embedding of ``item``, its only feature.
      backbone: A layer over jagged sequences, such as `gmeta.layers.HSTU` or `gmeta.layers.FuXi`.
      items: The catalogue: V, for the ids from 0 to V - 1; or, for a feature with ``hash=True``, a vector of
        ids, any int64 or uint64, or texts. A text and the hash that ``gmeta prepare`` writes for it are the
        same item, whichever of them the catalogue and a batch contain. Negatives are drawn from the
        catalogue, evaluation ranks all of it, and `fit` and `evaluate` refuse histories with other ids.
        Weights belong to ids, so those of a model load into one with more items, or with fewer; new items
        start with their initial rows.
      max_length: The longest history that is read, as for the backbone.
      item: The name of the item column and of its feature.
      time: The column of times; None: the backbone gets no times.
      negatives: m, how many negatives a token sees. None: 8,192, or as many as there are items if they are
        fewer.
      negatives_per: Which tokens share negatives. ``"step"``: all of a step, on all ranks; ``"user"``: those
        of one history; ``"position"``: none. The last two look up m rows for each user or token.
      law: How they are drawn: ``"uniform"``: evenly; ``"popularity"``: in proportion to ``popularity``, which
        the loss corrects for. In-batch negatives come from a loss with ``in_batch``.
      repeats: Whether to learn β, and to have the history's own items among the negatives. False: β is 0.
      popularity: How often each item occurs in training, (V,) numbers from 0 on: the loss then corrects for
        the frequency of negatives (`gmeta.losses.SampledSoftmax`). For a loss with ``in_batch``, and for the
        law ``"popularity"``.
      loss: The sampled softmax loss. None: of dot products, at temperature 1, without in-batch negatives.
      token_scale: The factor of an item's vector before it enters the backbone. None: √d.
      places: Whether position vectors are counted ``"from_end"`` of a history or ``"from_start"``.
      norm: Whether the backbone's output gets a layer norm with weights.
      dropout: The share of the embedded tokens' numbers that are dropped in training.
      seed: The seed of position vectors, dropout and negatives.
      ks: The cutoffs k of the metrics.

    Raises:
      ConfigError: The parts don't go together.

    Example:
      >>> collection = EmbeddingCollection([FeatureConfig("item", dim=16)])
      >>> hstu = HSTU(blocks=2, heads=1, attention_dim=16, value_dim=16, max_length=50)
      >>> model = NextItemModel(collection, hstu, items=1000, max_length=50, time="time")
      >>> model.compile("adam")
      >>> batch = {"item": tf.ragged.constant([[3, 7, 5]]), "time": tf.ragged.constant([[1, 2, 9]])}
      >>> model.predict(batch, verbose=0).shape  # what to look for among the items' vectors
      (1, 16)
    """

    refused_settings: ClassVar[Mapping[str, str]] = {
        **HistoryModel.refused_settings,
        "loss": "the loss is that of the model, made with loss=gmeta.losses.SampledSoftmax(...)",
    }

    def __init__(
        self,
        collection: EmbeddingCollection,
        backbone: tf.keras.layers.Layer,
        *,
        items: Items,
        max_length: int,
        item: str = "item",
        time: str | None = None,
        negatives: int | None = None,
        negatives_per: Per = "step",
        law: DrawnLaw = "uniform",
        repeats: bool = True,
        popularity: Any = None,
        loss: SampledSoftmax | None = None,
        token_scale: float | None = None,
        places: Places = "from_end",
        norm: bool = True,
        dropout: float = 0.0,
        seed: int = 0,
        ks: Sequence[int] = (10, 50),
        name: str = "next_item",
    ) -> None:
        super().__init__(name=name)
        self.collection, self.backbone = collection, backbone
        feature = self.feature = item_feature(name, collection, item)
        self.dim, self.catalogue = feature.width, Catalogue(items, name, feature)
        check_times(name, backbone, time)
        self.max_length = whole_number(f"{name}: max_length", max_length, least=1)
        negatives = min(_NEGATIVES, self.catalogue.size) if negatives is None else negatives
        self.negatives, self.negatives_per, self.law = negatives, negatives_per, law
        self.item, self.time, self.seed = item, time, seed
        self.loss_of = loss or SampledSoftmax(temperature=1.0, normalize=False, in_batch=False)
        if token_scale is not None:
            finite_number(f"{name}: token_scale", token_scale)
        if places not in get_args(Places):
            raise ConfigError(f"{name}: places must be 'from_start' or 'from_end', got {places!r}")
        self.token_scale = self.dim**0.5 if token_scale is None else token_scale
        self.counted_from, self.norm, self.repeats = places, norm, repeats
        if law not in get_args(DrawnLaw):
            raise ConfigError(f"{name}: law must be 'uniform' or 'popularity', got {law!r}")
        self.popularity = popularity_shares(
            name, popularity, self.items, law=law, in_batch=self.loss_of.in_batch
        )
        shares = self.popularity if law == "popularity" else None
        self.draw = NegativeDraw(name, negatives, negatives_per, self.items, seed, shares)
        self.drop = tf.keras.layers.Dropout(dropout, seed=seed)
        initializer = tf.keras.initializers.TruncatedNormal(stddev=self.dim**-0.5, seed=seed)
        self.places = self.add_weight(
            name="places", shape=(self.max_length, self.dim), initializer=initializer
        )
        self.repeat = self.add_weight(name="repeat", shape=(), initializer="zeros") if repeats else None
        self.norm_scale = self.norm_offset = None
        if norm:
            self.norm_scale = self.add_weight(name="norm/scale", shape=(self.dim,), initializer="ones")
            self.norm_offset = self.add_weight(name="norm/offset", shape=(self.dim,), initializer="zeros")
        self.ranking = NextItem(ks)
        self._measure_labels(ks)
        self.mean = tf.keras.metrics.Mean(name="loss")
        # Create all weights now: a model needs them before weights can be loaded.
        nothing = Jagged(tf.zeros([0, self.dim]), tf.zeros([2], tf.int64))
        self.backbone(nothing, times=None if time is None else tf.zeros([0], tf.int64))
        self.built = True

    def call(self, x: Mapping[str, Any], training: bool | None = None) -> tf.Tensor:
        """Compute a query vector per history, (users, d), to be compared with the items' vectors.

        The time of the next item isn't known, so the last item's own time is used in its place. An empty
        history gets 0.
        """
        ids, times = self._sequences(x, self.max_length)
        queries = self._queries(self._embed(ids, training), times, None, training)
        return self._normalize(jagged.last(queries))

    def item_inputs(self, numbers: tf.Tensor) -> dict[str, Any]:
        """Return the input of the lookup of items' rows, by numbers (n,) of items in the catalogue."""
        return {self.item: self.catalogue.keys(numbers)}

    def item_vectors(self, numbers: Any = None) -> tf.Tensor:
        """Compute vectors of items, (n, d); untrained items have their initial vectors.

        Args:
          numbers: (n,) int64, numbers of items in the catalogue. None: all items, (V, d).
        """
        numbers = tf.range(self.items, dtype=tf.int64) if numbers is None else numbers
        return self._normalize(self.collection(self.item_inputs(numbers), training=False)[self.item])

    @property
    def repeat_bias(self) -> tf.Tensor:
        """The number added to the logits of items that the history has, (); 0 without ``repeats``."""
        return tf.zeros([]) if self.repeat is None else _REPEAT_SCALE * self.repeat

    @property
    def scaled_bias(self) -> tf.Tensor:
        """`repeat_bias` as it is added to the products of vectors, ()."""
        return self.repeat_bias * self.loss_of.temperature

    def recommend(
        self,
        x: Mapping[str, Any],
        k: int = 10,
        *,
        leave_out_seen: bool = False,
        leave_out: Any = None,
        allow: Any = None,
        nearest: NearestItems | None = None,
        vectors: Any = None,
        popular: Any = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Find the k items of the catalogue that most likely come next.

        For a history without an item of the catalogue, these are the items that occurred most often in
        training (`Catalogue.most_popular`), by the same filters. Filters apply before the best are chosen,
        so there are k items wherever k remain.

        Args:
          x: A batch.
          k: The number of items.
          leave_out_seen: Whether to leave out the items of the history, as far as it is read.
          leave_out: Ids of further items to leave out for each user, such as blocked ones: ragged, one row
            per user, or a matrix (users, width) padded with -1 or the empty text. Ids that the catalogue
            lacks have no effect.
          allow: bool (V,), which items are allowed, such as those in stock, in the order of the catalogue.
            None: all.
          nearest: An index of this model's `item_vectors`, which finds nearly all of the best items without
            scoring the whole catalogue; only outside of graphs. None: all are scored.
          vectors: The result of `item_vectors`, if it is known already.
          popular: The result of ``catalogue.most_popular(k, allow)``, or with ``leave_out`` of
            ``catalogue.most_popular(V, allow)``, if it is known already.

        Returns:
          (users, k) ids, the likeliest first; and (users, k) scores, the products of item vectors with the
          result of `predict`, and `repeat_bias` times the temperature more for items of the history. Where
          fewer than k are left, -1 or the empty text, with the score -inf. The scores of an answer by
          popularity are logs of the items' shares among those of ``allow``.

        Raises:
          ConfigError: The catalogue has fewer than k items; or a filter has another form.

        Example:
          >>> items, _ = model.recommend(batch, 5, leave_out=[[8, 15]], allow=in_stock)  # doctest: +SKIP
        """
        ids = self._sequences(x, self.max_length)[0]
        items = ids._replace(values=self.catalogue.find(ids.values))
        filters = {"leave_out_seen": leave_out_seen, "leave_out": leave_out, "allow": allow}
        known = {"vectors": vectors, "popular": popular, "nearest": nearest}
        return self.recommend_after(ReadHistories(items, self(x, training=False)), k, **filters, **known)

    def recommend_after(
        self,
        histories: ReadHistories,
        k: int,
        *,
        leave_out_seen: bool = False,
        leave_out: Any = None,
        allow: Any = None,
        popular: Any = None,
        **known: Any,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Find the items that most likely come after histories that were read, as `recommend` does."""
        items, blocked = histories.items, self._blocked(histories.items, leave_out)
        filters: dict[str, Any] = {"leave_out": blocked, "allow": self.catalogue.mask(allow)}
        if leave_out_seen:
            seen = jagged.to_ragged(items)
            filters["leave_out"] = seen if blocked is None else tf.concat([seen, blocked], axis=1)
        elif self.repeats:
            filters |= {"again": jagged.to_ragged(items), "bias": self.scaled_bias}
        numbers, scores = self._best(histories.vector, k, **known, **filters)
        return self._by_popularity(items, numbers, scores, popular, blocked, allow)

    def learn(self, data: Any) -> tuple[tf.Tensor, tf.Tensor, Callable[[], dict[str, tf.Tensor]]]:
        """Compute the mean loss of predicting each token's next item, and the number of tokens."""
        items, times, drawn = self._read(only_columns(self.name, data))
        self.catalogue.count(items.values)
        following, total = but_first(items), tf.size(items.values)
        vectors = self.collection(self._wanted(items, drawn), training=True)[self.item]
        queries, positives = self._ask(items._replace(values=vectors[:total]), times, training=True)
        losses = self.loss_of(
            queries.values,
            positives.values,
            following.values,
            negatives=shape_as(drawn, vectors[total:]),
            negative_ids=drawn,
            offsets=following.offsets if self.negatives_per == "user" else None,
            **corrections(self.popularity, following.values, drawn, self.draw, self.loss_of.in_batch),
            **self._look_back(items, vectors[:total]),
        )
        loss, samples = mean_loss(losses), tf.size(losses)

        def measure() -> dict[str, tf.Tensor]:
            self.mean.update_state(loss, sample_weight=samples)
            return {"loss": self.mean.result()}

        return loss, samples, measure

    def _read(self, x: Mapping[str, Any]) -> tuple[Jagged, Jagged | None, tf.Tensor]:
        """Return the numbers of a batch's items, its times, and the numbers of its negatives."""
        ids, times = self._sequences(x, self.max_length + 1)
        items = ids._replace(values=self.catalogue.numbers(ids.values))
        if _DRAWN not in x:
            # All ranks count the same optimizer steps, also a rank without users in a step.
            return items, times, self.draw(but_first(items), self.step_number)
        return items, times, drawn.values if isinstance(drawn := x[_DRAWN], Jagged) else drawn

    def _wanted(self, items: Jagged, drawn: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return the input of a step's lookup; only ids that the catalogue has are embedded."""
        numbers = [items.values, tf.reshape(drawn, [-1])]
        with tf.device("CPU:0"):  # where keys are made of them
            return {self.item: self.catalogue.keys(tf.concat(numbers, axis=0))}

    def lookup_inputs(self, data: Any) -> list[tuple[EmbeddingCollection, Any]]:
        """Return the one lookup of a train step: of histories and negatives."""
        items, _, drawn = self._read(only_columns(self.name, data))
        return [(self.collection, self._wanted(items, drawn))]

    def split_batch(self, data: Any, units: Sequence[tf.Tensor]) -> list[Any]:
        """Split a batch into micro-batches of users; each user keeps the negatives of the whole batch."""
        x = only_columns(self.name, data)
        if self.negatives_per != "step":
            positions = but_first(self._sequences(x, self.max_length + 1)[0])
            drawn = self.draw(positions, self.step_number)
            own = drawn if self.negatives_per == "user" else positions._replace(values=drawn)
            x = {**x, _DRAWN: own}
        return super().split_batch(x, units)

    def unit_keys(self, data: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the keys of users: the items of their histories.

        Raises:
          ConfigError: Negatives are drawn for a user's place in the batch.
        """
        if self.negatives_per != "step":
            raise ConfigError(
                f"{self.name}: negatives_per={self.negatives_per!r} draws negatives for a user's place in "
                "the batch, which Pipeline(cluster=True) changes: leave cluster out, or use 'step'"
            )
        return column_keys({self.item: only_columns(self.name, data)[self.item]})

    def _look_back(self, numbers: Jagged, vectors: tf.Tensor) -> dict[str, Any]:
        """Return the items that each token has in its history, as the loss takes them."""
        if not self.repeats:
            return {}
        # An item of the history is a candidate for certain, another is drawn m / V times on average.
        certain = 0.0 if self.popularity is not None else math.log(self.items / self.negatives)
        return {
            "earlier": but_last(numbers._replace(values=vectors)),
            "earlier_ids": but_last(numbers).values,
            "earlier_log_q": certain - self.repeat_bias,
        }

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Measure the ranks of the items that are asked for (`evaluate`).

        Without labels, histories of one item don't count.
        """
        x, right = self._asked(data)
        with rank_step(self, data) as step:
            if right is not None:
                longest = None if self._leaves_out_seen else self.max_length
                histories, last = self._numbers(x, longest), self(x, training=False)
                right = right._replace(values=self.catalogue.numbers(right.values))
                owner = jagged.row_ids(right)
                ranks = self._ranks(histories, last, right.values, owner)
                self.retrieval.update_state(jagged.to_ragged(right._replace(values=ranks)))
                return step.end_forward(self.retrieval.result())
            ids, times = self._sequences(x, self.max_length + 1)
            numbers = Jagged(self.catalogue.numbers(ids.values), ids.offsets)
            vectors = self._embed(ids._replace(values=self.catalogue.keys(numbers.values)), False)
            queries, _ = self._ask(vectors, times, training=False)
            last = self._normalize(jagged.last(queries))
            ranks = self._ranks(but_last(numbers), last, jagged.last(numbers))
            known = tf.cast(jagged.lengths(ids) > 1, tf.float32)
            self.ranking.update_state(ranks, sample_weight=known)
            return step.end_forward(self.ranking.result())

    def _ranks(self, histories: Jagged, queries: tf.Tensor, right: tf.Tensor, owner: Any = None) -> tf.Tensor:
        """Return the ranks of items, (n,): of users 0, 1, …, or of those that ``owner`` names."""
        seen: dict[str, Any] = {}
        if self._leaves_out_seen or self.repeats:
            seen["seen"] = jagged.to_ragged(histories)
        if self.repeats and not self._leaves_out_seen:
            seen["seen_bias"] = self.scaled_bias
        if owner is not None:
            queries = tf.gather(queries, owner)
            seen |= {name: tf.gather(seen[name], owner) for name in ("seen",) if name in seen}
        return catalogue_ranks(queries, self.item_vectors(), right, **seen)

    def _ask(self, tokens: Jagged, times: Jagged | None, training: bool) -> tuple[Jagged, Jagged]:
        """Return a query for each token with a successor, and the vectors of the successors."""
        earlier, following = (None, None) if times is None else (but_last(times), but_first(times))
        return self._queries(but_last(tokens), earlier, following, training), but_first(tokens)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this model, in a form that JSON can hold."""
        serialize = tf.keras.saving.serialize_keras_object
        names = ("max_length", "item", "time", "negatives", "negatives_per", "law", "repeats", "token_scale")
        return {
            "collection": serialize(self.collection),
            "backbone": serialize(self.backbone),
            "loss": to_mapping(self.loss_of),
            "dropout": self.drop.rate,
            "ks": self.ranking.ks,
            "items": self.catalogue.config,
            "places": self.counted_from,
            "popularity": None if self.popularity is None else self.popularity.numpy().tolist(),
            **{name: getattr(self, name) for name in (*names, "norm", "seed", "name")},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> NextItemModel:
        """Create the model that a config from `get_config` describes; older ones lack some."""
        former = {"negatives_per": "step", "repeats": False, "norm": False, "places": "from_start"}
        made = {
            part: tf.keras.saving.deserialize_keras_object(config[part], custom_objects)
            for part in ("collection", "backbone")
        }
        loss = from_mapping(SampledSoftmax, config["loss"], "loss")
        return cls(**{**former, **config, **made, "loss": loss})

    def _queries(
        self, tokens: Jagged, times: Jagged | None, following: Jagged | None, training: bool | None
    ) -> Jagged:
        entered = self.drop(self._placed(tokens).values, training=training)
        now = None if times is None else times.values
        view = sequence_view(self.backbone.mask, tokens.offsets, times=now)
        if following is not None:
            view = view._replace(row_times=following.values)
        found = self.backbone(Jagged(entered, tokens.offsets), view=view, training=training)
        return found._replace(values=self._norm_of(found.values))

    def _embed(self, ids: Jagged, training: bool | None) -> Jagged:
        """Look up items by ids or keys, also unknown ones."""
        return ids._replace(values=self.collection({self.item: ids.values}, training=training)[self.item])

    def _placed(self, tokens: Jagged, before: tf.Tensor | None = None) -> Jagged:
        """Scale items' vectors, and add those of places, ``before`` (users,) further on."""
        numbers = jagged.positions(tokens)
        if self.counted_from == "from_end":
            numbers = tf.gather(jagged.lengths(tokens), jagged.row_ids(tokens)) - 1 - numbers
        elif before is not None:
            numbers += tf.gather(before, jagged.row_ids(tokens))
        places = jagged.take(tf.convert_to_tensor(self.places), numbers)
        return tokens._replace(values=tokens.values * self.token_scale + places)

    @property
    def moves_tokens(self) -> bool:
        """Whether the tokens of a history change when items follow it: if places count from its end."""
        return self.counted_from == "from_end"

    def tokens_of(
        self, keys: Jagged, times: Jagged | None, before: tf.Tensor | None = None
    ) -> tuple[Jagged, Jagged | None]:
        """Make the tokens that the backbone reads, as of `HistoryModel.tokens_of`."""
        return self._placed(self._embed(keys, False), before), times

    def leave(self, values: tf.Tensor) -> tf.Tensor:
        """Make queries of the backbone's output, (n, d) -> (n, d)."""
        return self._normalize(self._norm_of(values))

    def _norm_of(self, values: tf.Tensor) -> tf.Tensor:
        return layer_norm(values, self.norm_scale, self.norm_offset) if self.norm else values

    def reading_weights(self) -> list[tf.Variable]:
        """Return the dense weights that read a history."""
        norm = [self.norm_scale, self.norm_offset] if self.norm else []
        return [*self.backbone.weights, self.places, *norm]

    def reading_settings(self) -> list[Any]:
        """Return the settings, besides the backbone's, that the meaning of what is kept depends on."""
        kind = [type(self).__name__, self.feature.hash, self.time is not None, self.max_length]
        return [*kind, self.counted_from, self.norm, self.token_scale]

    def _normalize(self, vectors: tf.Tensor) -> tf.Tensor:
        return tf.math.l2_normalize(vectors, axis=-1, epsilon=1e-12) if self.loss_of.normalize else vectors

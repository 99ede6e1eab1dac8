"""A model that generates the code of the next item, which it finds in a trie instead of a whole catalogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError, finite_number, whole_number
from gmeta.core.semantic_ids import SemanticIds
from gmeta.layers import EmbeddingCollection
from gmeta.losses.multi_task import mean_loss
from gmeta.models.generative.code_model import CodeModel, SeenItems, catalogue_of, depth_of, marks_of
from gmeta.models.generative.code_tables import CodeTables, ids_config, ids_from_config
from gmeta.models.generative.digit_decoder import CodeScorer, CodeWalk
from gmeta.models.sequence.history_model import ReadHistories, but_first, but_last
from gmeta.models.sequence.next_item_model import NextItemModel, Places
from gmeta.ops import Jagged, jagged
from gmeta.training.compile_settings import only_columns

_FEW = 1 << 16  # items of which a search looks up all at once, instead of those at the ends of its beams
_BLOCK = 1 << 20  # items of which `item_vectors` has the vectors of all codes in memory at once
_SETTINGS = (
    *("collection", "backbone", "max_length", "item", "time"),
    *("negatives", "repeats", "places", "dropout", "ks"),
)


@tf.keras.saving.register_keras_serializable("gmeta")
class GenerativeRetriever(CodeModel, NextItemModel):
    r"""A model that predicts the next item's semantic id, digit by digit.

    .. math::
       v_j &= E[j] + \textstyle\sum_l C_l[d_{jl}], \quad
       H = \mathrm{LN}(\mathrm{backbone}(\mathrm{dropout}(\sqrt{d}\, v_{i_1} \dots v_{i_{L-1}} + P))) \\
       p(j \mid H_k) &= \textstyle\prod_l p(d_{jl} \mid d_{j1} \dots d_{j,l-1}, H_k) \\
       l_k &= -\log p(i_{k+1} \mid H_k) + \lambda\, l^{\mathrm{sampled}}_k

    The trunk is that of `NextItemModel`, except that an item's vector also includes its codes, so that rare
    items share what is learned from similar ones. From H a decoder (`DigitDecoder`) computes a query for each
    digit, given those before it. The logits of a level are the products of its query with the vectors C of
    the level's codes, plus a bias. The last digit only numbers the items that share all generated codes
    (``depth``), so its logits are products with these items' own vectors v, plus β for the items of the
    history, as in `NextItemModel`: where codes leave some tens of items to choose from, a search by codes
    ends in a search by vectors. Each digit's probabilities are normalised over the digits that may follow, so
    the probabilities of all items sum to one exactly, and the model never generates a code that no item has.
    The loss is the mean over all tokens with a successor, on all ranks; its last term is `NextItemModel`'s
    own loss, on H and v.

    Batches, histories, `fit`, pipelines and ranks are as in `NextItemModel`. `retrieve` searches by beams.
    `evaluate` measures that search: an item that it doesn't find has the last rank. `recommend` compares the
    trunk's vector with those of all items, as `NextItemModel` does; only the additional loss (``sampled``)
    trains this comparison.

    Args:
      collection: The embedding of ``item``, its only feature.
      backbone: As for `NextItemModel`.
      ids: The semantic ids of the catalogue, whose order is that of their items.
      max_length: The longest history that is read, as for the backbone.
      item: The name of the item column and of its feature.
      time: The column of times; None: the backbone gets no times.
      depth: How many codes are generated as digits, from 1 on; their vectors distinguish the items that
        share these codes. None: all codes.
      width: The width of the decoder's tokens.
      blocks: The number of the decoder's blocks.
      heads: The number of the decoder's attention heads; it must divide the width.
      beam: The number of prefixes that `evaluate` keeps at each digit.
      sampled: λ, from 0 on.
      negatives: How many negatives the additional loss draws per step, as for `NextItemModel`.
      repeats: Whether to learn β, as for `NextItemModel`.
      places: As for `NextItemModel`.
      dropout: The share of numbers that are dropped in training: of the embedded tokens and in the decoder.
      seed: The seed of initial values, dropout and negatives.
      ks: The cutoffs k of the metrics, up to ``beam``.

    Raises:
      ConfigError: The parts don't go together, or a number is out of its limits.

    Example:
      >>> from gmeta.preprocess import semantic_ids
      >>> ids = semantic_ids(np.random.default_rng(0).normal(size=(1000, 8)), levels=2, codes=16)
      >>> collection = EmbeddingCollection([FeatureConfig("item", dim=16)])
      >>> hstu = HSTU(blocks=2, heads=1, attention_dim=16, value_dim=16, max_length=50, bias_by_time=False)
      >>> model = GenerativeRetriever(collection, hstu, ids, max_length=50)
      >>> model.compile("adam")
      >>> items, scores = model.retrieve({"item": tf.ragged.constant([[3, 7, 5], [8]])}, k=10)
      >>> items.shape
      TensorShape([2, 10])

    References:
      Rajput et al., "Recommender Systems with Generative Retrieval" (NeurIPS 2023), section 3. Yang et al.,
      "Unifying Generative and Dense Retrieval for Sequential Recommendation" (arXiv 2411.18814), section 4,
      for items' vectors beside codes.
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        backbone: tf.keras.layers.Layer,
        ids: SemanticIds,
        *,
        max_length: int,
        item: str = "item",
        time: str | None = None,
        depth: int | None = None,
        width: int = 64,
        blocks: int = 1,
        heads: int = 2,
        beam: int = 50,
        sampled: float = 1.0,
        negatives: int | None = None,
        repeats: bool = True,
        places: Places = "from_end",
        dropout: float = 0.0,
        seed: int = 0,
        ks: Sequence[int] = (10, 50),
        name: str = "generative_retriever",
    ) -> None:
        super().__init__(
            collection,
            backbone,
            items=catalogue_of(ids),
            max_length=max_length,
            item=item,
            time=time,
            negatives=negatives,
            repeats=repeats,
            places=places,
            dropout=dropout,
            seed=seed,
            ks=ks,
            name=name,
        )
        for what, value, least in (("width", width, 1), ("heads", heads, 1), ("blocks", blocks, 0)):
            whole_number(f"{name}: {what}", value, least=least)
        if width % heads:
            raise ConfigError(f"{name}: heads must divide the decoder's width, got {heads} and {width}")
        if finite_number(f"{name}: sampled", sampled) < 0:
            raise ConfigError(f"{name}: sampled must be at least 0, got {sampled}")
        self._check_beam(max(self.ranking.ks), beam)
        depth = depth_of(name, ids, depth)
        self.ids, self.depth, self.beam, self.sampled = ids, depth, beam, sampled
        self.scorer = CodeScorer(
            ids, depth, self.dim, width=width, blocks=blocks, heads=heads, dropout=dropout, seed=seed
        )
        self.catalogue.marks = marks_of(ids.digits[:, :-1])
        self.code_mean = tf.keras.metrics.Mean(name="code_loss")

    def call(self, x: Mapping[str, Any], training: bool | None = None) -> tf.Tensor:
        """Compute the trunk's vector of each history, (users, d), after which the next item comes."""
        return self._read_histories(x, training)[0]

    def item_vectors(self, numbers: Any = None) -> tf.Tensor:
        """Compute the vectors v of items, (n, d).

        Args:
          numbers: As for `item_rows`.
        """
        if numbers is not None:
            return self.scorer.with_codes(self.item_rows(numbers), numbers)
        rows, numbers = self.item_rows(), tf.range(self.items, dtype=tf.int64)
        blocks = [slice(begin, begin + _BLOCK) for begin in range(0, self.items, _BLOCK)]
        return tf.concat([self.scorer.with_codes(rows[block], numbers[block]) for block in blocks], axis=0)

    def item_rows(self, numbers: Any = None) -> tf.Tensor:
        """Look up the rows E of items, (n, d); untrained items have their initial rows.

        Args:
          numbers: (n,) int64, numbers of items in the catalogue. None: all items, (V, d).
        """
        numbers = tf.range(self.items, dtype=tf.int64) if numbers is None else numbers
        return self._rows([self.catalogue.keys(numbers)], False)

    def retrieve(
        self,
        x: Mapping[str, Any],
        k: int = 10,
        *,
        beam: int | None = None,
        allow: Any = None,
        leave_out_seen: bool = False,
        leave_out: Any = None,
        rows: Any = None,
        popular: Any = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Find the items that most likely come next, by a beam search over the codes.

        The trunk is computed once for each user, and the decoder once for each digit of each beam.

        Args:
          x: As in `CodeModel.retrieve`.
          k: As there.
          beam: As there.
          allow: As there.
          leave_out_seen: As there.
          leave_out: As there.
          rows: The result of `item_rows`, if it is known already. None: they are looked up.
          popular: As there.

        Returns:
          As there.

        Raises:
          ConfigError: As there.
        """
        return self._find(*self._open(x, rows=rows), k, beam, allow, leave_out_seen, leave_out, popular)

    def digit_log_probs(
        self, x: Mapping[str, Any], items: Any, training: bool = False, *, allow: Any = None
    ) -> tf.Tensor:
        """Compute the logs of the probabilities of given items' digits; their sum is that of the item's.

        Args:
          x: A batch.
          items: (users, group) ids, of items that may come after the histories.
          training: Whether to apply dropout, and to make rows for new ids. Gradients reach rows and weights.
          allow: As for `retrieve`: probabilities are normalised over the allowed items.

        Returns:
          float32 (users, group, L); for an item that isn't allowed, -inf from the digit on that rules it
          out, without gradient.

        Raises:
          ConfigError: An id isn't in the catalogue; or the mask has another length, or forbids every item.
        """
        allowed = self._allowed(allow)
        ids, times = self._sequences(x, self.max_length)
        wanted = tf.convert_to_tensor(items)
        numbers = self.catalogue.numbers(tf.reshape(wanted, [-1]))
        siblings = self.scorer.siblings(numbers)
        cut, keys = [tf.size(ids.values), tf.size(siblings)], self.catalogue.keys(tf.reshape(siblings, [-1]))
        known, others = tf.split(self._rows([ids.values, keys], training), cut)
        histories = ids._replace(values=self.catalogue.find(ids.values))
        tokens = histories._replace(values=self.scorer.with_codes(known, histories.values))
        h = jagged.last(self._queries(tokens, times, None, training))
        users = tf.repeat(tf.range(tf.shape(h, tf.int64)[0]), tf.shape(wanted)[1])
        biases = self._biases(SeenItems(histories, self.items).holds(users, siblings))
        h = jagged.take(h, users)
        found = self.scorer(h, numbers, siblings, others, biases, allowed, training=training)
        return tf.reshape(found, tf.concat([tf.shape(wanted), [self.scorer.codes.levels]], axis=0))

    def learn(self, data: Any) -> tuple[tf.Tensor, tf.Tensor, Callable[[], dict[str, tf.Tensor]]]:
        """Compute the mean loss of predicting each token's next item, and the number of tokens."""
        items, times, drawn = self._read(only_columns(self.name, data))
        self.catalogue.count(items.values)
        asked, following = but_last(items), but_first(items).values
        siblings = self.scorer.siblings(following)
        cut = [tf.size(items.values), tf.size(siblings), tf.size(drawn) if self.sampled else 0]
        rows = self.collection(self._wanted(items, drawn), training=True)[self.item]
        known, others, negatives = tf.split(rows, cut)
        tokens = self.scorer.with_codes(known, items.values)
        queries, positives = self._ask(items._replace(values=tokens), times, training=True)
        users = jagged.row_ids(asked)
        until = tf.gather(items.offsets, users) + jagged.positions(asked)
        biases = self._biases(SeenItems(items, self.items).holds(users, siblings, until))
        logs = self.scorer(queries.values, following, siblings, others, biases, training=True)
        code_losses = -tf.reduce_sum(logs, axis=1)
        losses = code_losses
        if self.sampled:
            losses += self.sampled * self.loss_of(
                queries.values,
                positives.values,
                following,
                negatives=self.scorer.with_codes(negatives, drawn),
                negative_ids=drawn,
                **self._look_back(items, tokens),
            )
        loss, code_loss, samples = mean_loss(losses), mean_loss(code_losses), tf.size(losses)

        def measure() -> dict[str, tf.Tensor]:
            self.mean.update_state(loss, sample_weight=samples)
            self.code_mean.update_state(code_loss, sample_weight=samples)
            return {"loss": self.mean.result(), "code_loss": self.code_mean.result()}

        return loss, samples, measure

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """The training losses and the ranking metrics of evaluation, reset at each epoch."""
        return [*super().metrics, self.code_mean]

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this model, in a form that JSON can hold."""
        config = super().get_config()
        return {
            **{name: config[name] for name in (*_SETTINGS, "seed", "name")},
            "ids": ids_config(self.ids),
            "width": self.scorer.decoder.width,
            "blocks": len(self.scorer.decoder.blocks),
            "heads": self.scorer.decoder.heads,
            "depth": self.depth,
            "beam": self.beam,
            "sampled": self.sampled,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> GenerativeRetriever:
        """Create the model that a config from `get_config` describes."""
        made = {
            part: tf.keras.saving.deserialize_keras_object(config[part], custom_objects)
            for part in ("collection", "backbone")
        }
        return cls(**{**config, **made, "ids": ids_from_config(config["ids"])})

    @property
    def codes(self) -> CodeTables:
        """The trie of codes, and each item's path through it."""
        return self.scorer.codes

    def _tables(self) -> dict[str, Any]:
        return {"collection": self.collection}

    def _open(
        self, x: Mapping[str, Any], training: bool = False, rows: Any = None
    ) -> tuple[CodeWalk, Jagged]:
        h, histories = self._read_histories(x, training)
        return self._walk(h, SeenItems(histories, self.items), rows), histories

    def _open_before_last(self, ids: Jagged, items: Jagged, times: Jagged | None) -> CodeWalk:
        tokens = self.scorer.with_codes(self._rows([ids.values], False), items.values)
        queries, _ = self._ask(items._replace(values=tokens), times, training=False)
        return self._walk(jagged.last(queries), SeenItems(but_last(items), self.items), None)

    def _walk_after(self, histories: ReadHistories, rows: Any) -> CodeWalk:
        return self._walk(histories.vector, SeenItems(histories.items, self.items), rows)

    def _read_histories(self, x: Mapping[str, Any], training: bool | None) -> tuple[tf.Tensor, Jagged]:
        """Return the trunk's vectors (users, d), and the numbers of the histories' items, -1 if unknown."""
        ids, times = self._sequences(x, self.max_length)
        queries = self._queries(self._embed(ids, training), times, None, training)
        return jagged.last(queries), ids._replace(values=self.catalogue.find(ids.values))

    def _embed(self, ids: Jagged, training: bool | None) -> Jagged:
        rows, numbers = self._rows([ids.values], training), self.catalogue.find(ids.values)
        return ids._replace(values=self.scorer.with_codes(rows, numbers))

    def reading_weights(self) -> list[tf.Variable]:
        """Return the dense weights that read a history: the codes' vectors too."""
        return [*super().reading_weights(), self.scorer.vectors]

    def _rows(self, ids: Sequence[tf.Tensor], training: bool | None) -> tf.Tensor:
        return self.collection({self.item: tf.concat(ids, axis=0)}, training=training)[self.item]

    def _wanted(self, items: Jagged, drawn: tf.Tensor) -> dict[str, tf.Tensor]:
        siblings = tf.reshape(self.scorer.siblings(but_first(items).values), [-1])
        numbers = [items.values, siblings, *([drawn] if self.sampled else [])]
        return {self.item: self.catalogue.keys(tf.concat(numbers, axis=0))}

    def _walk(self, h: tf.Tensor, seen: SeenItems, rows: Any) -> CodeWalk:
        if rows is None and self.items <= _FEW:
            rows = self.item_rows()

        def logits(level: int, query: tf.Tensor, nodes: tf.Tensor, users: tf.Tensor) -> tf.Tensor:
            if level < self.depth:
                return self.scorer.code_logits(level, query)
            siblings = self.scorer.codes.siblings(nodes)
            flat = tf.reshape(siblings, [-1])
            found = self._rows([self.catalogue.keys(flat)], False) if rows is None else tf.gather(rows, flat)
            return self.scorer.item_logits(query, siblings, found, self._biases(seen.holds(users, siblings)))

        return CodeWalk(self.scorer.decoder, self.scorer.codes, h, logits)

    def _biases(self, seen: tf.Tensor) -> tf.Tensor:
        return self.repeat_bias * tf.cast(seen, tf.float32)

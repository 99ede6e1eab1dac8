"""A model that generates the code of the next item, and reads histories as codes, digit by digit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.semantic_ids import SemanticIds
from gmeta.layers import FeatureConfig
from gmeta.layers.sequence.reading import Reading, sequence_view
from gmeta.layers.sequence.stack import SequenceStack
from gmeta.losses.multi_task import mean_loss
from gmeta.metrics import NextItem
from gmeta.models.generative.code_model import CodeModel, catalogue_of, depth_of, marks_of
from gmeta.models.generative.code_tables import CodeTables, ids_config, ids_from_config
from gmeta.models.generative.digit_decoder import CodeVectors, of_items
from gmeta.models.sequence.catalogue import Catalogue
from gmeta.models.sequence.history_model import ReadHistories, but_first, but_last, check_times
from gmeta.ops import Jagged, jagged
from gmeta.ops.hstu_layer import layer_norm
from gmeta.training.compile_settings import only_columns

# Beams whose digits are tokens after a history. The keys and values of the history are kept.

Append = Callable[[int, tf.Tensor, Any], tf.Tensor]
"""A level, its digits (users, beams), and the beams that they go on, None: histories -> (users, beams, d)."""


class FlatWalk:
    """A `Walk` whose digits the backbone reads as tokens.

    Args:
      tables: The codes.
      h: (users, d), the backbone's output after the histories.
      append: Reads one more digit of each beam.
      logits: The logits of a level, of queries (n, d).
    """

    def __init__(
        self,
        tables: CodeTables,
        h: tf.Tensor,
        append: Append,
        logits: Callable[[int, tf.Tensor], tf.Tensor],
    ) -> None:
        self.tables, self.h, self._append, self._logits = tables, h, append, logits
        self.level, self.users, self.levels = 0, tf.shape(h)[0], tables.levels

    def logits(self, nodes: tf.Tensor, beams: Any = None, digits: Any = None) -> tf.Tensor:
        """Compute the logits of the children of nodes, as of `Walk`."""
        level, many = self.level, tf.shape(nodes)[1]
        self.level += 1
        if beams is None:
            found = self._logits(level, self.h)[:, tf.newaxis]
            return tf.repeat(found, many, axis=1)
        digits = self.tables.digits_at(level, nodes) if digits is None else digits
        # A beam of the first digit goes on from the history, whichever of several equal roots it had.
        queries = self._append(level - 1, digits, tf.maximum(beams, 0) if level > 1 else None)
        found = self._logits(level, tf.reshape(queries, [-1, self.h.shape[-1]]))
        return tf.reshape(found, [self.users, many, self.tables.sizes[level]])


Softmax = Literal["children", "codes"]
_SETTINGS = ("dim", "max_length", "item", "time", "hash", "depth", "softmax", "beam", "seed", "name")


@tf.keras.saving.register_keras_serializable("gmeta")
class FlatRetriever(CodeModel):
    r"""A model that predicts the next item's semantic id as language models predict text, token by token.

    .. math::
       X &= [b, x_{11} \dots x_{1D}, x_{21} \dots x_{nD}], \quad x_{kl} = \sqrt{d}\, C_l[d_{kl}] + P_k \\
       H &= \mathrm{LN}(\mathrm{backbone}(\mathrm{dropout}(X))), \quad
       p(d_{kl} \mid \text{tokens before}) = \mathrm{softmax}(C_l h + b_l)

    This is the flat form of TIGER with two differences: the backbone is one causal stack instead of an
    encoder and a decoder, and there is no token of the user. h is the output at the token before a digit. The
    softmax is over the digits that may follow, so the probabilities of all items sum to one exactly. The last
    of the D digits numbers the items that share all generated codes (``depth``); it is a token with its own
    vector, like any other. Items have no rows of their own: all weights are dense. P are learned vectors of
    the items' places from the start of what is read, which is the last ``max_length`` items. The loss is the
    mean, over all items with a predecessor and on all ranks, of the sum over the item's digits of -log p.

    `retrieve` reads the history once and keeps the keys and values of each block; a digit of a beam is one
    token, which attends to them and to the beam's digits before it
    (`gmeta.layers.sequence.stack.SequenceStack.read_on`). So each digit of each beam costs attention to D
    tokens for each item of the history: about ``beams * D * D * n`` products. `GenerativeRetriever` reads a
    history as n tokens, and its beams don't touch them.

    Batches, histories, `fit` and ranks are as in `NextItemModel`, `evaluate`, `sample` and masks as in
    `GenerativeRetriever`. As there are no rows to fetch, `compile` takes no `gmeta.Pipeline`. An item that
    isn't in the catalogue is read as D tokens without codes.

    Args:
      backbone: A stack that can read on, such as `gmeta.layers.HSTU`. Its own ``max_length`` counts tokens: D
        for each item that is read, one for the beginning, and D for the answer.
      ids: The semantic ids of the catalogue, whose order is that of their items.
      dim: d, the width of tokens.
      max_length: The longest history that is read, in items.
      item: The name of the item column.
      time: The column of times; None: the backbone gets no times. A digit has the time of its item.
      hash: Whether ids are any int64 or texts, as for a `gmeta.layers.FeatureConfig`.
      depth: How many codes are generated as digits, from 1 on. None: all codes.
      softmax: What training normalises over: the digits that may follow (``"children"``), or all codes of a
        level (``"codes"``), as TIGER does, so that a model also learns which codes no item has. Searches,
        draws and `digit_log_probs` always normalise over the digits that may follow.
      beam: The number of prefixes that `evaluate` keeps at each digit.
      dropout: The share of the embedded tokens' numbers that are dropped in training.
      seed: The seed of initial values and dropout.
      ks: The cutoffs k of the metrics, up to ``beam``.

    Raises:
      ConfigError: The parts don't go together, or a number is out of its limits.

    Example:
      >>> from gmeta.preprocess import semantic_ids
      >>> ids = semantic_ids(np.random.default_rng(0).normal(size=(1000, 8)), levels=2, codes=16)
      >>> hstu = HSTU(blocks=2, heads=1, attention_dim=16, value_dim=16, max_length=154, bias_by_time=False)
      >>> model = FlatRetriever(hstu, ids, dim=16, max_length=50)
      >>> model.compile("adam")
      >>> items, scores = model.retrieve({"item": tf.ragged.constant([[3, 7, 5], [8]])}, k=10)
      >>> items.shape
      TensorShape([2, 10])

    References:
      Rajput et al., "Recommender Systems with Generative Retrieval" (NeurIPS 2023), section 3.2.
    """

    def __init__(
        self,
        backbone: SequenceStack,
        ids: SemanticIds,
        *,
        dim: int,
        max_length: int,
        item: str = "item",
        time: str | None = None,
        hash: bool = False,
        depth: int | None = None,
        softmax: Softmax = "children",
        beam: int = 50,
        dropout: float = 0.0,
        seed: int = 0,
        ks: Sequence[int] = (10, 50),
        name: str = "flat_retriever",
    ) -> None:
        super().__init__(name=name)
        backbone.check_reads_on()
        check_times(name, backbone, time)
        self.dim = whole_number(f"{name}: dim", dim, least=1)
        self.max_length = whole_number(f"{name}: max_length", max_length, least=1)
        self.backbone, self.ids, self.item, self.time, self.seed = backbone, ids, item, time, seed
        if softmax not in get_args(Softmax):
            raise ConfigError(f"{name}: softmax must be 'children' or 'codes', got {softmax!r}")
        self.hash, self.softmax, self.beam = hash, softmax, beam
        self.feature = FeatureConfig(item, dim=dim, hash=hash)
        self.catalogue = Catalogue(catalogue_of(ids), name, self.feature)
        self.ranking = NextItem(ks)
        self._measure_labels(ks)
        self.mean = tf.keras.metrics.Mean(name="loss")
        self._check_beam(max(self.ranking.ks), beam)
        self.depth = depth_of(name, ids, depth)
        self._codes = CodeTables(ids, self.depth)
        sizes = self._codes.sizes
        self.scorer = CodeVectors(sizes, len(sizes), dim, seed=3 * seed)
        self.drop = tf.keras.layers.Dropout(dropout, seed=seed)
        self.begin = self._vectors("begin", 1, 3 * seed + 1)
        self.places = self._vectors("places", self.max_length + 1, 3 * seed + 2)
        self.norm_scale = self.add_weight(name="norm/scale", shape=(dim,), initializer="ones")
        self.norm_offset = self.add_weight(name="norm/offset", shape=(dim,), initializer="zeros")
        self.catalogue.marks = marks_of(self._codes.told(tf.range(len(ids.items), dtype=tf.int64)).numpy())
        # Create all weights now: a model needs them before weights can be loaded.
        nothing = Jagged(tf.zeros([0, dim]), tf.zeros([2], tf.int64))
        self.backbone(nothing, times=None if time is None else tf.zeros([0], tf.int64))
        self.built = True

    @property
    def codes(self) -> CodeTables:
        """The trie of codes, and each item's path through it."""
        return self._codes

    def call(self, x: Mapping[str, Any], training: bool | None = None) -> tf.Tensor:
        """Compute the backbone's output after each history, (users, d)."""
        return self._open(x, bool(training))[0].h

    def digit_log_probs(
        self, x: Mapping[str, Any], items: Any, training: bool = False, *, allow: Any = None
    ) -> tf.Tensor:
        """Compute the logs of the probabilities of given items' digits; their sum is that of the item's.

        Args:
          x: A batch.
          items: (users, group) ids, of items that may come after the histories, which are read once.
          training: Whether to apply dropout. There are gradients to weights either way.
          allow: As for `retrieve`: probabilities are normalised over the allowed items.

        Returns:
          float32 (users, group, D); for an item that isn't allowed, -inf from the digit on that rules it
          out, without gradient.

        Raises:
          ConfigError: An id isn't in the catalogue; or the mask has another length, or forbids every item.
        """
        allowed = self._allowed(allow)
        wanted = tf.convert_to_tensor(items)
        numbers = self.catalogue.numbers(tf.reshape(wanted, [-1]))
        return of_items(self._open(x, training)[0], tf.reshape(numbers, tf.shape(wanted)), allowed)

    def learn(self, data: Any) -> tuple[tf.Tensor, tf.Tensor, Callable[[], dict[str, tf.Tensor]]]:
        """Compute the mean loss of predicting each item's digits, and the number of items."""
        ids, times = self._sequences(only_columns(self.name, data), self.max_length + 1)
        items = ids._replace(values=self.catalogue.numbers(ids.values))
        self.catalogue.count(items.values)
        tokens, when = self._tokens(items, times)
        asked = self._enter(but_last(tokens), training=True)
        view = sequence_view(self.backbone.mask, asked.offsets)
        if when is not None:
            view = view._replace(row_times=but_first(when).values, column_times=but_last(when).values)
        told = self.leave(self.backbone(asked, view=view, training=True).values)
        later = jagged.positions(items) > 0
        h = tf.boolean_mask(tf.reshape(told, [-1, self.codes.levels, self.dim]), later)
        losses = -tf.add_n(self._logs(h, tf.boolean_mask(items.values, later)))
        loss, samples = mean_loss(losses), tf.size(losses)

        def measure() -> dict[str, tf.Tensor]:
            self.mean.update_state(loss, sample_weight=samples)
            return {"loss": self.mean.result()}

        return loss, samples, measure

    def _logs(self, h: tf.Tensor, items: tf.Tensor) -> list[tf.Tensor]:
        """Compute the logs of the probabilities of items' digits, (n,) for each level, as training does."""
        codes, found = self.codes, []
        told = codes.told(items)
        for level in range(codes.levels):
            logits = self.scorer.code_logits(level, h[:, level])
            if self.softmax == "codes":
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(told[:, level], logits)
                found.append(-losses)
                continue
            found.append(codes.log_probs(level, logits, items))
        return found

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this model, in a form that JSON can hold."""
        return {
            "backbone": tf.keras.saving.serialize_keras_object(self.backbone),
            "ids": ids_config(self.ids),
            "dropout": self.drop.rate,
            "ks": self.ranking.ks,
            **{name: getattr(self, name) for name in _SETTINGS},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> FlatRetriever:
        """Create the model that a config from `get_config` describes."""
        backbone = tf.keras.saving.deserialize_keras_object(config["backbone"], custom_objects)
        return cls(**{**config, "backbone": backbone, "ids": ids_from_config(config["ids"])})

    def _open(self, x: Mapping[str, Any], training: bool = False) -> tuple[FlatWalk, Jagged]:
        ids, times = self._sequences(x, self.max_length)
        histories = ids._replace(values=self.catalogue.find(ids.values))
        return self._walk(
            histories, times, None if times is None else jagged.last(times), training
        ), histories

    def _open_before_last(self, ids: Jagged, items: Jagged, times: Jagged | None) -> FlatWalk:
        now = None if times is None else jagged.last(times)
        return self._walk(but_last(items), None if times is None else but_last(times), now, False)

    def _walk(self, items: Jagged, times: Jagged | None, now: Any, training: bool) -> FlatWalk:
        """Read items; the next one comes at the times ``now``, (users,)."""
        tokens, when = self._tokens(items, times)
        view = sequence_view(self.backbone.mask, tokens.offsets)
        if when is not None:
            users = tf.size(tokens.offsets, tf.int64) - 1
            late = Jagged(now, tf.range(users + 1))
            following = but_first(jagged.concat(when, late))
            view = view._replace(row_times=following.values, column_times=when.values)
        entered = self._enter(tokens, training)
        found, reading = self.backbone.read(entered, view=view, training=training)
        h = self.leave(jagged.last(found))
        return self._begin_walk(ReadHistories(items, h), reading, now, training)

    def _walk_after(self, histories: ReadHistories, rows: Any) -> FlatWalk:
        reading = histories.reading
        if reading is None or rows is not None:
            raise ConfigError(
                f"{self.name}: a search needs what was kept of histories, and items have no rows"
            )
        now = None
        if reading.times is not None:
            now = tf.gather(reading.times, reading.lengths - 1, batch_dims=1)
        return self._begin_walk(histories, reading, now, False)

    def _begin_walk(self, histories: ReadHistories, reading: Reading, now: Any, training: bool) -> FlatWalk:
        """Return a walk whose digits come at the times ``now``, (users,)."""
        place = tf.gather(self.places, jagged.lengths(histories.items))[:, tf.newaxis]

        def append(level: int, digits: tf.Tensor, beams: Any) -> tf.Tensor:
            nonlocal reading
            token = tf.gather(self.scorer.of_level(level), digits) * self.dim**0.5 + place
            token = self.drop(token, training=training)
            told, reading = self.backbone.read_on(token, reading, beams, now, training)
            return self.leave(told)

        return FlatWalk(self.codes, histories.vector, append, self.scorer.code_logits)

    @property
    def tokens_per_item(self) -> int:
        """D, the digits of an item."""
        return self.codes.levels

    @property
    def first_tokens(self) -> int:
        """The token of the beginning, 1."""
        return 1

    def tokens_of(
        self, keys: Jagged, times: Jagged | None, before: tf.Tensor | None = None
    ) -> tuple[Jagged, Jagged | None]:
        """Make the tokens that the backbone reads, as of `HistoryModel.tokens_of`."""
        return self._tokens(keys._replace(values=self.catalogue.find(keys.values)), times, before)

    def reading_weights(self) -> list[tf.Variable]:
        """Return the dense weights that read a history."""
        own = [self.scorer.vectors, self.begin, self.places, self.norm_scale, self.norm_offset]
        return [*self.backbone.weights, *own]

    def reading_settings(self) -> list[Any]:
        """Return the settings, besides the backbone's, that the meaning of what is kept depends on."""
        kind = [type(self).__name__, self.hash, self.time is not None, self.max_length]
        return [*kind, self.dim, self.codes.levels]

    def _tokens(
        self, items: Jagged, times: Jagged | None, before: tf.Tensor | None = None
    ) -> tuple[Jagged, Jagged | None]:
        """Return the tokens of items, -1 if unknown, and their times, after the beginning's, if it is there.

        It is there where no items come ``before``, (users,).
        """
        levels, users = self.codes.levels, tf.size(items.offsets, tf.int64) - 1
        before = tf.zeros([users], tf.int64) if before is None else before
        digits = self.codes.told(tf.maximum(items.values, 0))
        begins = tf.math.cumsum(tf.constant(self.codes.sizes, tf.int64), exclusive=True)
        vectors = jagged.take(tf.convert_to_tensor(self.scorer.vectors), digits + begins)
        known = tf.cast(items.values >= 0, vectors.dtype)[:, tf.newaxis, tf.newaxis]
        numbers = jagged.positions(items) + tf.gather(before, jagged.row_ids(items))
        places = jagged.take(tf.convert_to_tensor(self.places), numbers)[:, tf.newaxis]
        values = tf.reshape(vectors * known * self.dim**0.5 + places, [-1, self.dim])
        first = before == 0
        each = tf.concat([[0], tf.cumsum(tf.cast(first, tf.int64))], axis=0)
        begin = Jagged(tf.repeat(tf.convert_to_tensor(self.begin), each[-1], axis=0), each)
        tokens = jagged.concat(begin, Jagged(values, items.offsets * levels))
        if times is None:
            return tokens, None
        of_digits = Jagged(tf.repeat(times.values, levels), items.offsets * levels)
        # The beginning has the time of the first item.
        with tf.device("CPU:0"):  # as all offsets (`gmeta.ops.jagged`)
            size = tf.minimum(jagged.lengths(times), 1)
        starts = jagged.last(jagged.slice_(times, 0, size))
        return tokens, jagged.concat(Jagged(tf.boolean_mask(starts, first), each), of_digits)

    def _enter(self, tokens: Jagged, training: bool) -> Jagged:
        return tokens._replace(values=self.drop(tokens.values, training=training))

    def leave(self, values: tf.Tensor) -> tf.Tensor:
        """Return the layer norm of the backbone's output."""
        return layer_norm(values, self.norm_scale, self.norm_offset)

    def _vectors(self, name: str, rows: int, seed: int) -> tf.Variable:
        initializer = tf.keras.initializers.TruncatedNormal(stddev=self.dim**-0.5, seed=seed)
        return self.add_weight(name=name, shape=(rows, self.dim), initializer=initializer)

"""A user's history as a model has read it, as bytes that are stored, sent, continued and asked.

A request reads the whole history again, though nothing of it has changed. A state holds what the blocks keep
of it: the keys and values of its tokens (`gmeta.models.sequence.state_format`). New events are appended to
them; candidates attend to them, or the next item is searched for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf
from tf_keras.src.mixed_precision.autocast_variable import enable_auto_cast_variables

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.row_formats import RowDtype
from gmeta.layers import EmbeddingCollection
from gmeta.layers.sequence.reading import Reading, sequence_view
from gmeta.models.sequence.grm_model import GRM
from gmeta.models.sequence.history_model import HistoryModel, ReadHistories
from gmeta.models.sequence.sequence_columns import Batch, Layout, Part
from gmeta.models.sequence.state_format import (
    KeptStates,
    Stale,
    StateContent,
    StateShape,
    backbone_settings,
    check_keeps,
    checksums_of,
)
from gmeta.ops import Jagged, jagged


class UserStates(KeptStates):
    r"""Histories of users as a `GRM` has read them, as bytes.

    A state keeps, of each token and block, the key and the value, and the token's time. The result of `score`
    equals the model's logits for the whole sequence up to the rounding of ``dtype`` and the order of sums. It
    computes the candidates' tokens alone, and their attention to the kept ones. `read_on` reads new events
    and, once more, the last one before them, whose token depends on when the next event comes.

    A state of n tokens (contexts and events) has ``fixed_bytes + n * token_bytes`` bytes (of ``format``): for
    B blocks of h heads with keys d wide and values v wide, tokens D wide, and times::

        fixed_bytes = 40 + 4 D
        token_bytes = 8 + B h (b(d) + b(v))      b(x) = 4 x in float32, 2 x in bfloat16, x + 4 in int8

    where 2 x and x are rounded up to whole words of 4 bytes.

    A token is read by the rows and weights of that moment; rows may have changed since. A state that other
    dense weights of the trunk have read is refused, or used nevertheless (``stale="apply"``), and stays
    one of the former weights when it is continued. States of models with other settings are refused.

    A request computes as many tokens and candidates a user as its longest has: send users with histories of
    similar lengths together.

    Args:
      model: The model. Its backbone must be `gmeta.layers.HSTU` with a causal mask, without ``by_time`` and
        ``full_tail``, and with contexts that don't see the history.
      dtype: ``"float32"``, ``"bfloat16"`` or ``"int8"`` (`gmeta.core.row_formats.RowFormat`).
      stale: What to do with a state that other weights have read: ``"refuse"`` or ``"apply"``.
      at_once: How many candidates of a user are compared with the history at once, which bounds memory: about
        8 bytes × users × heads × ``at_once`` × tokens of the longest history.

    Raises:
      ConfigError: The model can't keep states, or a setting has an unknown value.

    Example:
      >>> item = FeatureConfig("item", dim=8)
      >>> model = GRM.of([item], contexts=[], history=["item"], targets=["item"], dim=16)
      >>> states = UserStates(model)
      >>> history = tf.ragged.constant([[3, 5], [7]], tf.int64)
      >>> state = states.read({"history": {"item": history}})
      >>> state = states.read_on(state, {"history": {"item": tf.ragged.constant([[9], []], tf.int64)}})
      >>> candidates = tf.ragged.constant([[1, 2, 3], [4]], tf.int64)
      >>> states.score(state, {"targets": {"item": candidates}})["ctr"].shape
      TensorShape([2, None])
    """

    def __init__(
        self, model: GRM, dtype: RowDtype = "bfloat16", *, stale: Stale = "refuse", at_once: int = 256
    ) -> None:
        trunk, columns = model.trunk, model.columns
        check_keeps(model.name, trunk.backbone)
        contexts = len(columns.contexts)
        settings = [backbone_settings(trunk.backbone), trunk.combine]
        shape = StateShape(
            dim=trunk.dim,
            block=trunk.backbone.blocks[0],
            blocks=len(trunk.backbone.blocks),
            keys=False,
            times=columns.time is not None,
            least=contexts,
            contexts=contexts,
            settings=[*settings, columns.contexts, columns.history, columns.time],
        )
        super().__init__(model.name, dtype, shape, trunk.weights, model.collection, stale)
        self.model, self._at_once = model, whole_number("at_once", at_once, least=1)

    def read(self, x: Batch, checksums: Any = None, digest: Any = None) -> tf.Tensor:
        """Read histories.

        Args:
          x: A batch; its targets aren't read, and may be missing.
          checksums: (users,) int64, of the histories, such as `gmeta.io.RecentHistories` gives; states hold
            them. None: 0.
          digest: The result of `digest`, if it is known.

        Returns:
          (users,) string.
        """
        model, columns = self.model, self.model.columns
        layout = columns.layout(x, "history")
        vectors = self._embed(columns.ids(x, set(model.labels.values()), targets=False))
        reading, last = model.trunk.read(vectors, layout)
        return self.format.encode(self._content(reading, last, checksums, digest))

    def read_on(self, states: Any, x: Batch, checksums: Any = None, digest: Any = None) -> tf.Tensor:
        """Read events that came after the histories of states.

        Args:
          states: (users,) string, of `read` or `read_on`.
          x: A batch, of whose parts the history alone is read: the new events.
          checksums: (users,) int64, of the histories with the new events. None: 0.
          digest: The result of `digest`, if it is known.

        Returns:
          (users,) string.

        Raises:
          InvalidArgumentError: As `StateFormat.decode`.
        """
        states = tf.convert_to_tensor(states, tf.string)
        content = self._decode(states, digest)
        model = self.model
        layout = self._part(x, "history", states)
        vectors = self._vectors(x, "history")
        kept, added, last = model.trunk.extend(content.reading, content.vector, vectors, layout)
        new = StateContent(added, last, checksums_of(checksums, tf.size(states)), content.digests)
        return self.format.append(states, kept, new, kept + added.lengths)

    def score(self, states: Any, x: Batch, digest: Any = None) -> dict[str, tf.RaggedTensor]:
        """Compute the logits of candidates, task or product -> ragged (users, None).

        Args:
          states: (users,) string, of `read` or `read_on`.
          x: A batch, of whose parts the targets alone are read (and the contexts for a scenario there).
          digest: The result of `digest`, if it is known.

        Raises:
          InvalidArgumentError: As `StateFormat.decode`.
        """
        logits, layout = self.logits(states, x, digest)
        return {
            name: tf.RaggedTensor.from_row_splits(logit, layout.targets, validate=False)
            for name, logit in logits.items()
        }

    def logits(self, states: Any, x: Batch, digest: Any = None) -> tuple[dict[str, tf.Tensor], Layout]:
        """Compute task or product -> logits (exposures,), and the exposures' layout; see `score`."""
        model = self.model
        hidden, layout = self.hidden(states, x, digest)
        return model.heads(model.mixture(hidden)), layout

    def hidden(self, states: Any, x: Batch, digest: Any = None) -> tuple[tf.Tensor, Layout]:
        """Compute the trunk's vector of each candidate, (exposures, dim), and the layout; see `score`."""
        states = tf.convert_to_tensor(states, tf.string)
        content = self._decode(states, digest)
        layout = self._part(x, "targets", states)
        vectors = self._vectors(x, "targets")
        return self.model.trunk.score(content.reading, vectors, layout, at_once=self._at_once), layout

    def _part(self, x: Batch, part: Part, states: tf.Tensor) -> Layout:
        """Return the layout of a part of a batch, after checking its number of users."""
        layout = self.model.columns.layout(x, part)
        checked: Layout = self._check_users(layout, tf.size(layout.history) - 1, states)
        return checked

    def _vectors(self, x: Batch, part: Part) -> dict[str, tf.Tensor]:
        model = self.model
        labels = set(model.labels.values()) if part == "history" else ()
        found = model.columns.part_ids(x, part, labels)
        return self._embed({name: column.values for name, column in found.items()})

    def _embed(self, ids: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        """Look up ids; features without any have no vectors."""
        return self.model.collection({**no_ids(self.model.collection), **ids}, training=False)


class _Items(NamedTuple):
    """Items of histories: int64 keys, and times if the model reads them."""

    keys: Jagged
    times: Jagged | None

    def then(self, others: _Items) -> _Items:
        """Append others, history by history."""
        times = None
        if self.times is not None and others.times is not None:
            times = jagged.concat(self.times, others.times)
        return _Items(jagged.concat(self.keys, others.keys), times)

    def last(self, most: tf.Tensor) -> _Items:
        """Take the last items of each history, at most so many, (users,) int64."""
        with tf.device("CPU:0"):  # as all offsets (`gmeta.ops.jagged`)
            begin = tf.maximum(jagged.lengths(self.keys) - most, 0)
        times = None if self.times is None else jagged.slice_(self.times, begin)
        return _Items(jagged.slice_(self.keys, begin), times)


class HistoryStates(KeptStates):
    r"""Histories as a `NextItemModel`, a `GenerativeRetriever` or a `FlatRetriever` has read them, as bytes.

    A state holds the items that the model reads, by their keys, with their times; of each token and block the
    key and the value; and the backbone's output after the last one. `recommend` and `retrieve` answer as the
    model does for the whole history, with the popular items for a history without known ones and without the
    seen items if that is asked for. After `read`, the vector that they search with is exact in each dtype,
    except that the beams of a `FlatRetriever` attend to rounded keys and values.

    `read_on` reads the last item again, whose token depends on when the next one comes, and the new ones. If
    more than ``max_length`` items would be there, the window moves and with it all places, so the last
    ``max_length`` are read again as a whole, from the keys in the state, by the rows and weights of that
    moment. With ``places="from_end"`` each new item moves all places. So states of such a model hold no keys
    and values, and `read_on` always reads as a whole; ``recommend`` takes as little. Take ``"from_start"``
    if events come often and histories are mostly shorter than ``max_length``.

    A state of n items has ``fixed_bytes + n * token_bytes`` bytes (of ``format``); of a `FlatRetriever` with
    D digits, whose tokens are digits, ``fixed_bytes + (1 + n D) * token_bytes``. For B blocks of h heads with
    keys a wide and values v wide, tokens d wide, and times::

        fixed_bytes = 40 + 4 d
        token_bytes = 16 + B h (b(a) + b(v))     b(x) = 4 x in float32, 2 x in bfloat16, x + 4 in int8

    where 2 x and x are rounded up to whole words of 4 bytes. Without times it is 8 less, and with
    ``places="from_end"`` B is 0.

    States that other dense weights have read, or models with other settings, are treated as by `UserStates`.

    Args:
      model: The model. Its backbone must be `gmeta.layers.HSTU` with a causal mask, without ``by_time`` and
        ``full_tail``.
      dtype: As for `UserStates`.
      stale: As there. A state that is read again as a whole becomes one of the present weights.

    Raises:
      ConfigError: The model can't keep states, or a setting has an unknown value.

    Example:
      >>> hstu = HSTU(blocks=1, heads=1, attention_dim=8, value_dim=8, max_length=50, bias_by_time=False)
      >>> collection = EmbeddingCollection([FeatureConfig("item", dim=8)])
      >>> model = NextItemModel(collection, hstu, items=100, max_length=50, places="from_start")
      >>> from gmeta.models.sequence.user_states import HistoryStates
      >>> states = HistoryStates(model)
      >>> state = states.read({"item": tf.ragged.constant([[3, 5], [7]], tf.int64)})
      >>> state = states.read_on(state, {"item": tf.ragged.constant([[9], []], tf.int64)})
      >>> items, scores = states.recommend(state, k=5, leave_out_seen=True)
      >>> items.shape
      TensorShape([2, 5])
    """

    def __init__(self, model: HistoryModel, dtype: RowDtype = "bfloat16", *, stale: Stale = "refuse") -> None:
        backbone = getattr(model, "backbone", None)
        if backbone is None:
            raise ConfigError(
                f"{model.name}: a {type(model).__name__} has no backbone, so there are no states of its "
                "histories: send histories to `recommend`"
            )
        check_keeps(model.name, backbone)
        shape = StateShape(
            dim=model.feature.width,
            block=backbone.blocks[0],
            blocks=0 if model.moves_tokens else len(backbone.blocks),
            keys=True,
            times=model.time is not None,
            least=model.first_tokens,
            contexts=0,
            settings=[backbone_settings(backbone), *model.reading_settings()],
        )
        collection = getattr(model, "collection", None)
        super().__init__(model.name, dtype, shape, model.reading_weights(), collection, stale)
        self.model, self._backbone = model, backbone

    def read(self, x: Mapping[str, Any], checksums: Any = None, digest: Any = None) -> tf.Tensor:
        """Read histories.

        Args:
          x: A batch. Of a history that is longer than ``max_length``, the last items are read.
          checksums: As for `UserStates.read`.
          digest: The result of `digest`, if it is known.

        Returns:
          (users,) string.
        """
        return self._read(self._given(x), checksums, digest)

    def read_on(
        self, states: Any, x: Mapping[str, Any], checksums: Any = None, digest: Any = None
    ) -> tf.Tensor:
        """Read items that came after the histories of states.

        Args:
          states: (users,) string, of `read` or `read_on`.
          x: A batch of the new items.
          checksums: (users,) int64, of the histories with the new items. None: 0.
          digest: The result of `digest`, if it is known.

        Returns:
          (users,) string.

        Raises:
          InvalidArgumentError: As `StateFormat.decode`.
        """
        states, moves = tf.convert_to_tensor(states, tf.string), self.model.moves_tokens
        content = self._decode(states, digest, kept=not moves)
        new = self._given(x)
        new = self._check_users(new, tf.size(new.keys.offsets) - 1, states)
        former, longest = self._items(content), tf.constant(self.model.max_length, tf.int64)
        count = jagged.lengths(former.keys)
        fits = (count + jagged.lengths(new.keys) <= longest) & (not moves)
        none = tf.zeros_like(longest)
        whole = former.then(new).last(tf.where(fits, none, longest))
        again = self._read(whole, checksums, digest)
        if moves:
            return again
        stretch = former.last(tf.cast(fits, tf.int64)).then(new.last(tf.where(fits, longest, none)))
        kept = tf.maximum(count - 1, 0)
        return tf.where(fits, self._continue(states, content, stretch, kept, checksums), again)

    def recommend(
        self, states: Any, k: int = 10, *, digest: Any = None, **settings: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Find the items that most likely come next, as `NextItemModel.recommend` does.

        Args:
          states: (users,) string, of `read` or `read_on`.
          k: The number of items.
          digest: The result of `digest`, if it is known.
          **settings: As there.

        Raises:
          ConfigError: As there; or the model has no such method.
          InvalidArgumentError: As `StateFormat.decode`.
        """
        return self._ask("recommend", states, k, digest, False, settings)

    def retrieve(
        self, states: Any, k: int = 10, *, digest: Any = None, **settings: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Find the items that most likely come next by a search over codes, as a retriever's `retrieve` does.

        Args:
          states: (users,) string, of `read` or `read_on`.
          k: The number of items.
          digest: The result of `digest`, if it is known.
          **settings: As there.

        Raises:
          ConfigError: As there; or the model has no such method.
          InvalidArgumentError: As `StateFormat.decode`.
        """
        return self._ask("retrieve", states, k, digest, self.model.first_tokens > 0, settings)

    def _ask(
        self, method: str, states: Any, k: int, digest: Any, kept: bool, settings: Mapping[str, Any]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        answer = getattr(self.model, f"{method}_after", None)
        if answer is None:
            raise ConfigError(f"{self._name}: a {type(self.model).__name__} has no method {method!r}")
        content = self._decode(tf.convert_to_tensor(states, tf.string), digest, kept)
        keys = self._items(content).keys
        items = keys._replace(values=self.model.catalogue.find(keys.values))
        found: tuple[tf.Tensor, tf.Tensor] = answer(
            ReadHistories(items, content.vector, content.reading if kept else None), k, **settings
        )
        return found

    def about(self, states: Any) -> dict[str, tf.Tensor]:
        """Return ``items`` and ``checksum`` of states, and ``time`` of their last item if they have times.

        Args:
          states: (users,) string.

        Returns:
          Name -> (users,) int64. The time of a state without items is 0.
        """
        found = super().about(states)
        tokens = found.pop("tokens") - self.model.first_tokens
        return {"items": tokens // self.model.tokens_per_item, **found}

    def _given(self, x: Mapping[str, Any]) -> _Items:
        """Return the items of a batch that are read."""
        ids, times = self.model._sequences(x, self.model.max_length)
        return _Items(ids._replace(values=self.model.catalogue.as_keys(ids.values)), times)

    def _items(self, content: StateContent) -> _Items:
        """Return the items of states."""
        first, each = self.model.first_tokens, self.model.tokens_per_item
        lengths = (content.reading.lengths - first) // each
        keys, times = (
            None if column is None else jagged.from_padded(column[:, first::each], lengths)
            for column in (content.keys, content.reading.times)
        )
        assert keys is not None  # states of histories hold them
        return _Items(keys, times)

    def _read(self, items: _Items, checksums: Any, digest: Any) -> tf.Tensor:
        """Read whole histories."""
        tokens, when = self._enter(items)
        at = None if when is None else when.values
        view = sequence_view(self._backbone.mask, tokens.offsets, times=at)
        if self.model.moves_tokens:
            out = self._backbone(tokens, view=view, training=False)
            reading = Reading.of(tokens.offsets, at, [])
        else:
            out, reading = self._backbone.read(tokens, view=view)
        lengths = jagged.lengths(tokens)
        vector = tf.where((lengths > 0)[:, tf.newaxis], self._leave(jagged.last(out)), 0)
        of_tokens = self._of_tokens(items.keys, lengths)
        return self.format.encode(self._content(reading, vector, checksums, digest, of_tokens))

    def _continue(
        self, states: tf.Tensor, content: StateContent, items: _Items, before: tf.Tensor, checksums: Any
    ) -> tf.Tensor:
        """Read items that follow the first ``before`` items of states."""
        first, each = self.model.first_tokens, self.model.tokens_per_item
        kept = before * each + tf.where(before > 0, tf.cast(first, tf.int64), 0)
        tokens, when = self._enter(items, before)
        reading = content.reading._replace(lengths=kept)
        out, added = self._backbone.append(tokens, reading, None if when is None else when.values)
        places = tf.maximum(added.lengths - 1, 0)
        some = tf.pad(out, [[0, 0], [0, 1], [0, 0]])  # so that there is one where no history has a token
        vector = self._leave(tf.gather(some, places, batch_dims=1))
        vector = tf.where((added.lengths > 0)[:, tf.newaxis], vector, content.vector)
        checked = checksums_of(checksums, tf.size(states))
        of_tokens = self._of_tokens(items.keys, added.lengths)
        new = StateContent(added, vector, checked, content.digests, of_tokens)
        return self.format.append(states, kept, new, kept + added.lengths)

    def _enter(self, items: _Items, before: tf.Tensor | None = None) -> tuple[Jagged, Jagged | None]:
        with self._as_in_a_call():
            return self.model.tokens_of(*items, before)

    def _leave(self, values: tf.Tensor) -> tf.Tensor:
        with self._as_in_a_call():
            return tf.cast(self.model.leave(values), tf.float32)

    def _as_in_a_call(self) -> Any:
        """Let weights be read in the dtype of the computation, as Keras does in a call."""
        return enable_auto_cast_variables(self.model._compute_dtype_object)

    def _of_tokens(self, keys: Jagged, lengths: tf.Tensor) -> tf.Tensor:
        """Return the key of each token's item, padded; -1 of the beginning, which is not always there."""
        each = self.model.tokens_per_item
        tokens = Jagged(tf.repeat(keys.values, each), keys.offsets * each)
        first = lengths - jagged.lengths(tokens)
        offsets = tf.concat([[0], tf.cumsum(first)], axis=0)
        nothing = Jagged(tf.fill([offsets[-1]], tf.constant(-1, tf.int64)), offsets)
        return jagged.to_padded(jagged.concat(nothing, tokens))


def no_ids(collection: EmbeddingCollection) -> dict[str, Any]:
    """Return the input of a collection without samples."""
    nothing = tf.zeros([0], tf.int64)
    none = tf.RaggedTensor.from_row_splits(nothing, tf.zeros([1], tf.int64), validate=False)
    return {each.name: nothing if each.combiner is None else none for each in collection.features}

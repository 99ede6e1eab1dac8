"""Base class of models that generate the code of the next item: searches, draws, metrics, checks of ids."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.semantic_ids import SemanticIds
from gmeta.core.shares import splitmix64
from gmeta.models.generative.code_tables import CodeTables
from gmeta.models.generative.digit_decoder import Walk, distinct, independent, likeliest, without_trie
from gmeta.models.sequence.history_model import HistoryModel, ReadHistories, but_last
from gmeta.ops import Jagged, jagged
from gmeta.ops.trie_draws import TrieNoise
from gmeta.training.rank_steps import rank_step

# Looks up, for many (user, item) pairs at once, whether the user's history holds the item.

_ODD = 0x2545F4914F6CDD1D  # powers of it wrap around, and stay odd


class SeenItems:
    """The items of histories, sorted, with the place at which each first occurs.

    Args:
      histories: Values are numbers of items, from -1 on (-1: not in the catalogue), one sequence per user.
      size: V, the number of items.
    """

    def __init__(self, histories: Jagged, size: int) -> None:
        self.size = size
        keys = self._keys(jagged.row_ids(histories), histories.values)
        order = tf.argsort(keys, stable=True)  # of equal items the first stands first
        self.keys, self.places = tf.gather(keys, order), tf.cast(order, tf.int64)

    def holds(self, users: tf.Tensor, items: tf.Tensor, until: Any = None) -> tf.Tensor:
        """Return whether users' histories hold items.

        Args:
          users: (n,) int64.
          items: (n, c) int64, numbers from 0 on.
          until: (n,) int64, places in the histories' values: only items up to them count. None: all count.

        Returns:
          bool (n, c).
        """
        wanted = self._keys(users[:, tf.newaxis], items)
        keys, places = tf.concat([self.keys, [-1]], 0), tf.concat([self.places, [0]], 0)
        found = tf.searchsorted(self.keys, tf.reshape(wanted, [-1]), out_type=tf.int64)
        found = tf.reshape(found, tf.shape(wanted))
        there = tf.gather(keys, found) == wanted
        return there if until is None else there & (tf.gather(places, found) <= until[:, tf.newaxis])

    def _keys(self, users: tf.Tensor, items: tf.Tensor) -> tf.Tensor:
        return users * (self.size + 1) + items + 1


def history_keys(histories: Jagged) -> tf.Tensor:
    """Compute a hash of each history's items and their order, (users,) int64."""
    longest = tf.reduce_max(tf.concat([jagged.lengths(histories), [0]], 0))
    powers = tf.math.cumprod(tf.fill([longest], tf.constant(_ODD, tf.int64)))
    terms = (histories.values + 2) * tf.gather(powers, jagged.positions(histories))
    return jagged.sums(histories._replace(values=terms))


Method = Literal["sample", "without_replacement", "beam"]
_Own = TypeVar("_Own", bound="CodeModel")


class CodeModel(HistoryModel):
    """A model that predicts the next item as a path through the trie of semantic ids.

    Subclasses define how histories are read: `_open` and `_open_before_last`.

    Attributes:
      ids: The semantic ids of the catalogue, in its order.
      beam: How many prefixes `evaluate` keeps at each digit.
    """

    ids: SemanticIds
    beam: int

    @property
    def codes(self) -> CodeTables:
        """The trie of codes, and each item's path through it."""
        raise NotImplementedError

    def _open(self, x: Mapping[str, Any], training: bool = False) -> tuple[Walk, Jagged]:
        """Read histories; return a walk after them, and their numbers of items, -1 if unknown."""
        raise NotImplementedError

    def _open_before_last(self, ids: Jagged, items: Jagged, times: Jagged | None) -> Walk:
        """Read histories without their last items, of which only the times are known; return a walk."""
        raise NotImplementedError

    def _tables(self) -> dict[str, Any]:
        """Return the arguments of the constructor that hold the model's tables."""
        return {}

    def retrieve(
        self,
        x: Mapping[str, Any],
        k: int = 10,
        *,
        beam: int | None = None,
        allow: Any = None,
        leave_out_seen: bool = False,
        leave_out: Any = None,
        popular: Any = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Find the items that most likely come next, by a beam search over the codes.

        The history is read once for each user, and each digit of each beam once. A history without an item of
        the catalogue is answered by the items that occurred most often in training
        (`gmeta.models.sequence.catalogue.Catalogue.most_popular`).

        Args:
          x: A batch.
          k: The number of items.
          beam: How many prefixes are kept at each digit, >= k. None: the model's.
          allow: bool (V,), which items of the catalogue are allowed, in its order. None: all.
          leave_out_seen: Whether to leave out the items of the history, as far as it is read. The search
            finds them nevertheless, so fewer than k items are left where the beam holds too few others.
          leave_out: Ids of further items to leave out for each user, as for
            `gmeta.models.NextItemModel.recommend`, from what the search finds as there.
          popular: The result of ``catalogue.most_popular(k, allow)``, or with ``leave_out`` of
            ``catalogue.most_popular(V, allow)``, if it is known already.

        Returns:
          (users, k) ids, the likeliest first; and (users, k) float32, logs of their probabilities among the
          allowed items. Where fewer are found, -1 or the empty text, and -inf.

        Raises:
          ConfigError: ``beam`` is below k; or the mask has another length, or forbids every item.
        """
        return self._find(*self._open(x), k, beam, allow, leave_out_seen, leave_out, popular)

    def retrieve_after(
        self,
        histories: ReadHistories,
        k: int,
        *,
        beam: int | None = None,
        allow: Any = None,
        leave_out_seen: bool = False,
        leave_out: Any = None,
        rows: Any = None,
        popular: Any = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Find the items that most likely come after histories that were read, as `retrieve` does."""
        walk = self._walk_after(histories, rows)
        return self._find(walk, histories.items, k, beam, allow, leave_out_seen, leave_out, popular)

    def _walk_after(self, histories: ReadHistories, rows: Any) -> Walk:
        """Return a walk after histories that were read; ``rows`` are those of all items, if they have any."""
        raise NotImplementedError

    def sample(
        self,
        x: Mapping[str, Any],
        group: int,
        *,
        seed: Any,
        step: Any,
        method: Method = "sample",
        keys: Any = None,
        allow: Any = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Draw items that may come next. There is no gradient; `digit_log_probs` has one.

        Draws are a function of seed, step and a user's key, and of nothing else: no rank, and no place in the
        batch.

        Args:
          x: A batch.
          group: The number of items per user.
          seed: An integer.
          step: An integer or () tensor, such as the number of the training step.
          method: ``"sample"``: independent items, each by its probability. ``"without_replacement"``:
            distinct items, each next one by the probabilities of those that are left. ``"beam"``: no draw,
            but the likeliest that a beam as wide as the group finds.
          keys: int64 (users,), a key of each user. None: a hash of the history as far as it is read, so users
            of the same history draw the same.
          allow: As for `retrieve`.

        Returns:
          (users, group) ids, and (users, group) float32, logs of their probabilities; where there are fewer
          than that, -1 or the empty text, and -inf.

        Raises:
          ConfigError: The method is unknown; or the mask has another length, or forbids every item.
        """
        whole_number(f"{self.name}: group", group, least=1)
        if method not in get_args(Method):
            raise ConfigError(f"{self.name}: method must be one of {get_args(Method)}, got {method!r}")
        allowed = self._allowed(allow)
        walk, histories = self._open(x)
        own = history_keys(histories) if keys is None else tf.convert_to_tensor(keys, tf.int64)

        def noise(level: int) -> TrieNoise:
            return TrieNoise(seed, step, level, own)

        if method == "beam":
            numbers, scores = likeliest(walk, group, group, allowed)
        else:
            draw = independent if method == "sample" else distinct
            numbers, scores = draw(walk, group, noise, allowed)
        return self._ids(numbers), scores

    def valid_share(self, x: Mapping[str, Any], k: int = 10, *, beam: int | None = None) -> tf.Tensor:
        """Compute which share of the k likeliest codes belong to items, if any code may be generated.

        `retrieve` never leaves the catalogue. This method searches all codes of each level by beams, as a
        model without a trie does (Rajput et al., NeurIPS 2023, call codes that no item has invalid ids).
        Training with ``softmax="children"`` teaches nothing about codes that no item has, so invalid ids are
        common then. With `GenerativeRetriever`, only the generated codes are searched, without the last
        digit, which distinguishes the items that share them.

        Args:
          x: A batch.
          k: The number of codes.
          beam: How many prefixes are kept at each digit, >= k. None: the model's.

        Returns:
          float32 (users,).

        Raises:
          ConfigError: ``beam`` is below k.
        """
        beam = self.beam if beam is None else beam
        self._check_beam(k, beam)
        return tf.reduce_mean(tf.cast(without_trie(self._open(x)[0], k, beam), tf.float32), axis=1)

    def item_log_probs(self, x: Mapping[str, Any]) -> tf.Tensor:
        """Compute the logs of the probabilities of all items, (users, V): what `retrieve` searches.

        Every code goes through the decoder for every user, so this is for small catalogues.
        """
        users = tf.size(jagged.lengths(self._sequences(x, self.max_length)[0]))
        ids = self.catalogue.ids(tf.range(self.items, dtype=tf.int64))
        return tf.reduce_sum(self.digit_log_probs(x, tf.tile(ids[tf.newaxis], [users, 1])), axis=-1)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Search for the items that are asked for by beams (`evaluate`); what isn't found ranks last.

        Without labels, histories of one item don't count.
        """
        x, right = self._asked(data)
        with rank_step(self, data) as step:
            if right is not None:
                right = right._replace(values=self.catalogue.numbers(right.values))
                walk, _ = self._open(x)
                found, _ = self._search(walk, self._numbers(x, None), max(self.retrieval.ks))
                ranks = self._places(tf.gather(found, jagged.row_ids(right)), right.values)
                self.retrieval.update_state(jagged.to_ragged(right._replace(values=ranks)))
                return step.end_forward(self.retrieval.result())
            ids, times = self._sequences(x, self.max_length + 1)
            items = ids._replace(values=self.catalogue.numbers(ids.values))
            walk = self._open_before_last(ids, items, times)
            found, _ = self._search(walk, but_last(items), max(self.ranking.ks))
            known = tf.cast(jagged.lengths(ids) > 1, tf.float32)
            self.ranking.update_state(self._places(found, jagged.last(items)), sample_weight=known)
            return step.end_forward(self.ranking.result())

    def _places(self, found: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        """Return the places from 1 of items (n,) in what was found for each, (n, k)."""
        there = found == right[:, tf.newaxis]
        places = tf.argmax(tf.cast(there, tf.int32), axis=1) + 1
        return tf.where(tf.reduce_any(there, axis=1), places, self.items)

    def load_own_variables(self, store: Any) -> None:
        """Load the weights that are in no layer; earlier files have a digest of the ids after them."""
        names = list(store.keys())
        own = [name for name in names if name.isdecimal()]
        if len(own) == len(self._trainable_weights) + len(self._non_trainable_weights) + 1:
            last = max(own, key=int)
            self._compare(np.asarray(store[last]))
            store = {name: store[name] for name in names if name != last}
        super().load_own_variables(store)

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._digest if name == "digest" else super()._lookup_dependency(name, *args, **kwargs)

    @functools.cached_property
    def _digest(self) -> _Digest:
        return _Digest(self)

    def _compare(self, digest: NDArray[np.int64]) -> None:
        """Refuse weights that an earlier version has saved with other semantic ids, known by their digest."""
        if (digest != np.frombuffer(bytes.fromhex(self.ids.digest), np.int64)).any():
            raise ConfigError(
                f"{self.name}: what is loaded has the weights of a model with other semantic ids: create "
                "the model with the ids that it was trained with, not with ids of digest "
                f"{self.ids.digest[:16]}. To add items, load the weights into a model with the former ids "
                "first, and save it again"
            )

    def copy_dense(self: _Own, name: str) -> _Own:
        """Create a model that shares this one's tables and has copies of all other weights.

        Args:
          name: Of the new model.
        """
        config = {**self.get_config(), "name": name, "ids": self.ids, **self._tables()}
        backbone = tf.keras.saving.deserialize_keras_object(config["backbone"])
        copy = type(self)(**{**config, "backbone": backbone})
        for own, other in zip(self.weights, copy.weights, strict=True):
            if own is not other:
                other.assign(own)
        copy.catalogue.load(self.catalogue.noted())
        return copy

    def _find(
        self,
        walk: Walk,
        histories: Jagged,
        k: int,
        beam: int | None,
        allow: Any,
        leave_out_seen: bool,
        leave_out: Any,
        popular: Any,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        beam = self.beam if beam is None else beam
        self._check_beam(k, beam)
        allowed = self._allowed(allow)
        blocked = self._blocked(histories, leave_out)
        numbers, scores = self._search(walk, histories, k, beam, allowed, leave_out_seen, blocked)
        return self._by_popularity(histories, numbers, scores, popular, blocked, allow)

    def _search(
        self,
        walk: Walk,
        histories: Jagged,
        k: int,
        beam: int | None = None,
        allowed: Any = None,
        leave_out_seen: bool | None = None,
        blocked: tf.RaggedTensor | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the numbers and scores of the k likeliest items, (users, k); -1 where there are fewer."""
        beam = self.beam if beam is None else beam
        leave_out_seen = self._leaves_out_seen if leave_out_seen is None else leave_out_seen
        unwanted = [histories] if leave_out_seen else []
        unwanted += [] if blocked is None else [jagged.from_ragged(blocked)]
        numbers, scores = likeliest(walk, beam if unwanted else k, beam, allowed)
        if unwanted:
            users, left = tf.range(tf.cast(walk.users, tf.int64)), numbers >= 0
            for each in unwanted:
                left &= ~SeenItems(each, self.items).holds(users, tf.maximum(numbers, 0))
            scores, places = tf.math.top_k(tf.where(left, scores, -np.inf), k)
            nothing = tf.constant(-1, tf.int64)
            numbers = tf.where(tf.math.is_inf(scores), nothing, tf.gather(numbers, places, batch_dims=1))
        return numbers, scores

    def _allowed(self, allow: Any) -> tuple[NDArray[np.bool_], ...] | None:
        """Return which nodes of each level lead to allowed items."""
        return None if allow is None else self.codes.trie.allow(np.asarray(allow))

    def _check_beam(self, k: int, beam: int) -> None:
        whole_number(f"{self.name}: k", k, least=1)
        if whole_number(f"{self.name}: beam", beam, least=1) < k:
            raise ConfigError(f"{self.name}: beam must be at least {k}, the items wanted, got {beam}")


class _Digest(tf.__internal__.tracking.Trackable):
    """The digest of semantic ids in TensorFlow's checkpoints of earlier versions: compared, not restored."""

    def __init__(self, model: CodeModel) -> None:
        self._compare = model._compare

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": tf.zeros([4], tf.int64)}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> None:
        self._compare(restored_tensors["VARIABLE_VALUE"].numpy())


def marks_of(codes: NDArray[Any]) -> NDArray[np.int64]:
    """Return a hash of each item's codes, (items, levels) -> int64 (items,)."""
    marks = np.zeros(len(codes), np.uint64)
    for level in codes.T:
        marks = splitmix64(marks ^ level.astype(np.uint64))
    return marks.view(np.int64)


def catalogue_of(ids: SemanticIds) -> Any:
    """Return the items of semantic ids as `Catalogue` takes them: their number, if they are numbered."""
    numbered = bool((ids.items == np.arange(len(ids.items))).all())
    return len(ids.items) if numbered else ids.items


def depth_of(name: str, ids: SemanticIds, depth: int | None) -> int:
    """Return how many codes are generated as digits; None: all.

    Raises:
      ConfigError: The ids have fewer codes.
    """
    levels = len(ids.codebooks.sizes)
    depth = levels if depth is None else whole_number(f"{name}: depth", depth, least=1)
    if depth > levels:
        raise ConfigError(f"{name}: depth must be at most {levels}, the codes of an item, got {depth}")
    return depth

"""The items that a model chooses from: ids of any kind, with a number for each, and how often each occurred.

The items are a setting of the model, not a part of its weights. Checkpoints hold only counts, by the items'
keys. So they load into a model with more items, with fewer, or with the same in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.graph import refuse_unless
from gmeta.layers import FeatureConfig
from gmeta.layers.embedding.feature_config import PADDING, TEXT_PADDING
from gmeta.ops import hash_text, jagged
from gmeta.ops.device import on_gpu
from gmeta.ops.table.portable_tables import RowNumbers

Items = Any
"""A number, or a vector of ids: integers or texts, as an array, a tensor or a list."""
_BLOCK = 65536  # the least number of items scored at once
_SCORES = 1 << 26  # the number of scores that a GPU computes at once, unless a block has more
_GROUP = 64  # the number of scores of which the largest is looked at first

Noted = Mapping[str, npt.NDArray[np.int64]]
"""What checkpoints hold of a catalogue: ``keys`` of items, their ``counts``, and their ``marks``, if any."""


class Catalogue(tf.__internal__.tracking.AutoTrackable):
    """A numbering of items, from 0 on, that counts how often each occurs in training.

    On several ranks, each rank counts the items that it reads, until `gather_ranks` adds the counts up.

    Args:
      items: V, for the ids from 0 to V - 1; or V distinct ids: any integers, such as the hashes that
        ``gmeta prepare`` writes, or texts. An id can't be -1 or the empty text, which stand for padding.
      owner: The name that messages begin with.
      feature: The feature that embeds items. If it hashes, a text and its prepared hash are the same item.

    Attributes:
      size: V.
      resources: What finds items, if they have ids of their own; an exported graph needs it, and checkpoints
        don't hold it.
      marks: int64 (V,), a mark of what a model stores of each item besides its key, such as its code. Weights
        are then loaded only if their items have the same marks. None: there are none.

    Raises:
      ConfigError: There are no items; ids aren't distinct or are of another kind; an id stands for padding;
        or the feature takes an id only with ``hash=True``.

    Example:
      >>> catalogue = Catalogue([70, -5, 8], "model", FeatureConfig("item", dim=4, hash=True))
      >>> catalogue.numbers(tf.constant([8, 70], tf.int64)).numpy().tolist()
      [2, 0]
    """

    def __init__(self, items: Items, owner: str, feature: FeatureConfig) -> None:
        super().__init__()
        self._owner, self._feature, self._hashes = owner, feature.name, feature.hash
        self._keys: tf.Variable | None = None
        self._texts: tf.Variable | None = None
        self.resources: list[RowNumbers] = []
        self.marks: npt.NDArray[np.int64] | None = None
        if tf.is_tensor(items):
            items = items.numpy()
        if np.ndim(items) == 0:
            self.size = whole_number(f"{owner}: items", items, least=1)
        else:
            ids = _check(items, owner)
            self.size, keys = len(ids), ids
            with tf.device("CPU:0"):
                if ids.dtype == object:
                    self._texts = tf.Variable(ids, trainable=False, name="catalogue_texts")
                    keys = hash_text(ids).numpy()
                self._check_keys(ids, keys)
                self._keys = tf.Variable(keys, trainable=False, name="catalogue")
            self.resources = [RowNumbers(self._keys)]
        with tf.device("CPU:0"):
            none = tf.zeros([self.size], tf.int64)
            self._gathered = tf.Variable(none, trainable=False, name="counts")  # the same on all ranks
            self._own = tf.Variable(none, trainable=False, name="own_counts")  # of this rank, since then

    @property
    def has_ids(self) -> bool:
        """Whether items have ids of their own, which aren't their numbers."""
        return self._keys is not None

    @property
    def hashes(self) -> bool:
        """Whether a text and its hash are the same item."""
        return self._hashes

    @property
    def dtype(self) -> tf.DType:
        """The dtype of `ids`."""
        return tf.int64 if self._texts is None else tf.string

    @property
    def nothing(self) -> tf.Tensor:
        """The value that stands for no id."""
        return tf.constant(PADDING if self._texts is None else TEXT_PADDING, self.dtype)

    def ids(self, numbers: tf.Tensor) -> tf.Tensor:
        """Return the ids of items as they were given, in the shape of ``numbers``."""
        return self.keys(numbers) if self._texts is None else tf.gather(self._texts, numbers)

    def keys(self, numbers: tf.Tensor) -> tf.Tensor:
        """Return the keys that items are embedded by, int64 in the shape of ``numbers``; texts are hashed."""
        return tf.cast(numbers, tf.int64) if self._keys is None else tf.gather(self._keys, numbers)

    @property
    def all_keys(self) -> tf.Tensor:
        """The keys of all items, (V,)."""
        return self.keys(tf.range(self.size, dtype=tf.int64))

    def as_keys(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the keys that ids are embedded by, int64 (n,), also those of unknown ids; texts are hashed.

        Raises:
          ConfigError: The ids are of a kind that the feature doesn't take.
        """
        text = ids.dtype == tf.string
        if not (ids.dtype.is_integer or (text and self._hashes and self._keys is not None)):
            wanted = "integers or texts" if self._hashes and self._keys is not None else "integers"
            advice = ": make the feature with hash=True, and items= a vector of ids" if text else ""
            raise ConfigError(
                f"{self._owner}: {self._feature} must be {wanted}, got {ids.dtype.name}{advice}"
            )
        return hash_text(ids) if text else tf.cast(ids, tf.int64)

    def find(self, ids: tf.Tensor) -> tf.Tensor:
        """Find the numbers of items by their ids, (n,) int64; -1 for an unknown id.

        Raises:
          ConfigError: As `as_keys`.
        """
        ids = self.as_keys(ids)
        if self._keys is not None:
            return self.resources[0](ids)
        return tf.where((ids >= 0) & (ids < self.size), ids, -1)

    def numbers(self, ids: tf.Tensor) -> tf.Tensor:
        """Find the numbers of items by their ids, (n,) int64; refuse unknown ids.

        Raises:
          ConfigError: Ids are of another kind; or an id is unknown, which the message names (in a graph,
            if it runs within `gmeta.core.graph.name_refusals`).
        """
        known = f"items={self.size} has the ids from 0 to {self.size - 1}"
        if self._keys is not None:
            known = f"items= has {self.size} others. Leave such events out, or add the id"
        with tf.device("CPU:0"):  # where a batch's ids are: a GPU would wait for the answer
            found = self.find(ids)
            good = found >= 0
            first = tf.argmin(tf.cast(tf.concat([good, [False]], 0), tf.int32))  # the size, if no id is bad
            bad = ids[first : first + 1]
            text = tf.strings.reduce_join(bad if ids.dtype == tf.string else tf.strings.as_string(bad))
            told = [f"{self._owner}: {self._feature} ", text, f" is not in the catalogue; {known}"]
            return refuse_unless(found, good, tf.strings.join(told))

    def count(self, numbers: tf.Tensor) -> None:
        """Count an occurrence of each item, by their numbers (n,)."""
        with tf.device("CPU:0"):
            self._own.scatter_add(tf.IndexedSlices(tf.ones_like(numbers, tf.int64), numbers))

    @property
    def counts(self) -> tf.Tensor:
        """How often each item occurred in training, (V,) int64; on several ranks until `gather_ranks`."""
        return self._gathered + self._own

    @property
    def variables(self) -> list[tf.Variable]:
        """The counts, which aren't among the weights of the model."""
        return [self._gathered, self._own]

    def gather_ranks(self) -> None:
        """Add up the counts of all ranks; all must call this together, between two steps."""
        own = self._own
        (counted,) = collectives.allreduce_sum([own.read_value()], name="catalogue/counts")
        self._gathered.assign_add(counted)
        own.assign(tf.zeros_like(own))

    def most_popular(self, k: int, allow: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
        r"""Find the items that occurred most often in training.

        Args:
          k: The number of items.
          allow: bool (V,), which items are allowed; None: all.

        Returns:
          (k,) int64 numbers, the most frequent first, and those of equal counts :math:`c_j` in the order of
          the catalogue; and (k,) float32 :math:`\log (c_j + 1) / \sum_i (c_i + 1)` over the allowed
          items. If these are fewer than k, the rest is -1 and -inf.
        """
        counts = self.counts + 1
        if (mask := self.mask(allow)) is not None:
            counts = tf.where(mask, counts, 0)
        best = tf.math.top_k(counts, min(k, self.size))
        total = tf.math.log(tf.cast(tf.reduce_sum(counts), tf.float64))
        scores = tf.cast(tf.math.log(tf.cast(best.values, tf.float64)) - total, tf.float32)
        rest = [[0, max(k - self.size, 0)]]
        scores = tf.pad(scores, rest, constant_values=float("-inf"))
        numbers = tf.pad(tf.cast(best.indices, tf.int64), rest, constant_values=-1)
        return tf.where(tf.math.is_inf(scores), tf.constant(-1, tf.int64), numbers), scores

    def mask(self, allow: Any) -> tf.Tensor | None:
        """Return a mask of allowed items as a tensor; None: all are allowed.

        Args:
          allow: bool (V,), in the order of the catalogue; or None.

        Raises:
          ConfigError: The mask has another shape, or isn't of bools.
        """
        if allow is None:
            return None
        mask = tf.convert_to_tensor(allow)
        if mask.dtype != tf.bool or not mask.shape.is_compatible_with([self.size]):
            raise ConfigError(
                f"{self._owner}: allow must be bool ({self.size},), got {mask.dtype.name} {mask.shape}: give "
                "one for each item of the catalogue, in its order"
            )
        return mask

    def find_each(self, ids: Any, what: str, users: tf.Tensor) -> tf.RaggedTensor:
        """Find the numbers of items by ids that each user has, ragged (users, None); -1 for an unknown id.

        Args:
          ids: A ragged tensor or `gmeta.ops.Jagged`, one row per user; or a matrix (users, width), padded
            with -1, or with the empty text.
          what: The name that messages give them.
          users: (), how many users there are.

        Raises:
          ConfigError: The ids are of another kind or shape, or there are other numbers of rows and users (in
            a graph, as `gmeta.core.graph.refuse_unless`).
        """
        if (sequences := jagged.as_jagged(ids)) is None:
            matrix = tf.convert_to_tensor(ids)
            if matrix.shape.rank != 2:
                raise ConfigError(
                    f"{self._owner}: {what} must be ragged, one row per user, or a matrix (users, width) "
                    f"padded with -1 or the empty text, got the shape {matrix.shape}"
                )
            matrix = tf.cast(matrix, tf.int64) if matrix.dtype.is_integer else matrix
            padding = TEXT_PADDING if matrix.dtype == tf.string else PADDING
            ragged = tf.ragged.boolean_mask(matrix, matrix != tf.constant(padding, matrix.dtype))
            sequences = jagged.from_ragged(ragged)
        rows, users = tf.size(jagged.lengths(sequences)), tf.cast(users, tf.int32)
        told = [f"{self._owner}: {what} must have one row per user: users=", ", rows="]
        parts = [told[0], tf.strings.as_string(users), told[1], tf.strings.as_string(rows)]
        found = refuse_unless(self.find(sequences.values), rows == users, tf.strings.join(parts))
        return jagged.to_ragged(sequences._replace(values=found))

    def noted(self) -> Noted:
        """Return what checkpoints hold."""
        counts, keys = self.counts.numpy(), self.all_keys.numpy()
        if self.marks is not None:
            return {"keys": keys, "counts": counts, "marks": self.marks}
        some = counts > 0
        return {"keys": keys[some], "counts": counts[some], "marks": np.zeros(0, np.int64)}

    def compare(self, noted: Noted) -> None:
        """Refuse the state of a model whose items have other marks.

        Args:
          noted: Another catalogue's `noted`.

        Raises:
          ConfigError: Marks differ, or no item has one to compare.
        """
        if self.marks is None:
            return
        places = self.find(tf.constant(noted["keys"], tf.int64)).numpy()
        here = places >= 0
        marks = noted["marks"] if len(noted["marks"]) else np.zeros(len(places), np.int64)
        other = here & (marks != self.marks[places])
        if other.any() or not here.any():
            why = "it knows none of these items"
            if other.any():
                first = self.ids(tf.constant(places[other][:1])).numpy()[0]
                why = f"item {first!r} has another code there"
            raise ConfigError(
                f"{self._owner}: what is loaded has the weights of a model with other semantic ids: {why}; "
                "make the model with those that it was trained with, to which SemanticIds.add adds items"
            )

    def load(self, noted: Noted) -> None:
        """Take over the counts of another catalogue's `noted`, item by item; other items have none.

        Raises:
          ConfigError: As `compare`.
        """
        self.compare(noted)
        places = self.find(tf.constant(noted["keys"], tf.int64)).numpy()
        here = places >= 0
        counts = np.zeros(self.size, np.int64)
        counts[places[here]] = noted["counts"][here]
        self._gathered.assign(counts)
        self._own.assign(np.zeros(self.size, np.int64))

    # TensorFlow calls these; the names of the tensors are part of the file format.

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {f"-{name}": tf.constant(values, tf.int64) for name, values in self.noted().items()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> None:
        self.load({name.removeprefix("-"): tensor.numpy() for name, tensor in restored_tensors.items()})

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        # A checkpoint of the items themselves would fit no other catalogue.
        return {} if save_type == "checkpoint" else super()._trackable_children(save_type, **kwargs)

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return None  # earlier checkpoints have the items

    @property
    def config(self) -> int | list[int] | list[str]:
        """The argument ``items`` in a form that JSON can hold."""
        if self._keys is None:
            return self.size
        if self._texts is None:
            return list(self._keys.numpy().tolist())
        return [text.decode() for text in self._texts.numpy().tolist()]

    def _check_keys(self, ids: Any, keys: Any) -> None:
        if not self._hashes and (ids.dtype == object or keys.min() < 0):
            some = ids[0] if ids.dtype == object else int(keys.min())
            raise ConfigError(
                f"{self._owner}: items holds {some!r}: make the feature {self._feature!r} with hash=True, "
                "which takes texts and any 64-bit integers"
            )
        values, counts = np.unique(keys, return_counts=True)
        if (counts > 1).any():
            twice = ids[keys == values[counts > 1][0]].tolist()[0]
            raise ConfigError(f"{self._owner}: items must be distinct ids, got {twice!r} twice")
        if (ids == (TEXT_PADDING if ids.dtype == object else PADDING)).any():
            padding = TEXT_PADDING if ids.dtype == object else PADDING
            raise ConfigError(
                f"{self._owner}: items can't hold {padding!r}, which stands for no id: leave it out"
            )


def _check(items: Items, owner: str) -> Any:
    """Return ids as int64, or as bytes of dtype object."""
    ids = np.asarray(items)
    texts = ids.dtype.kind in "USO" and all(isinstance(each, str | bytes) for each in ids.ravel())
    if ids.ndim != 1 or not len(ids) or not (texts or ids.dtype.kind in "iu"):
        raise ConfigError(
            f"{owner}: items must be a number, or a vector of ids that are integers or texts, got "
            f"{ids.dtype} of shape {ids.shape}"
        )
    if texts:
        return np.array([each.encode() if isinstance(each, str) else each for each in ids.tolist()], object)
    return ids.astype(np.int64)  # uint64 as the int64 of the same bits, as in batches


@tf.autograph.experimental.do_not_convert
def top_items(
    queries: tf.Tensor,
    vectors: tf.Tensor,
    k: int,
    *,
    leave_out: tf.RaggedTensor | None = None,
    allow: tf.Tensor | None = None,
    again: tf.RaggedTensor | None = None,
    bias: tf.Tensor | None = None,
    block: int | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Find the items whose vectors have the greatest products with queries, the greatest first.

    The catalogue is scored block by block, so memory holds n times ``block`` scores at once instead of n V.
    Of a block, only the k groups of scores with the largest maxima are compared one by one: no other score
    is among the k best. Filters apply before the best are chosen, so k items are found wherever k remain.

    Args:
      queries: (n, d) floats.
      vectors: (V, d), of all items.
      k: The number of items per query.
      leave_out: Numbers of the items to leave out for each query, ragged (n, None); negative ones have no
        effect.
      allow: bool (V,), which items are allowed; None: all.
      again: Numbers of the items whose scores ``bias`` is added to, as ``leave_out``; repeats count once.
      bias: (), for ``again``.
      block: The number of items scored at once. None: 65,536, or on a GPU as many as make 2²⁶ scores, 256 MB.

    Returns:
      (n, k) numbers of items, int64, and (n, k) scores, float32. Among equal scores the smaller number comes
      first. Where there are fewer than k items, the number is -1 and the score -inf.
    """
    size, count = tf.shape(vectors, tf.int64)[0], tf.shape(queries, tf.int64)[0]
    queries = tf.cast(queries, tf.float32)
    if block is None:
        least = tf.constant(_BLOCK, tf.int64)
        block = tf.maximum(_SCORES // tf.maximum(count, 1), least) if on_gpu() else least
    block = tf.cast(block, tf.int64)

    def score(begin: tf.Tensor, numbers: tf.Tensor, best: tf.Tensor) -> tuple[tf.Tensor, ...]:
        end = tf.minimum(begin + block, size)
        scores = tf.matmul(queries, tf.cast(vectors[begin:end], tf.float32), transpose_b=True)
        if again is not None:
            scores = _move(scores, again, begin, end, bias)
        if leave_out is not None:
            scores = _move(scores, leave_out, begin, end, None)
        if allow is not None:
            scores = tf.where(allow[begin:end], scores, float("-inf"))
        here, scores = _contenders(scores, k)
        found = tf.math.top_k(tf.concat([best, scores], axis=1), k)
        numbers = tf.gather(tf.concat([numbers, begin + here], axis=1), found.indices, batch_dims=1)
        return end, numbers, found.values

    start = (
        tf.constant(0, tf.int64),
        tf.fill([count, k], tf.constant(-1, tf.int64)),
        tf.fill([count, k], tf.constant(float("-inf"))),
    )
    _, numbers, scores = tf.while_loop(
        lambda begin, *_: begin < size,
        score,
        start,
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, k]), tf.TensorShape([None, k])),
        parallel_iterations=1,
    )
    return tf.where(tf.math.is_inf(scores), tf.constant(-1, tf.int64), numbers), scores


def _contenders(scores: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Leave out groups of consecutive scores that have none of the k greatest of their row.

    The k groups with the greatest maxima have them all. Of groups with equal maxima the first are taken, so
    of equal scores the first remain. If most groups would remain, all do.

    Returns:
      (n, m) places of the scores that remain, int64, ascending; and these scores. Places behind the end of a
      row have -inf.
    """
    count, width = tf.unstack(tf.shape(scores))
    groups = -(-width // _GROUP)

    def of_groups() -> tuple[tf.Tensor, tf.Tensor]:
        padding = [[0, 0], [0, groups * _GROUP - width]]
        grouped = tf.reshape(tf.pad(scores, padding, constant_values=float("-inf")), [count, groups, _GROUP])
        chosen = tf.sort(tf.math.top_k(tf.reduce_max(grouped, axis=2), k).indices)
        places = chosen[:, :, tf.newaxis] * _GROUP + tf.range(_GROUP)
        found = tf.gather(grouped, chosen, batch_dims=1)
        return tf.reshape(places, [count, k * _GROUP]), tf.reshape(found, [count, k * _GROUP])

    every = tf.broadcast_to(tf.range(width), tf.shape(scores))
    places, found = tf.cond(groups > 2 * k, of_groups, lambda: (every, scores))
    return tf.cast(places, tf.int64), found


def _move(
    scores: tf.Tensor, items: tf.RaggedTensor, begin: tf.Tensor, end: tf.Tensor, bias: tf.Tensor | None
) -> tf.Tensor:
    """Add the bias, or else -inf, to the scores of such items among those from begin to end."""
    here = tf.where((items.values >= begin) & (items.values < end))[:, 0]
    rows = tf.cast(tf.gather(items.value_rowids(), here), tf.int64)
    places = tf.stack([rows, tf.gather(items.values, here) - begin], axis=1)
    lowest = tf.fill([tf.size(here)], tf.constant(float("-inf")))
    moved = lowest if bias is None else tf.gather_nd(scores, places) + bias
    return tf.tensor_scatter_nd_update(scores, places, moved)


def top_of_ranking(
    ranking: tuple[tf.Tensor, tf.Tensor], k: int, leave_out: tf.RaggedTensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Find for each user the first items of one ranking, without those that the user's are to leave out.

    Args:
      ranking: (V,) int64 numbers of items, the best first, -1 for none; and (V,) their scores, -inf for none.
      k: The number of items per user.
      leave_out: Numbers of items, ragged (users, None); negative ones are ignored.

    Returns:
      (users, k) numbers and (users, k) scores, as `top_items`.
    """
    longest = tf.reduce_max(tf.concat([[0], tf.cast(leave_out.row_lengths(), tf.int32)], 0))
    first = tf.minimum(tf.size(ranking[0]), k + longest)  # each user leaves k of these
    numbers, scores = (each[:first] for each in ranking)
    order = tf.argsort(numbers)
    known = tf.gather(numbers, order)
    places = tf.minimum(tf.searchsorted(known, leave_out.values), first - 1)
    there = (leave_out.values >= 0) & (tf.gather(known, places) == leave_out.values)
    places = tf.cast(tf.where(there, tf.gather(order, places), -1), tf.int64)
    # A place's score is its product with 1, and the first of equal scores is the one ranked first.
    users = tf.ones(tf.stack([leave_out.nrows(), 1]))
    best, found = top_items(users, scores[:, tf.newaxis], k, leave_out=leave_out.with_values(places))
    return tf.where(best < 0, best, tf.gather(numbers, tf.maximum(best, 0))), found

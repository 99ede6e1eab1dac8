"""The items that a model chooses from: ids of any kind, numbered."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.asserted import asserted
from gmeta.core.errors import ConfigError
from gmeta.ops.frozen_table import RowNumbers

Items = Any
"""A number, or a vector of ids: integers or texts, as an array, a tensor or a list."""
_BLOCK = 65536  # items that are scored at once


class Catalogue(tf.__internal__.tracking.AutoTrackable):
    """Items by number, from 0 on.

    Args:
      items: V, for the ids from 0 to V - 1; or the V ids, distinct: any integers, such as the hashes that
        ``gmeta prepare`` writes, or texts. Neither -1 nor the empty text can be one: they stand for padding.
      owner: What messages begin with.

    Raises:
      ConfigError: No items, ids that aren't distinct or are of another kind, or one that stands for padding.

    Example:
      >>> catalogue = Catalogue([70, -5, 8], "model")
      >>> catalogue.numbers(tf.constant([8, 70], tf.int64)).numpy().tolist()
      [2, 0]
    """

    def __init__(self, items: Items, owner: str) -> None:
        super().__init__()
        self._owner = owner
        self._ids: tf.Variable | None = None
        if tf.is_tensor(items):
            items = items.numpy()
        if np.ndim(items) == 0:
            self.size, self.dtype = whole_number(f"{owner}: items", items, least=1), tf.int64
            return
        ids = _checked(items, owner)
        self.size, self.dtype = len(ids), tf.as_dtype(ids.dtype if ids.dtype == np.int64 else tf.string)
        with tf.device("CPU:0"):
            self._ids = tf.Variable(ids, trainable=False, name="catalogue")
        self._row_numbers = RowNumbers(self._ids)

    def ids(self, numbers: tf.Tensor) -> tf.Tensor:
        """The ids of items, of the shape of their numbers."""
        numbers = tf.cast(numbers, tf.int64)
        return numbers if self._ids is None else tf.gather(self._ids, numbers)

    @property
    def all_ids(self) -> tf.Tensor:
        """(V,): the ids of all items."""
        return self.ids(tf.range(self.size, dtype=tf.int64))

    def find(self, ids: tf.Tensor) -> tf.Tensor:
        """The numbers of items by their ids, (n,) int64; -1 for an id that there isn't."""
        self._check_kind(ids)
        if self._ids is not None:
            return self._row_numbers(ids if self.dtype == tf.string else tf.cast(ids, tf.int64))
        ids = tf.cast(ids, tf.int64)
        return tf.where((ids >= 0) & (ids < self.size), ids, -1)

    def numbers(self, ids: tf.Tensor) -> tf.Tensor:
        """The numbers of items by their ids, (n,) int64.

        Raises:
          ConfigError: Ids of another kind than the catalogue's.
          tf.errors.InvalidArgumentError: An id that there isn't; it is named.
        """
        found = self.find(ids)
        good = found >= 0
        first = tf.argmin(tf.cast(tf.concat([good, [False]], 0), tf.int32))  # beyond the last: none is bad
        texts = ids if ids.dtype == tf.string else tf.strings.as_string(ids)
        known = f"items={self.size} has the ids from 0 to {self.size - 1}"
        if self._ids is not None:
            known = f"items= has {self.size} others. Leave such events out, or add the id"
        text = [
            f"{self._owner}: the item ",
            tf.concat([texts, [""]], 0)[first],
            f" is not in the catalogue; {known}",
        ]
        return asserted(found, good, [tf.strings.join(text)])

    def _check_kind(self, ids: tf.Tensor) -> None:
        if self.dtype == tf.string and ids.dtype == tf.string:
            return
        if self.dtype == tf.string or not ids.dtype.is_integer:
            kind = "texts" if self.dtype == tf.string else "integers"
            raise ConfigError(f"{self._owner}: the catalogue's ids are {kind}, got {ids.dtype.name}")

    @property
    def config(self) -> int | list[int] | list[str]:
        """``items`` as JSON can hold them."""
        if self._ids is None:
            return self.size
        found = self._ids.numpy().tolist()
        return [each.decode() for each in found] if self.dtype == tf.string else found


def _checked(items: Items, owner: str) -> Any:
    ids = np.asarray(items)
    texts = ids.dtype.kind in "USO" and all(isinstance(each, str | bytes) for each in ids.ravel())
    if ids.ndim != 1 or not len(ids) or not (texts or ids.dtype.kind in "iu"):
        raise ConfigError(
            f"{owner}: items must be a number, or a vector of ids that are integers or texts, got "
            f"{ids.dtype} of shape {ids.shape}"
        )
    if texts:
        ids = np.array([each.encode() if isinstance(each, str) else each for each in ids.tolist()], object)
        padding: Any = b""
    else:
        if ids.dtype == np.uint64 and ids.max() > np.iinfo(np.int64).max:
            raise ConfigError(f"{owner}: items must be int64 ids, got {ids.max()}")
        ids, padding = ids.astype(np.int64), -1
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise ConfigError(f"{owner}: items must be distinct ids, got {values[counts > 1][0]!r} twice")
    if padding in values:
        raise ConfigError(f"{owner}: items can't hold {padding!r}, which stands for padding: leave it out")
    return ids


@tf.autograph.experimental.do_not_convert
def top_items(
    queries: tf.Tensor,
    vectors: tf.Tensor,
    k: int,
    *,
    without: tf.RaggedTensor | None = None,
    block: int = _BLOCK,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The items whose vectors have the greatest products with queries, the greatest first.

    The catalogue is scored block by block: of n V scores, n times ``block`` are there at once.

    Args:
      queries: (n, d) floats.
      vectors: (V, d), of all items; V is at least k.
      k: How many.
      without: Items of each query that are left out, ragged (n, None) numbers; negative ones name none.
      block: Items that are scored at once.

    Returns:
      (n, k) numbers of items, int64, of equal scores the smaller number first, -1 where there are fewer than
      k; and (n, k) scores, float32, of these -inf.
    """
    size, count = tf.shape(vectors, tf.int64)[0], tf.shape(queries, tf.int64)[0]
    queries = tf.cast(queries, tf.float32)

    def score(begin: tf.Tensor, numbers: tf.Tensor, best: tf.Tensor) -> tuple[tf.Tensor, ...]:
        end = tf.minimum(begin + block, size)
        scores = tf.matmul(queries, tf.cast(vectors[begin:end], tf.float32), transpose_b=True)
        if without is not None:
            scores = _hidden(scores, without, begin, end)
        here = tf.broadcast_to(tf.range(begin, end), tf.shape(scores, tf.int64))
        found = tf.math.top_k(tf.concat([best, scores], axis=1), k)
        numbers = tf.gather(tf.concat([numbers, here], axis=1), found.indices, batch_dims=1)
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


def _hidden(scores: tf.Tensor, without: tf.RaggedTensor, begin: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
    """Scores of the items from begin to end, -inf of those that are left out."""
    items = without.values
    here = tf.where((items >= begin) & (items < end))[:, 0]
    rows = tf.cast(tf.gather(without.value_rowids(), here), tf.int64)
    places = tf.stack([rows, tf.gather(items, here) - begin], axis=1)
    lowest = tf.fill([tf.size(here)], tf.constant(float("-inf")))
    return tf.tensor_scatter_nd_update(scores, places, lowest)

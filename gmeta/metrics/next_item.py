"""Metrics of right items by their ranks among a whole catalogue: the next item, or several right ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.graph import assert_first


@tf.keras.saving.register_keras_serializable("gmeta")
class NextItem(tf.keras.metrics.Metric):
    r"""HR@k, NDCG@k and MRR of predictions with one correct answer each, the item that came next.

    .. math::
       \mathrm{HR@}k = \frac{\sum_i w_i [r_i \leq k]}{\sum_i w_i}, \quad
       \mathrm{NDCG@}k = \frac{\sum_i w_i [r_i \leq k] / \log_2(r_i + 1)}{\sum_i w_i}, \quad
       \mathrm{MRR} = \frac{\sum_i w_i / r_i}{\sum_i w_i}

    with the ranks :math:`r_i` of `catalogue_ranks`, among all items. One pass over the catalogue gives all
    these numbers, so they are one metric, with several results. The ideal order has the one item first, so
    NDCG needs no division; for tasks of several graded items, use `NDCG`.

    Sums are kept in float64 and with the aggregation SUM: 2 k + 2 numbers, whatever the number of
    predictions, and sums over batches and ranks are exact. A rank of 0, of a model that has diverged, makes
    all results nan until the next reset. Without any samples, they are nan too.

    Args:
      ks: The k of HR and NDCG, each at least 1.
      name: Of the metric.
      dtype: Of the sums.

    Raises:
      ConfigError: No k, a k below 1 or given twice.

    Example:
      >>> metric = NextItem(ks=[1, 10])
      >>> metric.update_state([1, 3, 50, 1], sample_weight=[1, 1, 2, 0])
      >>> {name: round(float(value), 3) for name, value in metric.result().items()}
      {'hr@1': 0.25, 'hr@10': 0.5, 'ndcg@1': 0.25, 'ndcg@10': 0.375, 'mrr': 0.343}

    References:
      Zhai et al., "Actions Speak Louder than Words" (ICML 2024), section 4.1.1: HR and NDCG at 10, 50 and
      200, over the full catalogue.
    """

    def __init__(
        self, ks: Sequence[int] = (10, 50, 200), name: str = "next_item", dtype: Any = "float64"
    ) -> None:
        numbers = [whole_number("NextItem: k", k, least=1) for k in ks]
        if not numbers or len(set(numbers)) < len(numbers):
            raise ConfigError(f"NextItem: ks must be one or more numbers, each once, got {list(ks)}")
        super().__init__(name=name, dtype=dtype)
        self.ks = numbers
        self.hits = self.add_weight(name="hits", shape=(len(numbers),), initializer="zeros")
        self.gains = self.add_weight(name="gains", shape=(len(numbers),), initializer="zeros")
        self.reciprocals = self.add_weight(name="reciprocals", initializer="zeros")
        self.weight = self.add_weight(name="weight", initializer="zeros")

    # AutoGraph would rewrite it for nothing, and wrap its errors.
    @tf.autograph.experimental.do_not_convert
    def update_state(self, ranks: Any, sample_weight: Any = None) -> None:
        """Add predictions.

        Args:
          ranks: Integers of any shape, from 1 on, as of `catalogue_ranks`; 0 for what isn't finite.
          sample_weight: Of the same shape; 0 marks padding, whose rank is ignored.
        """
        rank = tf.reshape(tf.cast(ranks, tf.float64), [-1])
        weight = (
            tf.ones_like(rank)
            if sample_weight is None
            else tf.reshape(tf.cast(sample_weight, tf.float64), [-1])
        )
        rank = tf.where(weight > 0, rank, 1)
        rank = tf.where(rank >= 1, rank, float("nan"))
        broken = rank - rank  # nan where the rank is, to be seen in comparisons too
        hit = (
            tf.cast(rank[:, tf.newaxis] <= tf.constant(self.ks, tf.float64), tf.float64)
            + broken[:, tf.newaxis]
        )
        gain = hit * (tf.math.log(tf.constant(2.0, tf.float64)) / tf.math.log(rank + 1))[:, tf.newaxis]
        for variable, value in ((self.hits, hit), (self.gains, gain), (self.reciprocals, 1 / rank)):
            total = tf.tensordot(weight, value, axes=1)
            variable.assign_add(tf.cast(total, variable.dtype))
        self.weight.assign_add(tf.cast(tf.reduce_sum(weight), self.weight.dtype))

    def result(self) -> dict[str, tf.Tensor]:
        """Return ``hr@k`` and ``ndcg@k`` for each k, and ``mrr``: scalars."""
        found = {f"hr@{k}": self.hits[i] / self.weight for i, k in enumerate(self.ks)}
        found |= {f"ndcg@{k}": self.gains[i] / self.weight for i, k in enumerate(self.ks)}
        return {**found, "mrr": self.reciprocals / self.weight}

    def reset_state(self) -> None:
        """Forget all predictions."""
        for variable in self.variables:
            variable.assign(tf.zeros_like(variable))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this metric."""
        return {**super().get_config(), "ks": self.ks}


# The rank of the positive item among all items.


@tf.autograph.experimental.do_not_convert
def catalogue_ranks(
    queries: Any,
    items: Any,
    positives: Any,
    *,
    seen: Any = None,
    seen_bias: Any = None,
    normalize: bool = False,
    block: int = 8192,
) -> tf.Tensor:
    r"""Compute the ranks of positive items by their scores among a whole catalogue, for `NextItem`.

    .. math:: r_i = 1 + |\{j \neq p_i : \langle q_i, x_j \rangle \geq \langle q_i, x_{p_i} \rangle\}|

    Ties are counted against the model: an item of the same score stands before the positive one, and a model
    that scores all items alike has the last rank. Scores are summed in float64 and rounded to float32, by
    which equal items have equal scores whatever the order of summing.

    The catalogue is scored block by block: of the n V scores, n times `block` are in memory at once, at 13
    bytes each (17 with ``seen``).

    Args:
      queries: (n, d) floats.
      items: (V, d) floats, a tensor or variable: the vectors of all items.
      positives: (n,) integers, rows of `items`.
      seen: Items that are left out of each query's ranking, as is usual for items that the user has already
        seen: rows of `items`, (n, s) with -1 as padding, or a ragged tensor. Repeats count once, and the
        positive item is never left out.
      seen_bias: (), added to the scores of ``seen``, including the positive item's, instead of leaving them
        out.
      normalize: Whether vectors are divided by their lengths, as `gmeta.losses.SampledSoftmax` does.
      block: Items that are scored at once.

    Returns:
      (n,) int64 from 1 to V; 0 where a score isn't finite, because the model has diverged.

    Raises:
      ConfigError: The shapes don't fit, ``block`` is below 1, or ``seen_bias`` is given without ``seen``.
      tf.errors.InvalidArgumentError: A positive isn't a row of `items`.

    Example:
      >>> items = tf.constant([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
      >>> catalogue_ranks([[2.0, 1.0], [2.0, 1.0]], items, [0, 1], seen=[[2], [-1]]).numpy()
      array([1, 3])

    References:
      Krichene and Rendle, "On Sampled Metrics for Item Recommendation" (KDD 2020): why all items.
    """
    block = whole_number("catalogue_ranks: block", block, least=1)
    query, table = tf.cast(queries, tf.float64), tf.convert_to_tensor(items)
    positive = tf.cast(positives, tf.int64)
    _check_shapes(query, table, positive)
    count, size = tf.shape(query, tf.int64)[0], tf.shape(table, tf.int64)[0]
    positive = assert_first(
        positive,
        (positive >= 0) & (positive < size),
        ["catalogue_ranks: positives must be rows of the items, of which there are", size, "got", positive],
    )
    query = _vectors(query, normalize)
    own = tf.cast(tf.reduce_sum(query * _vectors(tf.gather(table, positive), normalize), axis=1), tf.float32)
    if seen_bias is not None and seen is None:
        raise ConfigError("catalogue_ranks: seen_bias is added to the scores of seen=, which isn't given")
    hidden = None if seen is None else _pairs(seen)
    if hidden is not None and seen_bias is not None:
        own += tf.where(_holds(hidden, positive), tf.cast(seen_bias, tf.float32), 0)

    def score(begin: tf.Tensor, ahead: tf.Tensor, finite: tf.Tensor) -> tuple[tf.Tensor, ...]:
        end = tf.minimum(begin + block, size)
        rows = _vectors(table[begin:end], normalize)
        scores = tf.cast(tf.matmul(query, rows, transpose_b=True), tf.float32)
        others = tf.range(begin, end) != positive[:, tf.newaxis]
        if hidden is not None:
            within = _within(hidden, begin, end, count)
            if seen_bias is None:
                others &= ~within
            else:
                scores += tf.where(within, tf.cast(seen_bias, tf.float32), 0)
        before = others & ~(scores < own[:, tf.newaxis])
        ahead += tf.math.count_nonzero(before, axis=1)
        finite &= tf.reduce_all(tf.math.is_finite(scores), axis=1)
        return end, tf.ensure_shape(ahead, positive.shape), tf.ensure_shape(finite, positive.shape)

    start = tf.constant(0, tf.int64), tf.zeros_like(positive), tf.math.is_finite(own)
    _, ahead, finite = tf.while_loop(
        lambda begin, *_: begin < size, score, start, parallel_iterations=1, swap_memory=False
    )
    return tf.where(finite, ahead + 1, 0)


def _vectors(rows: tf.Tensor, normalize: bool) -> tf.Tensor:
    wide = tf.cast(rows, tf.float64)
    return tf.math.l2_normalize(wide, axis=-1, epsilon=1e-12) if normalize else wide


def _pairs(seen: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the queries and the items of seen pairs, flat."""
    if isinstance(seen, tf.RaggedTensor):
        return seen.value_rowids(), tf.cast(seen.flat_values, tf.int64)
    padded = tf.cast(seen, tf.int64)
    queries = tf.ones_like(padded) * tf.range(tf.shape(padded, tf.int64)[0])[:, tf.newaxis]
    return tf.reshape(queries, [-1]), tf.reshape(padded, [-1])


def _holds(pairs: tuple[tf.Tensor, tf.Tensor], positive: tf.Tensor) -> tf.Tensor:
    """Return (n,) bool: whether each query has seen its positive item."""
    queries, items = pairs
    same = tf.cast(items == tf.gather(positive, queries), tf.int32)
    return tf.math.unsorted_segment_max(same, queries, tf.size(positive)) > 0


def _within(
    pairs: tuple[tf.Tensor, tf.Tensor], begin: tf.Tensor, end: tf.Tensor, count: tf.Tensor
) -> tf.Tensor:
    """Return (n, end - begin) bool: which of these items each query has seen."""
    queries, items = pairs
    here = tf.where((items >= begin) & (items < end))[:, 0]
    places = tf.stack([tf.cast(tf.gather(queries, here), tf.int64), tf.gather(items, here) - begin], axis=1)
    return tf.scatter_nd(places, tf.ones_like(here, tf.int32), tf.stack([count, end - begin])) > 0


def _check_shapes(query: tf.Tensor, table: tf.Tensor, positive: tf.Tensor) -> None:
    fits = query.shape.rank == table.shape.rank == 2 and positive.shape.rank == 1
    if not fits or not query.shape[1:].is_compatible_with(table.shape[1:]):
        raise ConfigError(
            "catalogue_ranks: queries must be (n, d), items (V, d) of the same d, and positives (n,); got "
            f"{query.shape}, {table.shape} and {positive.shape}"
        )


@tf.keras.saving.register_keras_serializable("gmeta")
class Retrieval(tf.keras.metrics.Metric):
    r"""HR@k, recall@k and NDCG@k of users who have several right items among a whole catalogue.

    .. math::
       \mathrm{HR@}k = \frac{1}{n} \sum_u [h_u > 0], \quad
       \mathrm{recall@}k = \frac{1}{n} \sum_u \frac{h_u}{T_u}, \quad
       \mathrm{NDCG@}k = \frac{1}{n} \sum_u \frac{\sum_{r_{ui} \le k} 1 / \log_2(r_{ui} + 1)}
       {\sum_{r = 1}^{\min(T_u, k)} 1 / \log_2(r + 1)}

    with the ranks :math:`r_{ui}` of the :math:`T_u` right items of user u, of which :math:`h_u` are at most
    k. Users without right items don't count. These are RecBole's definitions. Sums are kept in float64, so
    those over batches and ranks are exact; without any users, results are nan.

    Args:
      ks: The k, each at least 1.
      name: Of the metric.
      dtype: Of the sums.

    Raises:
      ConfigError: No k, a k below 1 or given twice.

    Example:
      >>> metric = Retrieval(ks=[2])
      >>> metric.update_state(tf.ragged.constant([[1, 5, 9], [3]]))
      >>> {name: round(float(value), 3) for name, value in metric.result().items()}
      {'hr@2': 0.5, 'recall@2': 0.167, 'ndcg@2': 0.307}
    """

    def __init__(self, ks: Sequence[int] = (10, 20), name: str = "retrieval", dtype: Any = "float64") -> None:
        numbers = [whole_number("Retrieval: k", k, least=1) for k in ks]
        if not numbers or len(set(numbers)) < len(numbers):
            raise ConfigError(f"Retrieval: ks must be one or more numbers, each once, got {list(ks)}")
        super().__init__(name=name, dtype=dtype)
        self.ks = numbers
        self.sums = {
            part: self.add_weight(name=part, shape=(len(numbers),), initializer="zeros")
            for part in ("hr", "recall", "ndcg")
        }
        self.users = self.add_weight(name="users", initializer="zeros")

    @tf.autograph.experimental.do_not_convert
    def update_state(self, ranks: tf.RaggedTensor) -> None:
        """Add users.

        Args:
          ranks: (users, None) the ranks of each user's right items, integers from 1 on; 0 for what isn't
            finite, which makes all results nan until the next reset.
        """
        users, owner = ranks.nrows(), ranks.value_rowids()
        count = tf.cast(ranks.row_lengths(), tf.float64)
        rank = tf.cast(ranks.values, tf.float64)[:, tf.newaxis]
        rank = tf.where(rank >= 1, rank, float("nan"))
        ks = tf.constant(self.ks, tf.float64)
        hit = tf.cast(rank <= ks, tf.float64) + (rank - rank)  # nan where the rank is
        ln2 = tf.math.log(tf.constant(2.0, tf.float64))
        gains = 1 / (tf.math.log(tf.range(2, max(self.ks) + 2, dtype=tf.float64)) / ln2)
        ideal = tf.concat([[0.0], tf.cumsum(gains)], axis=0)
        best = tf.gather(ideal, tf.cast(tf.minimum(count[:, tf.newaxis], ks), tf.int64))
        hits, gained = (
            tf.math.unsorted_segment_sum(values, owner, users)
            for values in (hit, hit * ln2 / tf.math.log(rank + 1))
        )
        some = count > 0
        found = {
            "hr": tf.minimum(hits, 1),
            "recall": hits / tf.maximum(count, 1)[:, tf.newaxis],
            "ndcg": gained / tf.where(some[:, tf.newaxis], best, 1),
        }
        for part, values in found.items():
            self.sums[part].assign_add(tf.cast(tf.reduce_sum(values, axis=0), self.sums[part].dtype))
        self.users.assign_add(tf.cast(tf.math.count_nonzero(some), self.users.dtype))

    def result(self) -> dict[str, tf.Tensor]:
        """Return ``hr@k``, ``recall@k`` and ``ndcg@k`` for each k: scalars."""
        return {
            f"{part}@{k}": sums[place] / self.users
            for part, sums in self.sums.items()
            for place, k in enumerate(self.ks)
        }

    def reset_state(self) -> None:
        """Forget all users."""
        for variable in self.variables:
            variable.assign(tf.zeros_like(variable))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this metric."""
        return {**super().get_config(), "ks": self.ks}

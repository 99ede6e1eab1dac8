"""Softmax losses over candidates: the next item among sampled negatives, and several right items at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError, finite_number, whole_number
from gmeta.ops import Jagged, jagged

_SHORTEST = 1e-6  # of a vector that is divided by its length, as in HSTU's code


@dataclass(frozen=True)
class SampledSoftmax:
    r"""Cross-entropy of the positive item among sampled negatives, for each sample.

    .. math::
       l_i = -\log \frac{e^{s_{ii}}}{e^{s_{ii}} + \sum_{j \in N_i} e^{s_{ij}}}, \quad
       s_{ij} = \frac{\langle q_i, x_j \rangle}{\tau} - \log Q_j

    :math:`q_i` is a query vector, such as a sequence model's output at a position, :math:`x_i` the vector of
    the item that came next, and :math:`\tau` the temperature. Vectors are divided by their lengths first, so
    that the product is a cosine. The negatives :math:`N_i` are the other samples' positives (``in_batch``),
    or items drawn from the catalogue (`uniform_negatives`), or both.

    A negative with the id of sample i's positive doesn't count as a negative of sample i, wherever it comes
    from. Neither does a padded sample's positive.

    :math:`\log Q_j` is the logarithm of the expected number of times that item j is among the candidates.
    In-batch negatives occur in proportion to their popularity; without the correction, popular items are
    scored too low. As in Yi et al., it is subtracted from the positive's score too. A constant cancels out:
    uniform negatives alone need no correction, and for in-batch ones the share of the training samples whose
    positive is j is enough. With both kinds, :math:`Q_j = (n - 1) \, p_j + m / V`, for positives and drawn
    items alike.

    Over several ranks, the in-batch negatives are the rank's own, so N ranks don't compute the loss that one
    rank would on all samples; with drawn negatives alone they do.

    Attributes:
      temperature: :math:`\tau`, above 0; 0.05 as HSTU's.
      normalize: Whether vectors are divided by their lengths, or by 1e-6 if they are shorter.
      in_batch: Whether the other samples' positives are negatives.

    Raises:
      ConfigError: The temperature isn't a number above 0.

    Example:
      >>> queries, items = tf.constant([[1.0, 0.0], [0.0, 2.0]]), tf.constant([[3.0, 0.0], [0.0, 1.0]])
      >>> SampledSoftmax(temperature=1.0)(queries, items, [7, 8]).numpy().round(4)  # log(1 + e^-1)
      array([0.3133, 0.3133], dtype=float32)

    References:
      Zhai et al., "Actions Speak Louder than Words" (ICML 2024), section 4.1.1 and its code. Yi et al.,
      "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
      Recommendations" (RecSys 2019), section 3.
    """

    temperature: float = 0.05
    normalize: bool = True
    in_batch: bool = True

    def __post_init__(self) -> None:
        if finite_number("SampledSoftmax: temperature", self.temperature) <= 0:
            raise ConfigError(f"SampledSoftmax: temperature must be above 0, got {self.temperature}")

    def __call__(
        self,
        queries: tf.Tensor,
        positives: tf.Tensor,
        positive_ids: Any,
        *,
        negatives: tf.Tensor | None = None,
        negative_ids: Any = None,
        weights: Any = None,
        log_q: Any = None,
        negative_log_q: Any = None,
        offsets: Any = None,
        earlier: Jagged | None = None,
        earlier_ids: Any = None,
        earlier_log_q: Any = None,
    ) -> tf.Tensor:
        """Compute the samples' losses, unweighted; `mean_loss` takes their mean.

        Time and memory are proportional to n (n + m). Narrower types than float32 are computed in float32.

        Args:
          queries: (n, d) floats.
          positives: (n, d), the vectors of the target items.
          positive_ids: (n,) integers, those items' ids.
          negatives: (m, d) drawn items for all samples; (n, m, d) for each its own; or, with ``offsets``,
            (g, m, d) for each group its own.
          negative_ids: (m,), (n, m) or (g, m), their ids.
          weights: (n,): 0 marks padding, which has no loss and isn't a negative of any sample; its values are
            ignored.
          log_q: (n,), log Q of the positives.
          negative_log_q: The same for the negatives, of the shape of their ids.
          offsets: (g + 1,) int64: samples offsets[i] to offsets[i + 1] - 1 are group i, such as the positions
            of one user's history.
          earlier: Values (n, d) by group, the vectors of the items that the samples look back at: the
            negatives of a sample then include the items of its own group up to its own. These groups serve
            only to look back: ``offsets`` defines the groups that share negatives.
          earlier_ids: (n,), their ids.
          earlier_log_q: (), log Q of these, and of a positive that is one of them. What a model adds to the
            scores of items that come again is subtracted from it.

        Returns:
          (n,) losses, at least 0, float32 or float64.

        Raises:
          ConfigError: There are no negatives; or ids or log Q are given for positives or negatives alone.
        """
        self._check(negatives, negative_ids, log_q, negative_log_q, (earlier, earlier_ids), offsets)
        ids = tf.convert_to_tensor(positive_ids)
        real = tf.ones_like(ids, tf.bool) if weights is None else tf.convert_to_tensor(weights) > 0
        query, positive = (self._vectors(x, real) for x in (queries, positives))
        corrections = _corrections(log_q, real, query.dtype)
        # Scores above the positive's own: a softmax of them has the positive at 0.
        own = tf.reduce_sum(query * positive, axis=1) / self.temperature - corrections
        if earlier is not None:
            looked_at = earlier._replace(values=self._vectors(earlier.values))
            back = _LookBack(looked_at, tf.cast(earlier_ids, ids.dtype), ids)
            back_log_q = _corrections(earlier_log_q, None, query.dtype)
            own = tf.where(back.repeats, own + corrections - back_log_q, own)
        above = [tf.zeros_like(own)[:, tf.newaxis]]
        if self.in_batch:
            scores = tf.matmul(query, positive, transpose_b=True) / self.temperature - corrections
            absent = (ids[:, tf.newaxis] == ids) | ~real
            above.append(_without(scores - own[:, tf.newaxis], absent))
        if negatives is not None:
            drawn_ids, drawn = tf.cast(negative_ids, ids.dtype), self._vectors(negatives)
            by_group = offsets is not None and drawn.shape.rank == 3
            each = jagged.row_ids(Jagged(ids, offsets)) if by_group else None
            scores = _products(query, drawn, offsets if by_group else None) / self.temperature
            scores -= _of_samples(_corrections(negative_log_q, None, query.dtype), each)
            same = ids[:, tf.newaxis] == _of_samples(drawn_ids, each)
            above.append(_without(scores - own[:, tf.newaxis], same))
        if earlier is not None:
            scores = back.products(query) / self.temperature - back_log_q
            above.append(_without(scores - own[:, tf.newaxis], back.absent))
        losses = tf.reduce_logsumexp(tf.concat(above, axis=1), axis=1)
        return tf.where(real, losses, 0)

    def _vectors(self, vectors: Any, real: tf.Tensor | None = None) -> tf.Tensor:
        wide = tf.convert_to_tensor(vectors)
        wide = wide if wide.dtype == tf.float64 else tf.cast(wide, tf.float32)
        if real is not None:
            wide = tf.where(real[:, tf.newaxis], wide, 0)
        return tf.math.l2_normalize(wide, axis=-1, epsilon=_SHORTEST**2) if self.normalize else wide

    def _check(
        self,
        negatives: Any,
        negative_ids: Any,
        log_q: Any,
        negative_log_q: Any,
        back: Sequence[Any],
        offsets: Any,
    ) -> None:
        if negatives is None and not self.in_batch:
            raise ConfigError(
                "SampledSoftmax: the positive has nothing to compete with: give negatives, as of "
                "uniform_negatives, or set in_batch=True"
            )
        if (negatives is None) != (negative_ids is None):
            raise ConfigError(
                "SampledSoftmax: negatives and negative_ids belong together: ids show which negatives are a "
                "sample's positive"
            )
        if negatives is not None and (log_q is None) != (negative_log_q is None):
            raise ConfigError(
                "SampledSoftmax: log_q is that of the positives and negative_log_q that of the negatives; a "
                "correction of one kind alone would favour the other: give both or none"
            )
        if negatives is None and negative_log_q is not None:
            raise ConfigError("SampledSoftmax: negative_log_q is given, and no negatives")
        earlier, earlier_ids = back
        if (earlier is None) != (earlier_ids is None):
            raise ConfigError(
                "SampledSoftmax: earlier and earlier_ids belong together: they are the items that a sample "
                "looks back at"
            )
        grouped = negatives is not None and len(negatives.shape) == 3
        if offsets is not None and not grouped:
            got = "no negatives" if negatives is None else f"negatives of shape {tuple(negatives.shape)}"
            raise ConfigError(
                f"SampledSoftmax: offsets assign samples to groups of (g, m, d) negatives, got {got}"
            )


def _corrections(log_q: Any, real: tf.Tensor | None, dtype: tf.DType) -> tf.Tensor:
    if log_q is None:
        return tf.zeros([], dtype)
    values = tf.cast(log_q, dtype)
    return values if real is None else tf.where(real, values, 0)


def _products(query: tf.Tensor, drawn: tf.Tensor, offsets: Any) -> tf.Tensor:
    """Multiply each query with its own negatives, (n, m)."""
    if drawn.shape.rank == 2:
        return tf.matmul(query, drawn, transpose_b=True)
    if offsets is None:
        return tf.linalg.matvec(drawn, query)
    groups = Jagged(query, offsets)
    by_group = tf.matmul(jagged.to_padded(groups), drawn, transpose_b=True)
    return jagged.from_padded(by_group, jagged.lengths(groups)).values


class _LookBack:
    """The items of each sample's own group up to its own, padded to the longest group, (n, longest)."""

    def __init__(self, vectors: Jagged, earlier_ids: tf.Tensor, ids: tf.Tensor) -> None:
        self.vectors = vectors
        rows, places = jagged.row_ids(vectors), jagged.positions(vectors)
        padded_ids = jagged.to_padded(Jagged(earlier_ids, vectors.offsets))
        shape = tf.shape(padded_ids, tf.int64)
        with tf.device("CPU:0"):
            longest = shape[1]
        here = tf.range(longest, dtype=tf.int64) <= places[:, tf.newaxis]
        same = tf.gather(padded_ids, rows) == ids[:, tf.newaxis]
        self.repeats = tf.reduce_any(here & same, axis=1)
        self.absent = same | ~here

    def products(self, query: tf.Tensor) -> tf.Tensor:
        return _products(query, jagged.to_padded(self.vectors), self.vectors.offsets)


def _of_samples(by_group: tf.Tensor, groups: tf.Tensor | None) -> tf.Tensor:
    return by_group if groups is None or by_group.shape.rank == 0 else tf.gather(by_group, groups)


def _without(scores: tf.Tensor, absent: tf.Tensor) -> tf.Tensor:
    return tf.where(absent, tf.constant(float("-inf"), scores.dtype), scores)


# Negatives drawn from the whole catalogue.


def uniform_negatives(shape: int | Sequence[int], items: int, *, seed: int, step: Any) -> tf.Tensor:
    """Numbers of items, each as likely as any other, with replacement.

    A pure function of (seed, step): counter-based random numbers (Philox4x32-10, Salmon et al. 2011), with
    the seed as their key and the step in the upper half of their counter. Nothing is kept between calls, so a
    resumed run draws what the interrupted one would have, and all ranks of a job draw the same. Add the rank
    to the seed where each shall have negatives of its own.

    Draw them before the step's lookup, so that their rows come with those of the other ids. That an item is
    drawn which is some sample's positive is `SampledSoftmax`'s to mask.

    Args:
      shape: How many: m for all samples together, (n, m) for m of each.
      items: The size V of the catalogue; numbers are from 0 to V - 1. A 64-bit draw modulo V prefers some of
        them by V / 2^64 at most.
      seed: From 0 to 2^64 - 1.
      step: Of the training, from 0 on; a tensor or variable too.

    Returns:
      int64 of that shape.

    Raises:
      ConfigError: There are no items, or the seed isn't such a number.

    Example:
      >>> uniform_negatives(4, 1000, seed=1, step=7).numpy()
      array([577, 586, 796, 897])
    """
    items = whole_number("uniform_negatives: items", items, least=1)
    return tf.raw_ops.StatelessRandomUniformIntV2(
        **_philox("uniform_negatives", shape, seed, step),
        minval=tf.constant(0, tf.int64),
        maxval=tf.constant(items, tf.int64),
    )


def popularity_negatives(shape: int | Sequence[int], shares: Any, *, seed: int, step: Any) -> tf.Tensor:
    """Numbers of items, each as likely as its share, with replacement.

    A pure function of (seed, step), as `uniform_negatives` is.

    Args:
      shape: How many: m for all samples together, (n, m) for m of each.
      shares: (V,) numbers from 0 on, not all 0, such as how often each item occurs. An item of share 0 isn't
        drawn.
      seed: From 0 to 2^64 - 1.
      step: Of the training, from 0 on; a tensor or variable too.

    Returns:
      int64 of that shape, from 0 to V - 1.

    Example:
      >>> popularity_negatives(6, [0, 60, 40], seed=1, step=7).numpy()
      array([1, 1, 2, 1, 1, 1])
    """
    sums = tf.cumsum(tf.cast(shares, tf.float64))
    places = tf.raw_ops.StatelessRandomUniformV2(
        **_philox("popularity_negatives", shape, seed, step), dtype=tf.float64
    )
    below = tf.reshape(places * sums[-1], [-1])
    # The product may round up to the whole sum, behind the last item that has a share.
    last = tf.searchsorted(sums, sums[-1:], side="left", out_type=tf.int64)
    found = tf.minimum(tf.searchsorted(sums, below, side="right", out_type=tf.int64), last)
    return tf.reshape(found, tf.shape(places))


def _philox(name: str, shape: Any, seed: int, step: Any) -> dict[str, Any]:
    key = tf.constant(whole_number(f"{name}: seed", seed) & 0xFFFFFFFFFFFFFFFF, tf.uint64)
    return {
        "shape": tf.convert_to_tensor([shape] if isinstance(shape, int) else shape, tf.int32),
        "key": key[tf.newaxis],
        "counter": tf.stack([tf.constant(0, tf.uint64), tf.cast(step, tf.uint64)]),
        "alg": _PHILOX,
    }


_PHILOX = 1  # tf.random.Algorithm.PHILOX, as the op wants it

_LOWEST = -1e30  # of a candidate that doesn't count: finite, so that a user with no other gets no nan


def set_softmax(
    scores: Any, known: Any, users: Any, columns: Any, *, log_counts: Any = None, log_q: Any = None
) -> tf.Tensor:
    r"""Compute the cross-entropy of each right item among the candidates that its user doesn't have.

    .. math::
       l_{ui} = -\log \frac{e^{s_{ui} - \log Q_i}}
       {e^{s_{ui} - \log Q_i} + \sum_{j \in C \setminus I_u} c_j e^{s_{uj} - \log Q_j}}

    The right items of a user don't compete with each other, unlike in a softmax for one next item: all of
    them shall stand before all others. A user's scores serve all of its right items, so time and memory are
    proportional to users times candidates.

    :math:`c_j` is how often item j was drawn, or is a right item of the batch, and :math:`Q_j` is the
    expected value of that: without this correction, candidates that occur in proportion to their popularity
    would be scored too low.

    Args:
      scores: (u, c) floats, of each user for each candidate; each item is a candidate once.
      known: (u, c) bool: the items that the user has, which aren't negatives.
      users: (n,) integers, the user of each right item.
      columns: (n,) integers, its place among the candidates.
      log_counts: (c,), the log of how often a candidate counts as a negative; -inf if it is none. None: 0.
      log_q: (c,), log Q. None: 0.

    Returns:
      (n,) losses, at least 0, of the scores' type; 0 where a user has no negatives.

    Raises:
      ConfigError: The shapes don't fit.

    Example:
      >>> scores = tf.constant([[2.0, 1.0, 0.0]])  # items 0 and 1 are right: each is held against item 2
      >>> set_softmax(scores, [[True, True, False]], [0, 0], [0, 1]).numpy().round(4)
      array([0.1269, 0.3133], dtype=float32)

    References:
      Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations" (RecSys
      2019), section 3, of log Q.
    """
    scores = tf.convert_to_tensor(scores)
    known = tf.convert_to_tensor(known, tf.bool)
    if scores.shape.rank != 2 or not scores.shape.is_compatible_with(known.shape):
        raise ConfigError(
            f"set_softmax: scores and known must be (users, candidates), got {scores.shape} and {known.shape}"
        )
    if log_q is not None:
        scores -= tf.cast(log_q, scores.dtype)
    right = tf.gather_nd(scores, tf.stack([users, columns], axis=1))
    weighed = scores if log_counts is None else scores + tf.cast(log_counts, scores.dtype)
    lowest = tf.constant(_LOWEST, scores.dtype)
    others = tf.reduce_logsumexp(tf.maximum(tf.where(known, lowest, weighed), lowest), axis=1)
    return tf.math.softplus(tf.gather(others, users) - right)

"""Softmax over candidates that leaves out what a user has: a loss for several right items at once."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError

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

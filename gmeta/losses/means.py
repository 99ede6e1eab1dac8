"""The mean of samples' losses, over one rank's samples or those of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta.core import collectives


def mean_loss(
    losses: tf.Tensor, weights: Any = None, *, over_ranks: bool = False, name: str = "loss/weights"
) -> tf.Tensor:
    r"""The mean of losses over samples, weighted.

    .. math:: \bar{l} = \frac{\sum_i w_i l_i}{W}, \quad W = \sum_i w_i

    Over several ranks W is the weight of the samples of all of them, and what a rank gets is its share of the
    mean: the shares sum up to it, and so do the ranks' gradients. Ranks may have different numbers of
    samples, or none. One small all-reduce; no gradient goes through it.

    Args:
      losses: (n,) floats. Where the weight is 0 they don't matter, not even nan.
      weights: (n,) numbers, not negative; 0 marks padding. None: 1 for each.
      over_ranks: Whether W is that of all ranks. All ranks must call it then.
      name: Of the all-reduce, where several means of a step are over ranks.

    Returns:
      () of the losses' type; 0 if nothing has weight.

    Example:
      >>> float(mean_loss(tf.constant([1.0, 4.0, 9.0]), [1.0, 3.0, 0.0]))
      3.25
    """
    (mean,) = mean_losses([losses], [weights], over_ranks=over_ranks, name=name)
    return mean


def mean_losses(
    losses: Sequence[tf.Tensor], weights: Sequence[Any], *, over_ranks: bool, name: str
) -> list[tf.Tensor]:
    """Several means as of `mean_loss`, with one all-reduce."""
    given = [tf.convert_to_tensor(of_samples) for of_samples in losses]
    weighed = [
        tf.ones_like(of_samples) if weight is None else tf.cast(weight, of_samples.dtype)
        for of_samples, weight in zip(given, weights, strict=True)
    ]
    totals = [tf.reduce_sum(tf.cast(weight, tf.float64)) for weight in weighed]  # counts of any size, exactly
    if over_ranks:
        totals = collectives.allreduce_sum(totals, name=name)
    return [
        tf.math.divide_no_nan(
            tf.reduce_sum(tf.math.multiply_no_nan(of_samples, weight)),
            tf.cast(tf.stop_gradient(total), of_samples.dtype),
        )
        for of_samples, weight, total in zip(given, weighed, totals, strict=True)
    ]

r"""Gradients of the mean loss over the samples of all ranks.

Rank r has the gradient :math:`g_r` of the mean loss over its :math:`n_r` samples. The gradient of the mean
over all :math:`N = \sum_r n_r` samples is

.. math:: g = \frac{1}{N} \sum_r n_r g_r,

whatever the :math:`n_r`, some of them 0: a mean weighted by the numbers of samples (MTGenRec, section 3.3).
Dense gradients are summed in one grouped all-reduce, and the numbers of samples ride along; rows are summed
by their owners (`gmeta.layers.exchange.pieces`). Task parameters never leave their rank (G-Meta, section
2.1.3): the outer gradient alone is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core import collectives

Gradient = Any  # tf.Tensor | tf.IndexedSlices | None

SOUND, NOT_FINITE, REFUSED = 0, 1, 2
"""What a rank's gradients are: finite; not finite, so that a loss scale skips the step; or of a batch with
bad data, which ends training."""


class GlobalMeans(NamedTuple):
    """What the all-reduce of a step tells every rank.

    Attributes:
      dense: The gradients of the mean over all samples; None where there was none.
      scale: () float32, 1 / N; 0 where there are no samples at all.
      states: (world size,) int32, what each rank's gradients are: `SOUND`, `NOT_FINITE` or `REFUSED`.
      stop: () bool, whether any rank asks to stop.
    """

    dense: list[tf.Tensor | None]
    scale: tf.Tensor
    states: tf.Tensor
    stop: tf.Tensor


def times_samples(gradients: Sequence[Gradient], samples: tf.Tensor) -> list[Gradient]:
    """Each gradient n times; zeros, whatever the gradient, for n = 0.

    The gradient of a mean over no samples may be NaN.
    """
    return [_times(gradient, samples) for gradient in gradients]


def state_of(gradients: Sequence[Gradient], allowed: tf.Tensor) -> tf.Tensor:
    """Say whether a rank's gradients are `SOUND`, `NOT_FINITE` or `REFUSED`, () int32.

    Args:
      gradients: All of one rank's.
      allowed: Whether the batch is free of bad data, () bool, as `NanGuard.finite` says it.
    """
    return tf.where(allowed, tf.where(all_finite(gradients), SOUND, NOT_FINITE), REFUSED)


def all_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Whether every number in the gradients is finite."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])


def global_means(
    sums: Sequence[Gradient], samples: tf.Tensor, state: tf.Tensor, stop: tf.Tensor
) -> GlobalMeans:
    """The ranks' sums over samples as means over all samples, in one grouped all-reduce.

    Args:
      sums: n_r times this rank's gradients.
      samples: n_r.
      state: What this rank's gradients are, as `state_of` says it.
      stop: Whether this rank asks all to stop after this step, () bool.
    """
    here = collectives.world()
    present = [tf.convert_to_tensor(gradient) for gradient in sums if gradient is not None]
    dtype = present[0].dtype if present else tf.float32
    states = tf.cast(state, dtype) * tf.one_hot(here.rank, here.size, dtype=dtype)
    tail = tf.concat([[tf.cast(samples, dtype)], [tf.cast(stop, dtype)], states], axis=0)
    *dense, tail = collectives.allreduce_sum([*present, tail], name="step/dense")
    scale = tf.math.divide_no_nan(tf.constant(1, dtype), tail[0])
    means = iter([total * tf.cast(scale, total.dtype) for total in dense])
    return GlobalMeans(
        [None if gradient is None else next(means) for gradient in sums],
        tf.cast(scale, tf.float32),
        tf.cast(tail[2:], tf.int32),
        tail[1] > 0,
    )


def _times(gradient: Gradient, samples: tf.Tensor) -> Gradient:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, samples), gradient.indices, gradient.dense_shape)
    return tf.math.multiply_no_nan(gradient, tf.cast(samples, gradient.dtype))

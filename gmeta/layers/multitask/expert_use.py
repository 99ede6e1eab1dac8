"""Measures how evenly a mixture's tasks use its experts."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


class ExpertBalance(NamedTuple):
    r"""A batch's use of the experts.

    Attributes:
      importance: (tasks, experts), each expert's share in a task's gates; a task's shares sum to 1.
      load: (tasks, experts), the share of the task's samples that go to the expert; with k experts per
        sample, a task's shares sum to k.
    """

    importance: tf.Tensor
    load: tf.Tensor


def expert_balance(gates: tf.Tensor, sample_weight: tf.Tensor | None = None) -> ExpertBalance:
    """Compute importance and load of each expert.

    See Shazeer et al., "Outrageously Large Neural Networks", 2017, 4.

    Args:
      gates: (samples, tasks, experts), at least 0, as `MMoE.gates` returns them.
      sample_weight: (samples,); 0 for samples that don't count, such as padding. None: all count alike.

    Returns:
      The shares; all 0 if no sample counts.

    Example:
      >>> balance = expert_balance(tf.constant([[[0.5, 0.5, 0.0]], [[1.0, 0.0, 0.0]]]))
      >>> balance.importance.numpy().tolist(), balance.load.numpy().tolist()
      ([[0.75, 0.25, 0.0]], [[1.0, 0.5, 0.0]])
    """
    gates = tf.cast(gates, tf.float32) if gates.dtype.size < 4 else gates
    weight = tf.ones_like(gates[:, 0, 0]) if sample_weight is None else tf.cast(sample_weight, gates.dtype)
    sums = [tf.einsum("nte,n->te", x, weight) for x in (gates, tf.cast(gates > 0, gates.dtype))]
    total = tf.reduce_sum(weight)
    return ExpertBalance(*(tf.math.divide_no_nan(x, total) for x in sums))


def squared_variation(shares: tf.Tensor) -> tf.Tensor:
    r"""Compute the squared coefficient of variation over experts, :math:`\mathrm{var}(s) / \bar{s}^2`.

    It is 0 if all experts are used alike, and experts - 1 if one expert does everything.

    Args:
      shares: (..., experts).

    Returns:
      (...).

    Example:
      >>> squared_variation(tf.constant([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])).numpy().tolist()
      [0.0, 3.0]
    """
    return tf.math.divide_no_nan(
        tf.math.reduce_variance(shares, axis=-1), tf.square(tf.reduce_mean(shares, axis=-1))
    )

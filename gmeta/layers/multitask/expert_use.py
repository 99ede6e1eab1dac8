"""How evenly a mixture's tasks use its experts."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


class ExpertBalance(NamedTuple):
    r"""The use of experts by a batch.

    Attributes:
      importance: (tasks, experts), the share that an expert has in a task's gates; they sum to 1.
      load: (tasks, experts), the share of the task's samples that go to it; with k experts for each, they
        sum to k.
    """

    importance: tf.Tensor
    load: tf.Tensor


def expert_balance(gates: tf.Tensor, sample_weight: tf.Tensor | None = None) -> ExpertBalance:
    """Importance and load of each expert (Shazeer et al., "Outrageously Large Neural Networks", 2017, 4).

    Args:
      gates: (samples, tasks, experts), at least 0, as of `MMoE.gates`.
      sample_weight: (samples,); 0 for those that don't count, such as padding. None: all count alike.

    Returns:
      Shares; 0 where no sample counts.

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
    r"""The squared coefficient of variation over experts, :math:`\mathrm{var}(s) / \bar{s}^2`.

    0 where all experts are used alike, experts - 1 where one does everything.

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

"""Computes for each sample only the experts that its gates have chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.ops import jagged


class ExpertGroups(NamedTuple):
    """The pairs of an expert and a sample that has chosen it, expert after expert.

    Attributes:
      samples: (pairs,) int64, the samples of expert 0 in their order, then those of expert 1, ….
      sizes: (experts,) int64, how many samples each expert has.
      gates: (pairs, tasks), the expert's weight for each of the sample's tasks.
    """

    samples: tf.Tensor
    sizes: tf.Tensor
    gates: tf.Tensor


def strongest(logits: tf.Tensor, k: int) -> tf.Tensor:
    """Find the k largest of each row; of equal ones the first, as `tf.math.top_k` does.

    There are k passes of elementwise ops: on a GPU `tf.math.top_k` takes a block of threads for each row, and
    a mixture has many short rows.

    Args:
      logits: (..., experts).
      k: At most as many as there are experts.

    Returns:
      (..., experts) bool. A row that has a NaN has none.

    Example:
      >>> strongest(tf.constant([[1.0, 3.0, 3.0, 2.0]]), 1).numpy().tolist()
      [[False, True, False, False]]
    """
    experts = logits.shape[-1]
    numbers = tf.range(experts, dtype=tf.float32)
    left, chosen = logits, tf.zeros_like(logits, tf.bool)
    for _ in range(k):
        best = tf.equal(left, tf.reduce_max(left, axis=-1, keepdims=True))
        first = tf.reduce_min(tf.where(best, numbers, float(experts)), axis=-1, keepdims=True)
        one = tf.equal(numbers, first)
        chosen, left = chosen | one, tf.where(one, tf.constant(-math.inf, left.dtype), left)
    return chosen


def group_by_expert(gates: tf.Tensor) -> ExpertGroups:
    """Group the samples by the experts that any of their tasks has chosen.

    No sample is left out, however many have chosen one expert. With k experts a task there are at most
    ``min(experts, tasks * k)`` pairs for each sample.

    Args:
      gates: (samples, tasks, experts), 0 where a task hasn't chosen the expert.

    Example:
      >>> groups = group_by_expert(tf.constant([[[0.0, 1.0]], [[0.5, 0.5]], [[0.0, 1.0]]]))
      >>> groups.samples.numpy().tolist(), groups.sizes.numpy().tolist()
      ([1, 0, 1, 2], [1, 3])
      >>> groups.gates.numpy().tolist()
      [[0.5], [1.0], [0.5], [1.0]]
    """
    of_expert = tf.transpose(gates, [2, 0, 1])
    chosen = tf.reduce_any(tf.not_equal(of_expert, 0), axis=2)  # a gate that is NaN isn't lost
    pairs = tf.where(chosen)  # in the order of experts
    sizes = tf.reduce_sum(tf.cast(chosen, tf.int64), axis=1)
    return ExpertGroups(pairs[:, 1], sizes, tf.gather_nd(of_expert, pairs))


def mix_chosen(x: tf.Tensor, gates: tf.Tensor, kernels: Sequence[Any], biases: Sequence[Any]) -> tf.Tensor:
    r"""Mix the outputs of the chosen experts for each task, and compute no others.

    .. math::
       y_{tn} = \sum_{e:\, (e, n) \in P} g_{nte}\, f_e(x_n)

    P are the pairs of `group_by_expert`. The samples of each pair are copied once, an expert's layers are
    products of exactly its own samples, and an output serves all tasks that have chosen the expert. So the
    result is that of all experts, up to the rounding of sums, in values and in gradients of any order.

    Args:
      x: (samples, dim).
      gates: (samples, tasks, experts), 0 where a task hasn't chosen the expert.
      kernels: For each layer (experts, in, out).
      biases: For each layer (experts, out).

    Returns:
      (tasks, samples, last of out).

    Example:
      >>> gates = tf.constant([[[0.0, 1.0]], [[0.5, 0.5]]])
      >>> kernel, bias = tf.constant([[[1.0]], [[10.0]]]), tf.zeros([2, 1])
      >>> mix_chosen(tf.constant([[1.0], [2.0]]), gates, [kernel], [bias]).numpy().tolist()
      [[[10.0], [11.0]]]
    """
    samples, sizes, weights = group_by_expert(gates)
    tasks, experts = gates.shape[1:]
    outputs = tf.split(jagged.take(x, samples), sizes, num=experts)
    for kernel, bias in zip(kernels, biases, strict=True):
        of_expert = zip(outputs, tf.unstack(kernel), tf.unstack(bias), strict=True)
        outputs = [
            tf.nn.relu(tf.matmul(rows, its_kernel) + its_bias) for rows, its_kernel, its_bias in of_expert
        ]
    mixed = weights[:, :, tf.newaxis] * tf.concat(outputs, axis=0)[:, tf.newaxis]
    # Sums of half precision in float32, as a matrix product has them.
    wide = tf.cast(mixed, tf.float32) if mixed.dtype.size < 4 else mixed
    sums = tf.math.unsorted_segment_sum(wide, samples, tf.shape(x, tf.int64)[0])
    return tf.transpose(tf.cast(tf.ensure_shape(sums, [None, tasks, mixed.shape[2]]), x.dtype), [1, 0, 2])

"""Reduces losses of samples to losses of tasks, and these to one loss, without any effect of padding."""

from __future__ import annotations

from typing import Literal

import tensorflow as tf

from gmeta.core.errors import ConfigError

Reduction = Literal["task", "sample"]


def task_means(losses: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    r"""Compute each task's mean loss over its real samples, :math:`\sum_s m_{ts} l_{ts} / \sum_s m_{ts}`.

    Args:
      losses: (tasks, samples), padded. Values in the padding have no effect, not even NaN.
      mask: (tasks, samples): 1 for a real sample, 0 for padding.

    Returns:
      (tasks,). A task without samples has loss 0 and so no gradient.
    """
    mask = tf.cast(mask, losses.dtype)
    total = tf.reduce_sum(tf.where(mask > 0, losses * mask, 0), axis=-1)
    return tf.math.divide_no_nan(total, tf.reduce_sum(mask, axis=-1))


def reduce_tasks(losses: tf.Tensor, mask: tf.Tensor, reduction: Reduction = "sample") -> tf.Tensor:
    """Reduce many tasks' query losses to one loss.

    Args:
      losses: (tasks, samples), padded.
      mask: (tasks, samples): 1 for a real sample, 0 for padding.
      reduction: ``"sample"`` is the mean over all real samples of all tasks, so that a task counts by
        its size; ``"task"`` is the mean over tasks of each task's mean, so that all tasks count alike.

    Returns:
      A scalar; 0 if there is no real sample at all.

    Raises:
      ConfigError: ``reduction`` has another value.
    """
    mask = tf.cast(mask, losses.dtype)
    if reduction == "task":
        real = tf.cast(tf.reduce_any(mask > 0, axis=-1), losses.dtype)
        return tf.math.divide_no_nan(tf.reduce_sum(task_means(losses, mask)), tf.reduce_sum(real))
    if reduction == "sample":
        return tf.math.divide_no_nan(tf.reduce_sum(tf.where(mask > 0, losses * mask, 0)), tf.reduce_sum(mask))
    raise ConfigError(f"reduction must be 'task' or 'sample', got {reduction!r}")

"""Clipping of inner gradients, task by task."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf


def clip(
    gradients: Mapping[str, tf.Tensor],
    owners: Mapping[str, tf.Tensor],
    tasks: tf.Tensor | int,
    norm: float | None = None,
    value: float | None = None,
) -> dict[str, tf.Tensor]:
    r"""Clip each task's gradient: first its numbers to [-value, value], then its norm to ``norm``.

    .. math:: g_t \leftarrow g_t \min(1, c / \lVert g_t \rVert_2)

    with the norm over all parameters of task t together. Clipping is differentiable except exactly at a
    limit; it is differentiable at a gradient of zero too.

    Args:
      gradients: Name -> (tasks, ...), or (rows, ...) for those in ``owners``.
      owners: Name -> (rows,) the task of each row.
      tasks: Number of tasks.
      norm: c. None: no limit on the norm.
      value: Maximum magnitude of each number. None: no limit.
    """
    clipped = dict(gradients)
    if value is not None:
        clipped = {name: tf.clip_by_value(each, -value, value) for name, each in clipped.items()}
    if norm is None:
        return clipped
    squares = tf.add_n([_task_squares(each, owners.get(name), tasks) for name, each in clipped.items()])
    limit = tf.constant(norm**2, squares.dtype)
    long = squares > limit
    # The factor is exactly 1 for a gradient within the limit.
    factor = tf.where(long, norm * tf.math.rsqrt(tf.where(long, squares, limit)), 1)
    return {name: _times(each, factor, owners.get(name)) for name, each in clipped.items()}


def _task_squares(gradient: tf.Tensor, owner: tf.Tensor | None, tasks: tf.Tensor | int) -> tf.Tensor:
    squares = tf.reduce_sum(gradient**2, axis=list(range(1, gradient.shape.rank)))
    return squares if owner is None else tf.math.unsorted_segment_sum(squares, owner, tasks)


def _times(gradient: tf.Tensor, factor: tf.Tensor, owner: tf.Tensor | None) -> tf.Tensor:
    factor = factor if owner is None else tf.gather(factor, owner)
    return gradient * tf.reshape(factor, [-1, *[1] * (gradient.shape.rank - 1)])

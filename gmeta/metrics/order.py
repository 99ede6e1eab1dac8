"""Where a task's samples stand in the order of its predictions, ties included."""

from __future__ import annotations

import tensorflow as tf


def below(predictions: tf.Tensor, real: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """How many samples of the same task are predicted lower, and how many not higher.

    By one sort and two binary searches a task, so in O(Q log Q) where comparing all pairs would take Q².

    Args:
      predictions: (T, Q) finite floats.
      real: (T, Q) bool: False in the padding, which is counted nowhere.

    Returns:
      (T, Q) int32: real samples with a lower prediction; (T, Q) int32: those and the ones with the same
      prediction, the sample itself included. In the padding they mean nothing.

    Example:
      >>> lower, not_higher = below(tf.constant([[3.0, 1.0, 3.0]]), tf.constant([[True, True, True]]))
      >>> lower.numpy().tolist(), not_higher.numpy().tolist()
      ([[1, 0, 1]], [[3, 1, 3]])
    """
    ascending = tf.sort(tf.where(real, predictions, float("inf")), axis=1)  # so that padding comes last
    return (
        tf.searchsorted(ascending, predictions, side="left"),
        tf.searchsorted(ascending, predictions, side="right"),
    )

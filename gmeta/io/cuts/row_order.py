"""Orders of the rows inside each task, computed for all tasks of an element at once.

The order within a task depends on that task alone. The other tasks of the element have no influence, and so
the ranks and the batch size have none either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_ODD = 0x9E3779B97F4A7C15


def order_marked_last(marked: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """Order rows by task, and within each task those that aren't ``marked`` (rows,) before those that are."""
    task = tf.repeat(tf.range(tf.size(lengths, tf.int64)), lengths)
    return tf.cast(tf.argsort(2 * task + tf.cast(marked, tf.int64), stable=True), tf.int64)


def draw_order(element: dict[str, Any], lengths: tf.Tensor, seeds: Sequence[Any]) -> tf.Tensor:
    """Order rows by task, and within each task in an order drawn for (``seeds``, task, batch).

    Rows of a task are sorted by their hashes.

    Args:
      element: An element of `gmeta.io.groups`.
      lengths: (T,) int64 rows of each task.
      seeds: int64 scalars.

    Returns:
      (rows,) int64.
    """
    group = tf.repeat(tf.range(tf.size(lengths)), lengths)
    row = tf.range(tf.size(group, tf.int64)) - tf.gather(element["row_splits"], group)
    state = tf.zeros_like(row, tf.uint64)
    for value in seeds:
        state = _mix(tf.bitwise.bitwise_xor(state, tf.bitcast(tf.zeros_like(row) + value, tf.uint64)))
    for values in (tf.gather(element["task"], group), tf.gather(element["batch_id"], group), row):
        state = _mix(tf.bitwise.bitwise_xor(state, tf.bitcast(values, tf.uint64)))
    by_hash = tf.argsort(tf.bitcast(state, tf.int64), stable=True)
    return tf.cast(tf.gather(by_hash, tf.argsort(tf.gather(group, by_hash), stable=True)), tf.int64)


def _mix(x: tf.Tensor) -> tf.Tensor:
    """Apply splitmix64's finaliser."""
    x = x + tf.constant(_ODD, tf.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = _xor_shift(x, shift) * tf.constant(factor, tf.uint64)
    return _xor_shift(x, 31)


def _xor_shift(x: tf.Tensor, places: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(places, tf.uint64)))

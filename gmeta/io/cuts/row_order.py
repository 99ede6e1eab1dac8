"""Orders of the rows inside each task, computed for all tasks of an element at once.

The order within a task depends on that task alone. The other tasks of the element have no influence, and so
the ranks and the batch size have none either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.data.splitmix import splitmix64_tensor


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
    of_rows = (tf.gather(element["task"], group), tf.gather(element["batch_id"], group), row)
    state = tf.zeros_like(row, tf.uint64)
    for values in (*(tf.zeros_like(row) + seed for seed in seeds), *of_rows):
        state = splitmix64_tensor(tf.bitwise.bitwise_xor(state, tf.bitcast(values, tf.uint64)))
    by_hash = tf.argsort(tf.bitcast(state, tf.int64), stable=True)
    return tf.cast(tf.gather(by_hash, tf.argsort(tf.gather(group, by_hash), stable=True)), tf.int64)

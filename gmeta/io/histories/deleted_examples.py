"""Examples of users whose events were deleted: they are left out, and counted."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from gmeta.io.reader_stats import ReaderStats


def leave_out_deleted(
    batch: dict[str, Any], deleted: tf.Tensor, rows: tf.Tensor, stats: ReaderStats | None, store: str
) -> dict[str, Any]:
    """Return the batch without the examples of deleted users.

    Args:
      batch: A batch of B sequences.
      deleted: (B,) bool: whose events were deleted.
      rows: (B,) int64: the records of each example.
      stats: The counters, which count these examples as ``"deleted"``.
      store: The store, for messages.
    """

    def the_others() -> dict[str, Any]:
        dependencies = []
        if stats is not None:
            users = tf.strings.as_string(tf.boolean_mask(batch["task"], deleted))
            lines = tf.strings.join([f"gmeta: {store}: events of user ", users, " were deleted"])
            count = functools.partial(stats.leave_out, "deleted")
            dependencies = [tf.numpy_function(count, [tf.boolean_mask(rows, deleted), lines], tf.int64)]
        with tf.control_dependencies(dependencies):
            kept = tf.where(~deleted)[:, 0]
        return tf.nest.map_structure(lambda part: tf.gather(part, kept), batch)

    return tf.cond(tf.reduce_any(deleted), the_others, lambda: batch)

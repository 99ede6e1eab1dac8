"""Statistics of a `gmeta.ops.HashTable`."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


class Statistics(NamedTuple):
    """Statistics as scalar int64 tensors (``load_factor``: float64). Counts start when the table is made.

    Attributes:
      size: Keys in the table.
      capacity: Slots of the key index.
      load_factor: ``size / capacity``; an index grows at 0.75, a shard at a time: by two fifths in host
        memory, to twice its size on a GPU.
      bytes: Memory of index, records, and what admission remembers.
      hits: Keys that were looked up and found.
      misses: Keys that were looked up and absent.
      inserts: Rows that lookups made.
      removes: Rows that `HashTable.remove` removed.
      updates: Rows that a gradient updated.
      ignored: Gradients of absent keys, which had nothing to update.
      rejects: Misses of inserting lookups that admission turned away.
      evictions: Rows that eviction removed.
      half_rows: Rows that are now in half precision (`gmeta.policies.TwoPrecisions`); the others are in
        float32.
      disk_rows: Rows that are now on a drive (`gmeta.policies.Tiers`).
      disk_bytes: Bytes of the files on the drive.
      brought: Rows that moved to the faster tier: from the drive to memory, or on a GPU from host memory to
        the GPU's.
      spilled: Rows that moved to the slower tier.
      host_rows: Rows of a table on a GPU that are now in host memory.
      crowded: Rows that a prefetch found no room for in the GPU's memory.
    """

    size: tf.Tensor
    capacity: tf.Tensor
    load_factor: tf.Tensor
    bytes: tf.Tensor
    hits: tf.Tensor
    misses: tf.Tensor
    inserts: tf.Tensor
    removes: tf.Tensor
    updates: tf.Tensor
    ignored: tf.Tensor
    rejects: tf.Tensor
    evictions: tf.Tensor
    half_rows: tf.Tensor
    disk_rows: tf.Tensor
    disk_bytes: tf.Tensor
    brought: tf.Tensor
    spilled: tf.Tensor
    host_rows: tf.Tensor
    crowded: tf.Tensor

"""What a `gmeta.ops.HashTable` gives out and takes in as a whole: its records."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


class Records(NamedTuple):
    """Whole records of a table, in no particular order.

    Attributes:
      keys: (n,) int64, distinct.
      rows: (n, dim) float32, the weights.
      slots: (n, slot_floats) float32, what the optimizer keeps: its ``slots``, one after another.
      frequency: (n,) int64, how many inserting lookups have read the row.
      last_step: (n,) int64, the table's step when the row was last updated or read by an inserting lookup.
      step: () int64, the table's step.
    """

    keys: tf.Tensor
    rows: tf.Tensor
    slots: tf.Tensor
    frequency: tf.Tensor
    last_step: tf.Tensor
    step: tf.Tensor


class ShardRecords(NamedTuple):
    """Records of a range of logical shards, sorted by logical shard and then by key.

    A key's logical shard is the top ten bits of its MurmurHash3, so there are 1024, in any process.

    Attributes:
      keys: (n,) int64, distinct.
      rows: (n, dim) float32, as in `Records`.
      slots: (n, slot_floats) float32, as in `Records`.
      frequency: (n,) int64, as in `Records`.
      last_step: (n,) int64, as in `Records`.
      row_splits: (shards + 1,) int64: shard number i of the range has records ``row_splits[i]`` up to
        ``row_splits[i + 1]``.
      removed: (r,) int64, the keys that the journal has noted as removed from these shards, sorted likewise,
        each once. Some may be back, and then stand in ``keys`` too: removals come first.
      removed_splits: (shards + 1,) int64, as ``row_splits``.
      live: (shards,) int64, how many rows each shard has, exported or not.
      step: () int64, the table's step.
      journal_whole: () bool, whether ``removed`` has every removal since `HashTable.start_journal`.
    """

    keys: tf.Tensor
    rows: tf.Tensor
    slots: tf.Tensor
    frequency: tf.Tensor
    last_step: tf.Tensor
    row_splits: tf.Tensor
    removed: tf.Tensor
    removed_splits: tf.Tensor
    live: tf.Tensor
    step: tf.Tensor
    journal_whole: tf.Tensor

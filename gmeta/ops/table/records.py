"""The data that a `gmeta.ops.HashTable` exports and imports: its records and its admission state."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


class Records(NamedTuple):
    """Whole records of a table, in no particular order.

    Attributes:
      keys: (n,) int64, distinct.
      rows: (n, dim) float32, the weights.
      slots: (n, slot_floats) float32, the state of the optimizer: its ``slots``, one after another.
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
      removed: (r,) int64, the keys that the journal has noted as removed from these shards, each once, sorted
        in the same way. A key that has come back is in ``keys`` too: apply removals first.
      removed_splits: (shards + 1,) int64, as ``row_splits``.
      live: (shards,) int64, how many rows each shard has, exported or not.
      step: () int64, the table's step.
      journal_whole: () bool, whether ``removed`` has every removal since `HashTable.start_journal`.
      waiting: (w,) int64, the keys that an exact `gmeta.policies.CountAdmission` has turned away, sorted in
        the same way.
      waiting_counts: (w,) int64, how often each was turned away.
      waiting_splits: (shards + 1,) int64, as ``row_splits``.
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
    waiting: tf.Tensor
    waiting_counts: tf.Tensor
    waiting_splits: tf.Tensor


class AdmissionState(NamedTuple):
    """State of a table's admission: what it remembers of ids without a row; all empty if nothing.

    Attributes:
      keys: (c,) int64, the ids that an exact `gmeta.policies.CountAdmission` counts, in no particular order.
      counts: (c,) int64, how often each was turned away.
      filter: (b,) uint8, the counters of the admission's `gmeta.policies.Bloom` filter.
    """

    keys: tf.Tensor
    counts: tf.Tensor
    filter: tf.Tensor


class FilterShards(NamedTuple):
    """Bloom filters (`gmeta.policies.Bloom`) of some of a table's own shards, one for each shard's keys.

    A table has ``count`` shards of its own, a power of two up to 64 (see `gmeta.policies.Eviction`). Shard
    number i holds the logical shards ``1024 // count * i`` up to ``1024 // count * (i + 1)``.

    Attributes:
      counters: (shards, m) uint8; m is 0 in a table without such a filter.
      count: () int64, how many shards the table has.
    """

    counters: tf.Tensor
    count: tf.Tensor

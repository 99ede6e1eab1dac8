"""Packs keys into an exchange's messages and unpacks them, for tables on a GPU.

The native ops work in host memory, so they would copy keys from the GPU and results back to it. The functions
here deduplicate ids on the GPU, or only order them by owner, and build and split the messages there. The
messages are the same (``ops/exchange/key_exchange.h``). The host learns only how many keys each rank owns,
which it needs to split a message.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from gmeta.ops.device import DEVICE_NAMES, Place
from gmeta.ops.exchange.messages import OwnedKeys, RoutedKeys
from gmeta.ops.keys.distinct import order_by_owner, unique, unique_by_owner


def route(
    keys: Sequence[tf.Tensor],
    *,
    note: tf.Tensor,
    world_size: int,
    dedup: bool = True,
    device: Place = "gpu",
) -> RoutedKeys:
    """Route keys as `gmeta.ops.route_keys` does; an owner's keys are in the order of first appearance.

    Args:
      keys: For each table (n_t,) int64.
      note: (m,) int64, in host memory.
      world_size: How many ranks there are.
      dedup: Whether to deduplicate keys. If not, an owner's keys are in the order in which they came.
      device: Where to compute.
    """
    order = unique_by_owner if dedup else order_by_owner
    found = [order(each, world_size=world_size, device=device) for each in keys]
    with tf.device("CPU:0"):
        counts = tf.stack([each.counts for each in found], axis=1)
        notes = tf.tile(note[tf.newaxis], [world_size, 1])
        heads = tf.unstack(tf.concat([notes, tf.cast(counts, tf.int64)], axis=1))
        splits = tf.size(note) + len(keys) + tf.reduce_sum(counts, axis=1)
    with tf.device(DEVICE_NAMES[device]):
        pieces = [tf.split(each.keys, each.counts, num=world_size) for each in found]
        parts = [part for rank, head in enumerate(heads) for part in (head, *(of[rank] for of in pieces))]
        message = tf.concat(parts, axis=0)
    distinct, inverse = (tuple(getattr(each, name) for each in found) for name in ("keys", "inverse"))
    return RoutedKeys(message, splits, distinct, counts, inverse)


def receive(
    message: tf.Tensor,
    splits: tf.Tensor,
    *,
    tables: int,
    note_size: int = 0,
    dedup: bool = True,
    device: Place = "gpu",
) -> OwnedKeys:
    """Receive keys as `gmeta.ops.receive_keys` does; distinct keys are in the order of first appearance.

    Args:
      message: int64, the messages of rank 0, 1, …, one after another.
      splits: (W,) int32, their lengths.
      tables: How many tables there are, T.
      note_size: How many numbers a note has, m.
      dedup: Whether to deduplicate keys. If not, all are returned, in wire order.
      device: Where to compute.

    Raises:
      tf.errors.InvalidArgumentError: A message doesn't have the form for ``tables`` tables and a note of
        ``note_size`` numbers.
    """
    ranks, head_size = splits.shape[0], note_size + tables
    with tf.device("CPU:0"):
        splits = tf.identity(splits)
        starts = tf.cumsum(splits, exclusive=True)
        places = starts[:, tf.newaxis] + tf.range(head_size)
    with tf.device(DEVICE_NAMES[device]):
        heads = tf.gather(message, places)
    with tf.device("CPU:0"):
        counts = tf.cast(heads[:, note_size:], tf.int32)
        sizes = tf.concat([tf.fill([ranks, 1], head_size), counts], axis=1)
        whole = tf.debugging.assert_equal(
            tf.reduce_sum(sizes, axis=1),
            splits,
            f"receive: a rank's message isn't one of {tables} tables and a note of {note_size} numbers: do "
            "all ranks look up the same tables in the same order?",
        )
        with tf.control_dependencies([] if whole is None else [whole]):
            sizes = tf.reshape(sizes, [-1])
            notes = tf.identity(heads[:, :note_size])
    with tf.device(DEVICE_NAMES[device]):
        pieces = tf.split(message, sizes, num=ranks * (1 + tables))
        wire_keys = tuple(tf.concat(pieces[1 + table :: 1 + tables], axis=0) for table in range(tables))
        found = [unique(each, device=device) if dedup else _all_places(each) for each in wire_keys]
    keys, positions = zip(*found, strict=True)
    return OwnedKeys(keys, positions, counts, notes, wire_keys)


def _all_places(keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return all keys, and each one's place."""
    # tf.range of int64: the kernel for int32 works in host memory.
    return keys, tf.cast(tf.range(tf.size(keys, tf.int64)), tf.int32)

"""Packs keys into the messages of an all-to-all, and unpacks them, for all tables of a step together.

``ops/exchange/key_exchange.h`` describes how it works and why it is fast. On a GPU, TensorFlow ops build the
same messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.core.shares import LOGICAL_SHARDS
from gmeta.ops.device import DEVICE_NAMES, DeviceKind, keys_vector, split_numbers
from gmeta.ops.distinct import order_by_owner, unique, unique_by_owner

# Contents of a step's all-to-alls: keys are sent to their owners, rows are returned, gradients go to the
# owners.


class RoutedKeys(NamedTuple):
    """Keys that a rank requests from the others, for T tables and W ranks.

    Attributes:
      message: int64, the concatenated messages to rank 0, 1, …, ready to be exchanged.
      splits: (W,) int32, their lengths.
      keys: For each table, (u_t,) int64: its distinct keys, by owner. The keys of one owner are in the order
        of their first appearance; many keys are first divided into parts by their hash, and have that order
        within each part. This is the wire order, in which `unpack_rows` returns their rows.
      counts: (W, T) int32, how many of a table's keys a rank owns.
      inverse: For each table, (n_t,) int32: ``tf.gather(keys[t], inverse[t])`` restores the input keys.
    """

    message: tf.Tensor
    splits: tf.Tensor
    keys: tuple[tf.Tensor, ...]
    counts: tf.Tensor
    inverse: tuple[tf.Tensor, ...]


class OwnedKeys(NamedTuple):
    """Keys that ranks request from this rank, for T tables, W ranks and notes of m numbers.

    Attributes:
      keys: For each table, (v_t,) int64: the distinct received keys, in an order that depends only on them.
      positions: For each table (w_t,) int32: ``tf.gather(keys[t], positions[t])`` are ``wire_keys[t]``.
      counts: (W, T) int32, how many keys of a table a rank sent.
      notes: (W, m) int64, the note of each rank.
      wire_keys: For each table (w_t,) int64: the received keys, by sender, then in the order of sending. Rows
        are returned, and gradients arrive, in this wire order.
    """

    keys: tuple[tf.Tensor, ...]
    positions: tuple[tf.Tensor, ...]
    counts: tf.Tensor
    notes: tf.Tensor
    wire_keys: tuple[tf.Tensor, ...]


class PackedRows(NamedTuple):
    """Rows to be exchanged.

    Attributes:
      buffer: The rows for rank 0, 1, …, in the wire's dtype; for each rank, the rows of table 0, 1, …
      splits: (W,) int32, how many numbers each rank receives, including scales.
    """

    buffer: tf.Tensor
    splits: tf.Tensor


# Packs keys into an exchange's messages and unpacks them, for tables on a GPU.
#
# The native ops run in host memory, so they would copy keys from the GPU and results back to it. The
# functions here deduplicate ids on the GPU, or only order them by owner, and build and split the messages
# there. The messages are the same (``ops/exchange/key_exchange.h``). Only the number of keys that each rank
# owns is copied to the host, which needs it to split a message.


def route(
    keys: Sequence[tf.Tensor],
    *,
    note: tf.Tensor,
    world_size: int,
    dedup: bool = True,
    device: DeviceKind = "gpu",
) -> RoutedKeys:
    """Route keys like `route_keys`; an owner's keys are in the order of first appearance.

    Args:
      keys: For each table (n_t,) int64.
      note: (m,) int64, in host memory.
      world_size: The number of ranks.
      dedup: Whether to deduplicate keys. If not, an owner's keys keep their input order.
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
        pieces = [split_numbers(each.keys, each.counts, world_size, device=device) for each in found]
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
    device: DeviceKind = "gpu",
) -> OwnedKeys:
    """Receive keys like `receive_keys`; distinct keys are in the order of first appearance.

    Args:
      message: int64, the messages of rank 0, 1, …, one after another.
      splits: (W,) int32, their lengths.
      tables: T, the number of tables.
      note_size: m, the size of a note.
      dedup: Whether to deduplicate keys. If not, all keys are returned in wire order.
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
        pieces = split_numbers(message, sizes, ranks * (1 + tables), device=device)
        wire_keys = tuple(tf.concat(pieces[1 + table :: 1 + tables], axis=0) for table in range(tables))
        found = [unique(each, device=device) if dedup else _all_places(each) for each in wire_keys]
    keys, positions = zip(*found, strict=True)
    return OwnedKeys(keys, positions, counts, notes, wire_keys)


def _all_places(keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return all keys, and each one's place."""
    # tf.range of int64: the int32 kernel runs in host memory.
    return keys, tf.cast(tf.range(tf.size(keys, tf.int64)), tf.int32)


_native = load_op_library("ops")
for _name in ("RouteKeys", "ReceiveKeys"):
    tf.no_gradient(f"Gmeta{_name}")


def route_keys(
    keys: Sequence[Any], *, note: Any = (), world_size: int, dedup: bool = True, device: DeviceKind = "cpu"
) -> RoutedKeys:
    """Collect each table's distinct keys by owner, in one message per rank: stage 1 of deduplication.

    The owner of a key is the rank ``s * world_size // 1024`` of its logical shard s, the top ten bits of its
    MurmurHash3, as in `gmeta.core.shares.owned_shards`. The message to a rank is::

        note | how many keys of each table | keys of table 0 | keys of table 1 | ...

    The result is deterministic: it depends only on the arguments, not on the number of threads. All tables
    and owners are processed in parallel. Pass the support and query of all tasks of a step in one call.

    Args:
      keys: For each table, a vector of integers, which may be empty; any int64 is a key. Every rank passes
        the same tables in the same order. At most 2^31 - 1 keys in total.
      note: (m,) integers about this rank that every rank receives, such as the number of samples in its
        batch.
      world_size: The number of ranks, from 1 to 1024.
      dedup: Whether to deduplicate keys. False only orders all ``n_t`` keys by owner, to measure what
        deduplication saves.
      device: Where to deduplicate keys and build messages. Use ``"gpu"`` for keys and tables on a GPU; an
        owner's keys of a table are then in the order of their first appearance.

    Returns:
      A `RoutedKeys`.

    Raises:
      ConfigError: There are no tables, keys aren't vectors of integers, or ``world_size`` is out of range.
      tf.errors.InvalidArgumentError: There are more keys than can be sent.

    Example:
      >>> routed = route_keys([[1, 0, 1], [1]], note=[9], world_size=2)  # rank 0 owns key 0, rank 1 key 1
      >>> routed.message.numpy(), routed.splits.numpy()
      (array([9, 1, 0, 0, 9, 1, 1, 1, 1]), array([4, 5], dtype=int32))
      >>> [keys.numpy().tolist() for keys in routed.keys]
      [[0, 1], [1]]
      >>> [inverse.numpy().tolist() for inverse in routed.inverse]
      [[1, 0, 1], [0]]

    References:
      MTGenRec, section 3.3; G-Meta, algorithm 1, line 5.
    """
    if not 1 <= world_size <= LOGICAL_SHARDS:
        raise ConfigError(f"route_keys: world_size must lie in [1, {LOGICAL_SHARDS}], got {world_size}")
    batches = [keys_vector(batch, f"route_keys: table {table}") for table, batch in enumerate(keys)]
    if not batches:
        raise ConfigError("route_keys: at least one table is needed")
    note = keys_vector(note, "route_keys: note")
    if device == "gpu":
        return route(batches, note=note, world_size=world_size, dedup=dedup)
    message, splits, found, counts, inverse = _native.gmeta_route_keys(
        batches=batches, note=note, world_size=world_size, dedup=dedup
    )
    return RoutedKeys(message, splits, tuple(found), counts, tuple(inverse))


def receive_keys(
    message: Any,
    splits: Any,
    *,
    tables: int,
    note_size: int = 0,
    dedup: bool = True,
    device: DeviceKind = "cpu",
) -> OwnedKeys:
    """Collect the distinct keys that the ranks' messages request: stage 2 of deduplication.

    Different ranks request the same popular keys. Their owner reads each row once, and sends it once per
    request: ``pack_rows(rows of keys, positions, counts)``. Like `route_keys`, it is deterministic and
    parallel.

    Args:
      message: int64, the messages of rank 0, 1, …, one after another, each made by `route_keys`.
      splits: (W,) int32, their lengths.
      tables: T, the number of tables.
      note_size: m, the size of a note.
      dedup: Whether to deduplicate keys. False returns all received keys, in wire order, for measurements.
      device: As in `route_keys`; on a GPU, the distinct keys are in the order of their first appearance.

    Returns:
      An `OwnedKeys`.

    Raises:
      ConfigError: ``tables`` or ``note_size`` is out of range.
      tf.errors.InvalidArgumentError: A message doesn't have the form for ``tables`` tables and a note of
        ``note_size`` numbers. The error names the rank that sent it.

    Example:
      >>> owned = receive_keys([2, 1, 1, 3, 3, 1, 2, 0, 0, 3], [5, 5], tables=2, note_size=1)
      >>> [keys.numpy().tolist() for keys in owned.keys]
      [[3, 0], [3]]
      >>> [positions.numpy().tolist() for positions in owned.positions]
      [[0, 1, 0], [0]]
      >>> owned.notes.numpy().tolist()
      [[2], [1]]

    References:
      MTGenRec, section 3.3.
    """
    if tables < 1 or note_size < 0:
        raise ConfigError(
            f"receive_keys: at least one table and a note_size of at least 0 are needed, "
            f"got {tables} and {note_size}"
        )
    message = keys_vector(message, "receive_keys: message")
    splits = tf.convert_to_tensor(splits, tf.int32)
    if device == "gpu":
        return receive(message, splits, tables=tables, note_size=note_size, dedup=dedup)
    keys, positions, counts, notes, wire_keys = _native.gmeta_receive_keys(
        message=message,
        splits=splits,
        tables=tables,
        note_size=note_size,
        dedup=dedup,
    )
    return OwnedKeys(tuple(keys), tuple(positions), counts, notes, tuple(wire_keys))

"""Packs keys into the messages of an all-to-all and unpacks them, for all tables of a step together.

``ops/exchange/key_exchange.h`` describes how it works and why it is fast. On a GPU
`gmeta.ops.exchange.gpu_keys` makes the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.logical_shards import LOGICAL_SHARDS
from gmeta.core.native import load_op_library
from gmeta.ops.device import Place
from gmeta.ops.exchange import gpu_keys
from gmeta.ops.exchange.messages import OwnedKeys, RoutedKeys
from gmeta.ops.inputs import keys_vector

_native = load_op_library("ops")
for _name in ("RouteKeys", "ReceiveKeys"):
    tf.no_gradient(f"Gmeta{_name}")


def route_keys(
    keys: Sequence[Any], *, note: Any = (), world_size: int, dedup: bool = True, device: Place = "cpu"
) -> RoutedKeys:
    """Collect each table's distinct keys by owner, as one message to each rank: stage 1 of deduplication.

    The owner of a key is the rank ``s * world_size // 1024`` of its logical shard s, the top ten bits of its
    MurmurHash3, as in `gmeta.core.logical_shards.owned_shards`. The message to a rank is::

        note | how many keys of each table | keys of table 0 | keys of table 1 | ...

    The result is deterministic: it depends on the arguments alone, whatever the number of threads. All tables
    and owners are processed in parallel. Pass the support and query of all tasks of a step in one call.

    Args:
      keys: For each table a vector of integers, which may be empty; any int64 is a key. Every rank passes the
        same tables in the same order. At most 2^31 - 1 keys in all.
      note: (m,) integers about this rank that every rank receives, such as the number of samples in its
        batch.
      world_size: How many ranks there are, 1 up to 1024.
      dedup: Whether to deduplicate keys. False only orders all ``n_t`` keys by owner, to measure what
        deduplication saves.
      device: Where keys are deduplicated and messages built. Use ``"gpu"`` for keys and tables on a GPU; an
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
        return gpu_keys.route(batches, note=note, world_size=world_size, dedup=dedup)
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
    device: Place = "cpu",
) -> OwnedKeys:
    """Collect the distinct keys that the ranks' messages request: stage 2 of deduplication.

    Different ranks request the same popular keys. Their owner reads each row once, and sends it once per
    request: ``pack_rows(rows of keys, positions, counts)``. It is deterministic and parallel, as is
    `route_keys`.

    Args:
      message: int64, the messages of rank 0, 1, …, one after another, each made by `route_keys`.
      splits: (W,) int32, their lengths.
      tables: How many tables there are, T.
      note_size: How many numbers a note has, m.
      dedup: Whether to deduplicate keys. False returns all received keys, in wire order, for measurements.
      device: As in `route_keys`; on a GPU the distinct keys are in the order of their first appearance.

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
        return gpu_keys.receive(message, splits, tables=tables, note_size=note_size, dedup=dedup)
    keys, positions, counts, notes, wire_keys = _native.gmeta_receive_keys(
        message=message,
        splits=splits,
        tables=tables,
        note_size=note_size,
        dedup=dedup,
    )
    return OwnedKeys(tuple(keys), tuple(positions), counts, notes, tuple(wire_keys))

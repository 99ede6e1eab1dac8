"""Fetches a lookup's rows from the ranks that own them and sends the gradients back: a step in pieces.

On N ranks each rank owns the keys of its logical shards (`gmeta.core.shares`) and no others, so a
lookup needs several exchanges (G-Meta, algorithm 1; MTGenRec, section 3.3)::

    send_keys           each rank's distinct keys go to their owners               one exchange
    fetch_rows          an owner reads every row that ranks request, once          no exchange
    exchange_values     rows go to the ranks that requested them                   one exchange
      ... the model and its tape run on the rows as if they had been there ...
    exchange_gradients  gradients go the way that the keys went                    one exchange
    update              an owner sums those of equal keys, in the order of ranks   no exchange

In groups of ranks, the exchanges are among the ranks of a group, and `gmeta.layers.exchange.groups` makes two
more.

All tables of a lookup travel together, whatever their number and widths; so do the gradients of all lookups
of a step. The handle `SentKeys` carries what a later piece needs from an earlier one. It is a plain tuple of
tensors, so a scheduler may run pieces of one batch beside those of another.

Every rank must call each piece equally often; a rank without keys calls it with none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from gmeta.core import collectives
from gmeta.layers.exchange.groups import (
    CameGradient,
    JoinedKeys,
    OwnedGradient,
    by_key,
    join_gradients,
    join_keys,
    present,
)
from gmeta.ops.device import DEVICE_NAMES, DeviceKind, compute_place
from gmeta.ops.key_messages import OwnedKeys, RoutedKeys, receive_keys, route_keys
from gmeta.ops.row_buffers import count_numbers, pack_rows, row_place, unpack_rows
from gmeta.ops.table.hash_table import HashTable


class SentKeys(NamedTuple):
    """Keys that have reached their owners, seen from both ends.

    Attributes:
      routed: The keys that this rank requested. ``routed.keys[t]`` are table t's distinct keys by owner, and
        ``routed.inverse[t]`` gives the index among them of each input key.
      owned: The keys that the ranks requested from this rank as their owner. ``owned.notes[r, 0]`` is the
        number of samples in rank r's batch. In groups of ranks, ``owned.keys`` are those of all groups.
      joined: What the groups have looked up; None if there is only one.
    """

    routed: RoutedKeys
    owned: OwnedKeys
    joined: JoinedKeys | None = None


def send_keys(
    keys: Sequence[tf.Tensor],
    *,
    samples: tf.Tensor | int = 0,
    dedup: bool = True,
    device: DeviceKind = "cpu",
    name: str = "lookup",
) -> SentKeys:
    """Send this rank's keys to their owners, which forward them to the owners in other groups.

    Args:
      keys: For each table its keys, (n,) int64; a key may occur any number of times.
      samples: The number of samples in this rank's batch; every rank learns it.
      dedup: Whether a key travels and is read only once. If not, it travels as often as it occurs, which
        serves to measure what deduplication saves.
      device: Where the tables are and where keys are deduplicated.
      name: Name of the collective; the same on all ranks.
    """
    sent = send_in_group(keys, samples=samples, dedup=dedup, device=device, name=name)
    if collectives.world().groups == 1:
        return sent
    owned = sent.owned
    joined = join_keys(owned.keys, owned.notes, dedup=dedup, device=device, name=name)
    with tf.device(DEVICE_NAMES[device]):
        places = zip(joined.places, owned.positions, strict=True)
        positions = tuple(tf.gather(of_table, each) for of_table, each in places)
    return SentKeys(
        sent.routed, owned._replace(keys=joined.keys, positions=positions, notes=joined.notes), joined
    )


def send_in_group(
    keys: Sequence[tf.Tensor],
    *,
    samples: tf.Tensor | int = 0,
    dedup: bool = True,
    device: DeviceKind = "cpu",
    name: str = "lookup",
) -> SentKeys:
    """Send this rank's keys to their owners in its group alone; arguments as in `send_keys`."""
    with tf.device("CPU:0"):  # nothing here waits for the batch to be on a GPU
        note = tf.reshape(tf.cast(samples, tf.int64), [1])
    here = collectives.world()
    routed = route_keys(keys, note=note, world_size=here.group_size, dedup=dedup, device=device)
    message, splits = collectives.alltoall(
        routed.message, routed.splits, name=f"{name}/keys", place=device, ranks=here.group_ranks
    )
    owned = receive_keys(message, splits, tables=len(keys), note_size=1, dedup=dedup, device=device)
    return SentKeys(routed, owned)


def fetch_rows(
    sent: SentKeys, tables: Sequence[HashTable], *, insert: bool | tf.Tensor = True
) -> tuple[tf.Tensor, ...]:
    """Read the rows that the ranks requested from this one, each once.

    Args:
      sent: The keys.
      tables: In the order of the keys.
      insert: As in `gmeta.ops.HashTable.lookup`; the same on all ranks.

    Returns:
      For each table the (distinct keys, dim) rows of ``sent.owned.keys``.
    """
    return tuple(table.lookup_keys(keys, insert) for table, keys in zip(tables, sent.owned.keys, strict=True))


def exchange_values(
    sent: SentKeys,
    rows: Sequence[tf.Tensor],
    dims: Sequence[int],
    *,
    wire_dtype: tf.DType = tf.float32,
    device: DeviceKind = "cpu",
    name: str = "lookup",
) -> tuple[tf.Tensor, ...]:
    """Send the fetched rows to the ranks that requested them.

    Args:
      sent: The keys.
      rows: What `fetch_rows` returned.
      dims: The tables' widths.
      wire_dtype: ``tf.float16`` or ``tf.bfloat16`` halves the bytes, and rounds the rows that the model sees
        (`gmeta.ops.row_buffers.pack_rows` gives the errors).
      device: Where the tables are. The rows travel where they are computed with, so they go to a GPU once.
      name: Name of the collective; the same on all ranks.

    Returns:
      For each table the (distinct keys, dim) rows of this rank's ``sent.routed.keys``, float32.
    """
    owned = sent.owned
    buffer, splits = pack_rows(rows, owned.positions, owned.counts, wire_dtype=wire_dtype, device=device)
    received, _ = collectives.alltoall(
        buffer,
        splits,
        name=f"{name}/values",
        place=row_place(wire_dtype, compute_place()),
        received_splits=count_numbers(sent.routed.counts, dims, wire_dtype),
        ranks=collectives.world().group_ranks,
    )
    return unpack_rows(received, sent.routed.counts, dims=dims, device=compute_place())


def exchange_gradients(
    sent: Sequence[SentKeys],
    gradients: Sequence[Sequence[tf.Tensor | tf.IndexedSlices | None]],
    *,
    wire_dtype: tf.DType = tf.float32,
    name: str = "step",
) -> list[list[OwnedGradient | None]]:
    """Send the rows' gradients to the rows' owners; one exchange carries all lookups of a step.

    Args:
      sent: The lookups' keys.
      gradients: For each lookup and each of its tables the gradient of what `exchange_values` returned, or
        None if there is none. It must be None on all ranks or on no rank. This function sums slices by key;
        the owner doesn't update keys that the slices leave out.
      wire_dtype: As in `exchange_values`; here it rounds the gradients.
      name: Name of the collective; the same on all ranks.

    Returns:
      For each lookup and each table the gradients that this rank must apply. A table sums the gradients of
      equal keys in the given order, which is the order of ranks, or of groups, so the sums are the same in
      every run.
    """
    found = [
        (lookup, table, gradient)
        for lookup, of_lookup in enumerate(gradients)
        for table, gradient in enumerate(of_lookup)
        if gradient is not None
    ]
    owned: list[list[OwnedGradient | None]] = [[None] * len(of_lookup) for of_lookup in gradients]
    if not found:
        return owned
    values = [by_key(gradient) for *_, gradient in found]
    away = tf.stack([sent[lookup].routed.counts[:, table] for lookup, table, _ in found], axis=1)
    here = tf.stack([sent[lookup].owned.counts[:, table] for lookup, table, _ in found], axis=1)
    buffer, splits = pack_rows(values, None, away, wire_dtype=wire_dtype, device=compute_place())
    dims = [value.shape[1] for value in values]
    received, _ = collectives.alltoall(
        buffer,
        splits,
        name=f"{name}/gradients",
        place=row_place(wire_dtype, compute_place()),
        received_splits=count_numbers(here, dims, wire_dtype),
        ranks=collectives.world().group_ranks,
    )
    parts = unpack_rows(received, here, dims=dims, device=compute_place())
    places = [(lookup, table) for lookup, table, _ in found]
    partial = [isinstance(gradient, tf.IndexedSlices) for *_, gradient in found]
    came = []
    for (lookup, table), part, some in zip(places, parts, partial, strict=True):
        keys, joined = sent[lookup].owned, sent[lookup].joined
        if joined is not None:
            came.append(CameGradient(joined, table, keys.positions[table], part, some))
        else:
            whole = OwnedGradient(keys.wire_keys[table], part)
            owned[lookup][table] = present(whole) if some else whole
    if came:
        for (lookup, table), sums in zip(
            places, join_gradients(came, wire_dtype=wire_dtype, name=name), strict=True
        ):
            owned[lookup][table] = sums
    return owned

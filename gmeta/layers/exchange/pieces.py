"""Fetches a lookup's rows from the ranks that own them and sends the gradients back: a step in pieces.

On N ranks each rank owns the keys of its logical shards (`gmeta.core.shares`) and no others, so a
lookup needs several exchanges (G-Meta, algorithm 1; MTGenRec, section 3.3)::

    send_keys           each rank's distinct keys go to their owners               one exchange
    fetch_rows          an owner reads every row that ranks request, once          no exchange
    exchange_values     rows go to the ranks that requested them                   one exchange
      ... the model and its tape run on the rows as if they had been there ...
    exchange_gradients  gradients go the way that the keys went                    one exchange
    update              an owner sums those of equal keys, in the order of ranks   no exchange

All tables of a lookup travel together, whatever their number and widths; so do the gradients of all lookups
of a step. The handle `SentKeys` carries what a later piece needs from an earlier one. It is a plain tuple of
tensors, so a scheduler may run pieces of one batch beside those of another.

Every rank must call each piece equally often; a rank without keys calls it with none.

In G groups of ranks (`gmeta.init`) each row has G copies, with an owner in each group, and the exchanges are
among the ranks of a group: a rank asks only owners of its own group for rows. All owners of a row must make
the same lookups and updates, or their copies would differ. So two more exchanges are made, each among G
ranks, in which a rank sends the same to each of the others::

    join_keys        after the keys have come: the distinct keys that the groups have looked up
    join_gradients   after the gradients have come: their sums for these keys

Each owner then looks up the union of the keys, so its table inserts, admits, counts and evicts what the table
of a single group would. It updates each row with the sum of the groups' sums, in the order of groups. A copy
is a function of these messages alone, and all owners receive the same ones, so copies are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from gmeta.core import collectives
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


# The gradients that a row's owner gets, among them those of rows without one.
#
# A step may look up keys that the loss doesn't depend on, for example if a feature is read but not used.
# TensorFlow leaves such a key out of the `tf.IndexedSlices` of the table's gradient, and the key's row must
# stay as it is: with momentum, even an update by zeros would move it. Both ends know the keys, but which keys
# have a gradient is known only after the forward pass. So a row of negative zeros travels for each key
# without a gradient. A sum of gradients starts from a positive zero and is never a negative zero.


# Not a Python float: TensorFlow caches their tensors and would return that of 0.0 for -0.0, which is equal.
_NEGATIVE_ZERO = np.float32(-0.0)


class OwnedGradient(NamedTuple):
    """The gradients that an owner received for one table.

    Attributes:
      keys: (n,) int64, as received: by rank, each key once for each rank that has a gradient for it.
      values: (n, dim) float32.
    """

    keys: tf.Tensor
    values: tf.Tensor


def by_key(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """Sum a gradient by key: (distinct keys, dim), with negative zeros for keys without a gradient."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    keys = gradient.dense_shape[0]
    sums = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, keys)
    times = tf.math.unsorted_segment_sum(tf.ones_like(gradient.values[:, :1]), gradient.indices, keys)
    return tf.where(times > 0, sums, _NEGATIVE_ZERO)


def present(came: OwnedGradient) -> OwnedGradient:
    """Drop the rows of negative zeros."""
    # TensorFlow compares int32 in host memory, but uint32 where it is.
    negative_zero = tf.constant(_NEGATIVE_ZERO.view(np.uint32))

    def some() -> OwnedGradient:
        present = tf.reduce_any(tf.bitcast(came.values, tf.uint32) != negative_zero, axis=1)
        return OwnedGradient(tf.boolean_mask(came.keys, present), tf.boolean_mask(came.values, present))

    # Usually no gradient is missing. Each row's first number shows that without a pass over all numbers.
    missing = tf.reduce_any(tf.bitcast(came.values[:, 0], tf.uint32) == negative_zero)
    return OwnedGradient(*tf.cond(missing, some, lambda: came))


class JoinedKeys(NamedTuple):
    """The keys that all groups have looked up, of those that this rank and its replicas own.

    Attributes:
      keys: For each table (v,) int64, the distinct keys.
      places: For each table (u,) int32, the places among ``keys`` of those of the own group.
      group_keys: For each table (w,) int64, each group's distinct keys, one group after another.
      counts: (G, T) int32, how many keys of a table a group has.
      notes: (world size, m) int64, the note of each rank.
    """

    keys: tuple[tf.Tensor, ...]
    places: tuple[tf.Tensor, ...]
    group_keys: tuple[tf.Tensor, ...]
    counts: tf.Tensor
    notes: tf.Tensor


class CameGradient(NamedTuple):
    """The gradients that an owner received from its group for one table.

    Attributes:
      joined: The keys of the lookup.
      table: The number of the table in it.
      places: (n,) int32, the places among ``joined.keys[table]`` of the keys, in the order of ranks.
      values: (n, dim) float32.
      partial: Whether rows of negative zeros stand for keys without a gradient.
    """

    joined: JoinedKeys
    table: int
    places: tf.Tensor
    values: tf.Tensor
    partial: bool


def join_keys(
    keys: Sequence[tf.Tensor], notes: tf.Tensor, *, dedup: bool = True, device: DeviceKind = "cpu", name: str
) -> JoinedKeys:
    """Exchange the keys that the own group has looked up with this rank's replicas.

    Args:
      keys: For each table (u,) int64, the distinct keys.
      notes: (ranks of a group, m) int64, the notes of the group's ranks.
      dedup: Whether to deduplicate keys, as in `gmeta.ops.key_messages.receive_keys`.
      device: Where the keys are.
      name: Name of the collective; the same on all ranks.
    """
    here, tables = collectives.world(), len(keys)
    width = notes.shape[1]
    with tf.device("CPU:0"):
        sizes = [tf.size(each, tf.int64) for each in keys]
        head = tf.concat([tf.reshape(notes, [-1]), tf.stack(sizes)], axis=0)
    with tf.device(DEVICE_NAMES[device]):
        message = tf.concat([head, *keys], axis=0)
        messages = tf.tile(message, [here.groups])  # the same to each
    with tf.device("CPU:0"):
        splits = tf.fill([here.groups], tf.size(message))
    received, came = collectives.alltoall(
        messages, splits, name=f"{name}/group_keys", place=device, ranks=here.replicas
    )
    note_size = here.group_size * width
    found = receive_keys(received, came, tables=tables, note_size=note_size, dedup=dedup, device=device)
    with tf.device("CPU:0"):
        begins = tf.cumsum(found.counts, axis=0, exclusive=True)[here.group]
        own = found.counts[here.group]
    places = [
        tf.slice(each, begins[table : table + 1], own[table : table + 1])
        for table, each in enumerate(found.positions)
    ]
    with tf.device("CPU:0"):
        notes = tf.reshape(found.notes, [here.size, width])  # a group's ranks are consecutive
    return JoinedKeys(found.keys, tuple(places), found.wire_keys, found.counts, notes)


def join_gradients(
    came: Sequence[CameGradient], *, wire_dtype: tf.DType = tf.float32, name: str
) -> list[OwnedGradient]:
    """Sum the gradients of the own group by key, and exchange the sums with this rank's replicas.

    Args:
      came: The gradients.
      wire_dtype: As in `gmeta.ops.row_buffers.pack_rows`. All replicas get the sums as they have travelled.
      name: Name of the collective; the same on all ranks.

    Returns:
      For each table the gradients that all replicas must apply: by group, each key once for each group that
      has a gradient for it.
    """
    here, place = collectives.world(), compute_place()
    with tf.device("CPU:0"):
        counts = tf.stack([each.joined.counts[:, each.table] for each in came], axis=1)
        sent = tf.tile(counts[here.group][tf.newaxis], [here.groups, 1])
    buffer, splits = pack_rows(
        [_sum(each) for each in came],
        [tf.tile(each.joined.places[each.table], [here.groups]) for each in came],
        sent,
        wire_dtype=wire_dtype,
        device=place,
    )
    dims = [each.values.shape[1] for each in came]
    received, _ = collectives.alltoall(
        buffer,
        splits,
        name=f"{name}/group_gradients",
        place=row_place(wire_dtype, place),
        received_splits=count_numbers(counts, dims, wire_dtype),
        ranks=here.replicas,
    )
    parts = unpack_rows(received, counts, dims=dims, device=place)
    found = [OwnedGradient(e.joined.group_keys[e.table], part) for e, part in zip(came, parts, strict=True)]
    return [present(one) if each.partial else one for each, one in zip(came, found, strict=True)]


def _sum(came: CameGradient) -> tf.Tensor:
    """Sum the gradients of equal keys, in their order: (v, dim) for the joined keys of the table."""
    size = tf.size(came.joined.keys[came.table])
    if not came.partial:
        return tf.math.unsorted_segment_sum(came.values, came.places, size)
    places, values = present(OwnedGradient(came.places, came.values))
    return by_key(tf.IndexedSlices(values, places, tf.stack([size, tf.shape(values)[1]])))

"""Fetches a lookup's rows from the ranks that own them and sends the gradients back: a step in pieces.

On N ranks each rank owns the keys of its logical shards (`gmeta.core.logical_shards`) and no others, so a
lookup needs several exchanges (G-Meta, algorithm 1; MTGenRec, section 3.3)::

    send_keys           each rank's distinct keys go to their owners               one exchange
    fetch_rows          an owner reads every row that ranks request, once          no exchange
    exchange_values     rows go to those who asked                                 one exchange
      ... the model and its tape run on the rows as if they had been there ...
    exchange_gradients  gradients go the way that the keys went                    one exchange
    update              an owner sums those of equal keys, in the order of ranks   no exchange

All tables of a lookup travel together, whatever their number and widths; so do the gradients of all lookups
of a step. The handle `SentKeys` carries what a later piece needs from an earlier one. It is a plain tuple of
tensors, so a scheduler may run pieces of one batch beside those of another.

Every rank must call each piece equally often; a rank without keys calls it with none.

A step may look up keys that the loss doesn't depend on, for example if a feature is read but not used.
TensorFlow leaves such a key out of the `tf.IndexedSlices` of the table's gradient, and the key's row must
stay as it is: with momentum, even an update by zeros would move it. Both ends know the keys, but which keys
have a gradient is known only after the forward pass. So a row of negative zeros travels for each key without
a gradient. A sum of gradients starts from a positive zero and is never a negative zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from gmeta.core import collectives
from gmeta.ops.device import Place, compute_place
from gmeta.ops.exchange.key_messages import receive_keys, route_keys
from gmeta.ops.exchange.messages import OwnedKeys, RoutedKeys
from gmeta.ops.exchange.row_buffers import count_numbers, pack_rows, row_place, unpack_rows
from gmeta.ops.table.hash_table import HashTable

# Not a Python float: TensorFlow caches their tensors and would return that of 0.0 for -0.0, which is equal.
_NEGATIVE_ZERO = np.float32(-0.0)


class SentKeys(NamedTuple):
    """Keys that have reached their owners, seen from both ends.

    Attributes:
      routed: The keys that this rank requested. ``routed.keys[t]`` are table t's distinct keys by owner, and
        ``routed.inverse[t]`` gives the index among them of each input key.
      owned: The keys that the ranks requested from this rank as their owner. ``owned.notes[r, 0]`` is the
        number of samples in rank r's batch.
    """

    routed: RoutedKeys
    owned: OwnedKeys


class OwnedGradient(NamedTuple):
    """The gradients that an owner received for one table.

    Attributes:
      keys: (n,) int64, as received: by rank, each key once for each rank that has a gradient for it.
      values: (n, dim) float32.
    """

    keys: tf.Tensor
    values: tf.Tensor


def send_keys(
    keys: Sequence[tf.Tensor],
    *,
    samples: tf.Tensor | int = 0,
    dedup: bool = True,
    device: Place = "cpu",
    name: str = "lookup",
) -> SentKeys:
    """Send this rank's keys to their owners.

    Args:
      keys: For each table its keys, (n,) int64; a key may occur any number of times.
      samples: The number of samples in this rank's batch; every rank learns it.
      dedup: Whether a key travels and is read only once. If not, it travels as often as it occurs, which
        serves to measure what deduplication saves.
      device: Where the tables are and where keys are deduplicated.
      name: Name of the collective; the same on all ranks.
    """
    with tf.device("CPU:0"):  # nothing here waits for the batch to be on a GPU
        note = tf.reshape(tf.cast(samples, tf.int64), [1])
    size = collectives.world().size
    routed = route_keys(keys, note=note, world_size=size, dedup=dedup, device=device)
    message, splits = collectives.alltoall(routed.message, routed.splits, name=f"{name}/keys", place=device)
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
    device: Place = "cpu",
    name: str = "lookup",
) -> tuple[tf.Tensor, ...]:
    """Send the fetched rows to the ranks that requested them.

    Args:
      sent: The keys.
      rows: What `fetch_rows` returned.
      dims: The tables' widths.
      wire_dtype: ``tf.float16`` or ``tf.bfloat16`` halves the bytes, and rounds the rows that the model sees
        (`gmeta.ops.pack_rows` says by how much).
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
      equal keys in the given order, which is the order of ranks, so the sums are the same in every run.
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
    )
    parts = unpack_rows(received, here, dims=dims, device=compute_place())
    for (lookup, table, gradient), part in zip(found, parts, strict=True):
        came = OwnedGradient(sent[lookup].owned.wire_keys[table], part)
        owned[lookup][table] = present(came) if isinstance(gradient, tf.IndexedSlices) else came
    return owned


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
    negative_zero = tf.constant(_NEGATIVE_ZERO.view(np.int32))

    def some() -> OwnedGradient:
        present = tf.reduce_any(tf.bitcast(came.values, tf.int32) != negative_zero, axis=1)
        return OwnedGradient(tf.boolean_mask(came.keys, present), tf.boolean_mask(came.values, present))

    # Usually no gradient is missing. Each row's first number shows that without a pass over all numbers.
    missing = tf.reduce_any(tf.bitcast(came.values[:, 0], tf.int32) == negative_zero)
    return OwnedGradient(*tf.cond(missing, some, lambda: came))

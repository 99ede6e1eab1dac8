"""The rows of a lookup from the ranks that own them, and their gradients back: a step in pieces.

On N ranks each rank owns the keys of its logical shards (`gmeta.core.logical_shards`) and no others, so a
lookup is a conversation (G-Meta, algorithm 1; MTGenRec, section 3.3)::

    send_keys           each rank's distinct keys go to their owners               one exchange
    fetch_rows          an owner reads every row that it was asked for, once       no exchange
    exchange_values     rows go to those who asked                                 one exchange
      ... the model and its tape run on the rows as if they had been there ...
    exchange_gradients  gradients go the way that the keys went                    one exchange
    update              an owner sums those of equal keys, in the order of ranks   no exchange

All tables of a lookup travel together, whatever their number and widths; the gradients of all lookups of a
step do too. What a later piece needs of an earlier one is in the handle `SentKeys`: a plain tuple of tensors,
so that whoever schedules a step may run pieces of one batch beside those of another.

Every rank must call each piece as often as the others: with no keys, where it has none.

A key may have been looked up that the loss doesn't depend on, such as that of a feature which is read and not
used. TensorFlow then leaves it out of the `tf.IndexedSlices` of the table's gradient, and its row is to stay
as it is: an update by zeros would move it, where the optimizer has momentum. Both ends know the keys, and
which of them have a gradient turns out a forward pass later; so where there is none, a row of negative zeros
travels. A sum of gradients begins with a positive zero and is none.
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
from gmeta.ops.exchange.row_buffers import pack_rows, unpack_rows
from gmeta.ops.table.hash_table import HashTable

# Not the Python number: TensorFlow keeps tensors of those, and finds that of 0.0 for -0.0, as they are equal.
_NEGATIVE_ZERO = np.float32(-0.0)


class SentKeys(NamedTuple):
    """Keys that have reached their owners, seen from both ends.

    Attributes:
      routed: What this rank asked for. ``routed.keys[t]`` are table t's distinct keys by owner, and
        ``routed.inverse[t]`` says where among them each of the keys stands that were given.
      owned: What this rank was asked for, as an owner. ``owned.notes[r, 0]`` is the number of samples in
        rank r's batch.
    """

    routed: RoutedKeys
    owned: OwnedKeys


class OwnedGradient(NamedTuple):
    """What an owner received for one table.

    Attributes:
      keys: (n,) int64, as they came: by rank, each key once for each rank that has a gradient for it.
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
    """Tell every owner which of its keys this rank's batch has.

    Args:
      keys: For each table its keys, (n,) int64, any number of times each.
      samples: How many samples this rank's batch has; every rank learns it.
      dedup: Whether a key travels once and is read once; otherwise as often as it stands there, which serves
        to measure what deduplication saves.
      device: Where the tables are, and keys are made distinct.
      name: Of the collective; the same on all ranks.
    """
    with tf.device("CPU:0"):  # nothing here waits for the batch to be on a GPU
        note = tf.reshape(tf.cast(samples, tf.int64), [1])
    size = collectives.world().size
    routed = route_keys(keys, note=note, world_size=size, dedup=dedup, device=device)
    message, splits = collectives.alltoall(routed.message, routed.splits, name=f"{name}/keys")
    owned = receive_keys(message, splits, tables=len(keys), note_size=1, dedup=dedup, device=device)
    return SentKeys(routed, owned)


def fetch_rows(
    sent: SentKeys, tables: Sequence[HashTable], *, insert: bool | tf.Tensor = True
) -> tuple[tf.Tensor, ...]:
    """Read the rows that this rank was asked for, each once.

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
    """Give the fetched rows to the ranks that asked for them.

    Args:
      sent: The keys.
      rows: What `fetch_rows` gave.
      dims: The tables' widths.
      wire_dtype: ``tf.float16`` or ``tf.bfloat16`` halves the bytes, and rounds the rows that the model sees
        (by how much: `gmeta.ops.pack_rows`).
      device: Where the tables are.
      name: Of the collective; the same on all ranks.

    Returns:
      For each table the (distinct keys, dim) rows of this rank's ``sent.routed.keys``, float32.
    """
    owned = sent.owned
    buffer, splits = pack_rows(rows, owned.positions, owned.counts, wire_dtype=wire_dtype, device=device)
    received, _ = collectives.alltoall(buffer, splits, name=f"{name}/values")
    return unpack_rows(received, sent.routed.counts, dims=dims, device=compute_place())


def exchange_gradients(
    sent: Sequence[SentKeys],
    gradients: Sequence[Sequence[tf.Tensor | tf.IndexedSlices | None]],
    *,
    wire_dtype: tf.DType = tf.float32,
    name: str = "step",
) -> list[list[OwnedGradient | None]]:
    """Give the gradients of rows to the rows' owners: those of all lookups of a step in one exchange.

    Args:
      sent: The lookups' keys.
      gradients: For each lookup and each of its tables the gradient of what `exchange_values` gave, or None
        where there is none, on all ranks alike. Slices are summed by key here, and keys that they leave out
        are left out at the owner.
      wire_dtype: As in `exchange_values`; here it rounds the gradients.
      name: Of the collective; the same on all ranks.

    Returns:
      For each lookup and each table what this rank is to update. A table sums the gradients of equal keys in
      the order in which they stand there, which is that of the ranks: the sums are the same in every run.
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
    values = [_by_key(gradient) for *_, gradient in found]
    away = tf.stack([sent[lookup].routed.counts[:, table] for lookup, table, _ in found], axis=1)
    here = tf.stack([sent[lookup].owned.counts[:, table] for lookup, table, _ in found], axis=1)
    buffer, splits = pack_rows(values, None, away, wire_dtype=wire_dtype, device=compute_place())
    received, _ = collectives.alltoall(buffer, splits, name=f"{name}/gradients")
    dims = [value.shape[1] for value in values]
    parts = unpack_rows(received, here, dims=dims, device=compute_place())
    for (lookup, table, gradient), part in zip(found, parts, strict=True):
        came = OwnedGradient(sent[lookup].owned.wire_keys[table], part)
        owned[lookup][table] = _present(came) if isinstance(gradient, tf.IndexedSlices) else came
    return owned


def _by_key(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """(distinct keys, dim): sums by key, and negative zeros for keys without a gradient."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    keys = gradient.dense_shape[0]
    sums = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, keys)
    times = tf.math.unsorted_segment_sum(tf.ones_like(gradient.values[:, :1]), gradient.indices, keys)
    return tf.where(times > 0, sums, _NEGATIVE_ZERO)


def _present(came: OwnedGradient) -> OwnedGradient:
    """Without the rows of negative zeros."""
    negative_zero = tf.constant(_NEGATIVE_ZERO.view(np.int32))

    def some() -> OwnedGradient:
        present = tf.reduce_any(tf.bitcast(came.values, tf.int32) != negative_zero, axis=1)
        return OwnedGradient(tf.boolean_mask(came.keys, present), tf.boolean_mask(came.values, present))

    # Most often none is missing, which the first numbers tell without a pass over all of them.
    missing = tf.reduce_any(tf.bitcast(came.values[:, 0], tf.int32) == negative_zero)
    return OwnedGradient(*tf.cond(missing, some, lambda: came))

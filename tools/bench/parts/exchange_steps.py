"""The sparse half of a training step over ranks, in every way that the benchmark compares.

A step takes the keys of a batch to their owners, gives a vector to each position, takes a gradient for each
position, and updates the owners' rows. What a model would do in between is left out: the gradient of a
position is a hundredth of its vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gmeta.ops as ops
import tensorflow as tf
from gmeta.core import collectives
from gmeta.ops.dedup_alltoall import pack_rows, receive_keys, route_keys, unpack_rows

WAYS = {"none": (False, False), "stage1": (True, False), "stage2": (False, True), "both": (True, True)}
"""Which of the two stages of deduplication are on."""
PER_FEATURE = "per_feature"


def exchange_step(table: Any, keys: Sequence[tf.Tensor], sender: bool, owner: bool, name: str) -> tf.Tensor:
    """One step of the keys of all features together: three exchanges."""
    sizes = [int(part.shape[0]) for part in keys]
    routed = route_keys([tf.concat(keys, 0)], world_size=collectives.world().size, dedup=sender)
    message, splits = collectives.alltoall(routed.message, routed.splits, name=f"{name}/keys")
    owned = receive_keys(message, splits, tables=1, dedup=owner)

    packed = pack_rows([table.lookup_keys(owned.keys[0])], owned.positions, owned.counts)
    buffer, _ = collectives.alltoall(packed.buffer, packed.splits, name=f"{name}/values")
    (rows,) = unpack_rows(buffer, routed.counts, dims=[table.dim])
    vectors = tf.split(tf.gather(rows, routed.inverse[0]), sizes)

    gradients = tf.concat([0.01 * vector for vector in vectors], 0)
    summed = tf.math.unsorted_segment_sum(gradients, routed.inverse[0], tf.shape(rows)[0])
    packed = pack_rows([summed], None, routed.counts)
    buffer, _ = collectives.alltoall(packed.buffer, packed.splits, name=f"{name}/gradients")
    (received,) = unpack_rows(buffer, owned.counts, dims=[table.dim])
    table.apply_gradients(owned.wire_keys[0], received)
    return tf.reduce_sum(vectors[0])


def make_step(way: str, dim: int) -> Any:
    """A compiled step of one way, with a table of its own.

    Args:
      way: One of `WAYS`; or ``per_feature``: each feature's own three exchanges, its ids distinct.
      dim: The width of rows.

    Returns:
      A function of the features' keys.
    """
    table = ops.HashTable(dim, optimizer=ops.Adagrad(0.1), initializer=ops.Uniform(), name=f"{way}{dim}")

    @tf.function
    def step(keys: Sequence[tf.Tensor]) -> tf.Tensor:
        name = f"{way}{dim}"
        if way != PER_FEATURE:
            return exchange_step(table, keys, *WAYS[way], name)
        # One after another, as layers of a model; ranks could otherwise meet in different orders.
        total = tf.constant(0.0)
        for feature, part in enumerate(keys):
            with tf.control_dependencies([total]):
                total += exchange_step(table, [tf.identity(part)], True, False, f"{name}/{feature}")
        return total

    return step

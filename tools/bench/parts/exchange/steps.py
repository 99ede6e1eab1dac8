"""The sparse half of a training step over ranks, in every way that the benchmark compares.

A step takes the keys of a batch to their owners, gives a vector to each position, takes a gradient for each
position, and updates the owners' rows. The model's work in between is left out: the gradient of a position is
a hundredth of its vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gmeta.ops as ops
from gmeta import initializers, optimizers
from gmeta.core import collectives
from gmeta.layers.exchange.pieces import SentKeys, exchange_gradients, exchange_values, fetch_rows
from gmeta.ops.device import DeviceKind
from gmeta.ops.key_messages import receive_keys, route_keys

import tensorflow as tf

WAYS = {"none": (False, False), "stage1": (True, False), "stage2": (False, True), "both": (True, True)}
"""Which of the two stages of deduplication are on."""
PER_FEATURE = "per_feature"


def exchange_step(table: Any, keys: Sequence[tf.Tensor], sender: bool, owner: bool, name: str) -> tf.Tensor:
    """One step of the keys of all features together: three exchanges."""
    sizes, place = [int(part.shape[0]) for part in keys], table.device
    size = collectives.world().size
    routed = route_keys([tf.concat(keys, 0)], world_size=size, dedup=sender, device=place)
    message, splits = collectives.alltoall(routed.message, routed.splits, name=f"{name}/keys", place=place)
    sent = SentKeys(routed, receive_keys(message, splits, tables=1, dedup=owner, device=place))
    (rows,) = exchange_values(sent, fetch_rows(sent, [table]), [table.dim], device=place, name=name)
    vectors = tf.split(tf.gather(rows, routed.inverse[0]), sizes)

    gradients = tf.concat([0.01 * vector for vector in vectors], 0)
    summed = tf.math.unsorted_segment_sum(gradients, routed.inverse[0], tf.shape(rows)[0])
    ((owned,),) = exchange_gradients([sent], [[summed]], name=name)
    assert owned is not None
    table.apply_gradients(owned.keys, owned.values)
    return tf.reduce_sum(vectors[0])


def make_step(way: str, dim: int, features: int, device: DeviceKind) -> Any:
    """A compiled step of one way, with tables of its own.

    Args:
      way: One of `WAYS`; or ``per_feature``: each feature has its own table and three exchanges, as with one
        layer per feature; nothing orders the features.
      dim: The width of rows.
      features: The number of features.
      device: The device of the tables and of the messages.

    Returns:
      A function of the features' keys.
    """
    tables = [
        ops.HashTable(
            dim,
            optimizer=optimizers.Adagrad(0.1),
            initializer=initializers.Uniform(),
            name=f"{way}{dim}/{number}",
            device=device,
        )
        for number in range(features if way == PER_FEATURE else 1)
    ]

    @tf.function
    def step(keys: Sequence[tf.Tensor]) -> tf.Tensor:
        name = f"{way}{dim}"
        if way != PER_FEATURE:
            return exchange_step(tables[0], keys, *WAYS[way], name)
        parts = enumerate(zip(tables, keys, strict=True))
        return tf.add_n(
            [exchange_step(t, [part], True, True, f"{name}/{number}") for number, (t, part) in parts]
        )

    return step

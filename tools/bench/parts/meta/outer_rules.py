"""Other ways to sum dense gradients over the ranks than a step's own, to compare with."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from gmeta.core import collectives
from gmeta.training import mean_gradients

import tensorflow as tf

Rule = Literal["allreduce", "gather", "late"]

_allreduce_sum = collectives.allreduce_sum
_least_bucket = mean_gradients.LEAST_BUCKET


@contextmanager
def outer_rule(rule: Rule) -> Iterator[None]:
    """Sum the dense gradients of training steps that are traced in the block as usual, or by another rule.

    late: One all-reduce sums all of them when the backward pass has ended.

    gather: A central node sums them, which G-Meta replaces with an all-reduce (section 2.1.3). Every rank
    sends its K numbers to rank 0, which adds them, K (N - 1) numbers in total, and sends the sums to every
    rank: as many again, and as many as the weights that they change. All-reduce instead sends 2 K (N - 1) / N
    from each rank at the same time. Each rank then takes the same step, as with all-reduce.
    """
    if rule == "gather":
        collectives.allreduce_sum = _sum_dense  # where a step finds it
    if rule != "allreduce":
        mean_gradients.LEAST_BUCKET = sys.maxsize
    try:
        yield
    finally:
        collectives.allreduce_sum = _allreduce_sum
        mean_gradients.LEAST_BUCKET = _least_bucket


def _sum_dense(tensors: Sequence[tf.Tensor], *, name: str, place: Any = "cpu") -> list[tf.Tensor]:
    if name != "step/dense" or collectives.world().size == 1:
        return _allreduce_sum(tensors, name=name, place=place)
    return gather_sum(tensors, name=name, place=place)


def gather_sum(tensors: Sequence[tf.Tensor], *, name: str, place: Any = "cpu") -> list[tf.Tensor]:
    """Do as `collectives.allreduce_sum` for tensors of one dtype and known shapes, through rank 0."""
    here = collectives.world()
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    vector = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
    count, others = vector.shape[0], [0] * (here.size - 1)
    every, one, none = [count] * here.size, [count, *others], [0] * here.size
    first = here.rank == 0
    gathered, _ = collectives.alltoall(
        vector, one, name=f"{name}/gather", place=place, received_splits=every if first else none
    )
    total = tf.reduce_sum(tf.reshape(gathered, [-1, count]), axis=0)  # zeros where nothing was received
    sent, splits = (tf.tile(total, [here.size]), every) if first else (total[:0], none)
    total, _ = collectives.alltoall(sent, splits, name=f"{name}/broadcast", place=place, received_splits=one)
    parts = tf.split(tf.ensure_shape(total, [count]), [tensor.shape.num_elements() for tensor in tensors])
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

"""The children of nodes and the logs of their probabilities, in TensorFlow's own ops."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from gmeta.core.graph.conditions import assert_first
from gmeta.ops.trie.level import Level

_FAR = -87.0
"""Logits this far below the greatest sibling's count as none, as in the native form."""


class Siblings(NamedTuple):
    """The children of nodes, side by side; `most` is the greatest number that one of these nodes has.

    Attributes:
      nodes: int64 (..., most), their numbers; -1 where a node has fewer.
      log_probs: float32 (..., most), -inf there.
    """

    nodes: tf.Tensor
    log_probs: tf.Tensor


def siblings_of(name: str, level: Level, nodes: tf.Tensor, logits: tf.Tensor) -> Siblings:
    """Compute what `ops/trie/host/siblings.h` does, for nodes of any shape.

    Args:
      name: The op, for messages.
      level: The level of the nodes.
      nodes: int64 (...); -1: there is none.
      logits: float32 (..., codes).

    Returns:
      `Siblings`. There is a gradient to logits.
    """
    count = tf.size(level.starts, tf.int64) - 1
    there = [tf.reduce_min(nodes), "to", tf.reduce_max(nodes), "of", count]
    nodes = assert_first(nodes, nodes < count, [f"{name}: nodes must be of the level, got", *there])
    at = tf.maximum(nodes, 0)
    first = tf.gather(level.starts, at)
    counts = tf.where(nodes < 0, tf.zeros_like(nodes), tf.gather(level.starts, at + 1) - first)
    most = tf.maximum(tf.reduce_max(counts), 0)  # of no counts at all the greatest is below 0
    places = tf.range(most)
    is_child = places < counts[..., None]
    children = tf.where(is_child, first[..., None] + places, tf.zeros((), tf.int64))
    if level.allowed is not None:
        is_child &= tf.gather(level.allowed, children)
    digits = tf.where(is_child, tf.gather(level.digits, children), 0)
    codes = tf.shape(logits)[-1]
    told = [f"{name}: digits must be below the number of logits,", codes, "got", tf.reduce_max(digits)]
    digits = assert_first(digits, (digits >= 0) & (digits < codes), told)
    z = tf.gather(logits, digits, batch_dims=nodes.shape.rank)
    minus = tf.constant(float("-inf"))
    z = tf.where(is_child, z, minus)
    told = [f"{name}: logits hold NaN or infinity: has the model's training diverged?"]
    z = assert_first(z, z < float("inf"), told)
    greatest = tf.stop_gradient(tf.reduce_max(z, axis=-1, keepdims=True))
    below = z - tf.where(greatest > minus, greatest, 0.0)
    total = tf.reduce_sum(tf.where(below < _FAR, 0.0, tf.exp(below)), axis=-1, keepdims=True)
    log_probs = below - tf.math.log(tf.where(total > 0, total, 1.0))
    return Siblings(tf.where(is_child, children, -1), log_probs)

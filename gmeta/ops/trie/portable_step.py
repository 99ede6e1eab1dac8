"""A step of a beam search over a trie in TensorFlow's own ops."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from gmeta.core.data.splitmix import splitmix64_tensor
from gmeta.core.graph.conditions import assert_first
from gmeta.ops.trie.level import Level
from gmeta.ops.trie.portable_form import siblings_of


def best_children(
    level: Level, logits: tf.Tensor, scores: tf.Tensor, nodes: tf.Tensor, k: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Compute what `ops/trie/host/beam_step.h` does, in the same order of ties.

    All children of all beams stand side by side: sorted by their hashes, and equal ones as they stood, by the
    beam. The k best of these are `tf.math.top_k`'s, which keeps the order of what is equal.

    Args:
      level: The level of the nodes.
      logits: float32 (users, beams, codes).
      scores: float32 (users, beams).
      nodes: int64 (users, beams); -1: there is no beam.
      k: How many beams to keep.

    Returns:
      Scores, nodes and beams, each (users, k).
    """
    told = ["trie_step: a score is NaN: has the model's training diverged?"]
    scores = assert_first(scores, (nodes < 0) | ~tf.math.is_nan(scores), told)
    siblings = siblings_of("trie_step", level, nodes, logits)
    reached = scores[..., None] + siblings.log_probs
    possible = tf.reduce_max(siblings.log_probs, axis=-1, keepdims=True) > float("-inf")
    is_child = (siblings.nodes >= 0) & possible
    beams = tf.broadcast_to(tf.range(tf.shape(nodes)[1])[:, None], tf.shape(is_child))
    last = tf.constant(np.iinfo(np.int64).max)  # in the order: where there is no child
    hashes = tf.where(is_child, _ordered_hash(siblings.nodes), last)
    every = [_in_a_row(hashes, last, k), _in_a_row(tf.where(is_child, reached, -np.inf), -np.inf, k)]
    every += [_in_a_row(tf.where(is_child, siblings.nodes, -1), -1, k)]
    every += [_in_a_row(tf.where(is_child, beams, -1), -1, k)]
    order = tf.argsort(every[0], axis=1, stable=True)
    reached, children, beams = (tf.gather(each, order, batch_dims=1) for each in every[1:])
    best, places = tf.math.top_k(reached, k)
    return best, tf.gather(children, places, batch_dims=1), tf.gather(beams, places, batch_dims=1)


def _in_a_row(of_beams: tf.Tensor, absent: float | tf.Tensor, k: int) -> tf.Tensor:
    """Put a user's beams side by side, and k more that aren't there."""
    users = tf.shape(of_beams)[0]
    flat = tf.reshape(of_beams, tf.stack([users, tf.reduce_prod(tf.shape(of_beams)[1:])]))
    return tf.pad(flat, [[0, 0], [0, k]], constant_values=tf.cast(absent, flat.dtype))


def _ordered_hash(nodes: tf.Tensor) -> tf.Tensor:
    """SplitMix64 of nodes, as signed numbers that are in the order of the unsigned ones."""
    hashes = splitmix64_tensor(tf.bitcast(nodes, tf.uint64))
    return tf.bitcast(tf.bitwise.bitwise_xor(hashes, tf.constant(1 << 63, tf.uint64)), tf.int64)

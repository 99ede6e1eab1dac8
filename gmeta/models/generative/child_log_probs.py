"""Log-probabilities of children of a trie's nodes, normalised over the children that there are."""

from __future__ import annotations

import tensorflow as tf


def trie_log_probs(
    logits: tf.Tensor, nodes: tf.Tensor, children: tf.Tensor, starts: tf.Tensor, digits: tf.Tensor
) -> tf.Tensor:
    """Compute the log of each child's probability among those of its node, (n,).

    Args:
      logits: float32 (n, codes).
      nodes: (n,) int64.
      children: (n,) int64, one of each node's children.
      starts: As `CodeTrie` has them for a level.
      digits: Of the same.
    """
    begins, ends = tf.gather(starts, nodes), tf.gather(starts, nodes + 1)
    most = tf.reduce_max(tf.concat([ends - begins, [1]], 0))
    places = begins[:, tf.newaxis] + tf.range(most)
    there = places < ends[:, tf.newaxis]
    held = tf.gather(digits, tf.minimum(places, tf.size(digits, tf.int64) - 1))
    z = tf.where(there, tf.gather(logits, held, axis=1, batch_dims=1), -1e30)
    own = tf.gather(logits, tf.gather(digits, children), axis=1, batch_dims=1)
    return own - tf.reduce_logsumexp(z, axis=1)

"""HSTU's attention of tokens that are appended to sequences whose keys and values are kept."""

from __future__ import annotations

import tensorflow as tf


def appended_attention(
    q: tf.Tensor,
    keys: tf.Tensor,
    values: tf.Tensor,
    own_keys: tf.Tensor,
    own_values: tf.Tensor,
    added: tf.Tensor,
    own_added: tf.Tensor,
    *,
    scale: float,
    alpha: float = 1.0,
) -> tf.Tensor:
    r"""Compute `hstu_attention` of one new token for each of several continuations of a sequence.

    .. math:: o = s \sum_j \mathrm{SiLU}(\alpha\, q \cdot k_j + a_j)\, v_j

    over the tokens of the sequence, whose keys and values all its continuations share, and over those that
    were appended to the own continuation, the new token included. It is in TensorFlow's own ops, in float32
    at least, and takes memory for batch × heads × beams × longest numbers.

    Args:
      q: (batch, beams, heads, d).
      keys: (batch, heads, longest, d), of the sequences.
      values: (batch, heads, longest, dv).
      own_keys: (batch, beams, heads, t, d), of appended tokens.
      own_values: (batch, beams, heads, t, dv).
      added: (batch, longest) float32, what is added to scores; far below 0 where a token isn't seen.
      own_added: (batch or 1, t) float32.
      scale: s.
      alpha: α.

    Returns:
      (batch, beams, heads, dv) of q's dtype.
    """
    dtype = tf.float64 if q.dtype == tf.float64 else tf.float32
    wide, keys, values, own_keys, own_values = (
        tf.cast(x, dtype) for x in (q, keys, values, own_keys, own_values)
    )
    added, own_added = (tf.cast(x, dtype) for x in (added, own_added))
    by_head = tf.transpose(alpha * wide, [0, 2, 1, 3])
    weights = tf.nn.silu(tf.matmul(by_head, keys, transpose_b=True) + added[:, tf.newaxis, tf.newaxis])
    found = tf.transpose(tf.matmul(weights, values), [0, 2, 1, 3])
    own = tf.nn.silu(tf.linalg.matvec(own_keys, alpha * wide) + own_added[:, tf.newaxis, tf.newaxis])
    found += tf.linalg.matvec(own_values, own, transpose_a=True)
    return tf.cast(scale * found, q.dtype)

r"""HSTU's attention over jagged sequences: SiLU in place of softmax, and no padding.

.. math:: o_i = s \sum_{j \in V(i)} \mathrm{SiLU}(\alpha\, q_i \cdot k_j + \mathrm{rab}_{ij})\, v_j

Each token's weights are its own: they aren't normalised over what it sees, so how many other tokens there
are, in its sequence or in others of the batch, changes nothing (Zhai et al., "Actions Speak Louder than
Words", ICML 2024, section 3.2). The scale s has to be a constant for that, 1/n of the longest history that is
allowed, never of the longest in a batch.
"""

from __future__ import annotations

import tensorflow as tf

from gmeta.ops.reference.attention import padded_attention
from gmeta.ops.relative_bias import RelativeBias


def hstu_attention(
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    offsets: tf.Tensor,
    visible: tf.Tensor,
    *,
    scale: float,
    alpha: float = 1.0,
    bias: RelativeBias | None = None,
) -> tf.Tensor:
    """Attend within each sequence.

    Args:
      q: (total, heads, d) float, the tokens of all sequences one after another.
      k: (total, heads, d).
      v: (total, heads, dv).
      offsets: (batch + 1,) int64, where sequences begin and end.
      visible: (total, 3) int32, of `AttentionMask.visible`.
      scale: s, a constant such as 1/n.
      alpha: α, what scores are multiplied by; 1 in the research form, 1/√d in the production form.
      bias: What is added to the scores; None: nothing.

    Returns:
      (total, heads, dv).

    Example:
      >>> q = tf.ones([3, 1, 4])
      >>> visible = AttentionMask().visible([0, 1, 3])
      >>> hstu_attention(q, q, q, tf.constant([0, 1, 3], tf.int64), visible, scale=0.5).numpy()[:, 0, 0]
      array([1.9640275, 1.9640275, 3.928055 ], dtype=float32)
    """
    return padded_attention(q, k, v, offsets, visible, scale=scale, alpha=alpha, bias=bias)


def bias_attention(
    v: tf.Tensor, offsets: tf.Tensor, visible: tf.Tensor, *, scale: float, bias: RelativeBias
) -> tf.Tensor:
    r"""Attend by the bias alone, :math:`o_i = s \sum_{j \in V(i)} \mathrm{rab}_{ij} v_j`.

    The channels of position and of time in a FuXi-α block (Ye et al., WWW 2025, section 3.3).

    Args:
      v: (total, heads, dv) float.
      offsets: (batch + 1,) int64.
      visible: (total, 3) int32, of `AttentionMask.visible`.
      scale: s.
      bias: The weights.

    Returns:
      (total, heads, dv).
    """
    return padded_attention(None, None, v, offsets, visible, scale=scale, bias=bias)

"""SASRec, what HSTU is compared with: a backbone of softmax attention over the same jagged sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gmeta.layers import SequenceBlock, SequenceStack, SequenceView
from gmeta.ops import Jagged, dense_mask, jagged, layer_norm


class SASRecBlock(SequenceBlock):
    r"""A block of SASRec (Kang and McAuley, ICDM 2018), in the form that HSTU was published beside.

    .. math::
       Q &= \mathrm{LN}(X), \quad
       A = \mathrm{dropout}(\mathrm{softmax}(Q W_q (X W_k)^T / \sqrt{d} + M))\, X W_v W_o \\
       F &= \mathrm{LN}(Q + A), \quad Y = F + \mathrm{dropout}(\mathrm{dropout}(\mathrm{ReLU}(F W_1)) W_2)

    with biases, left out here, norms without weights, and kernels that start by Xavier's normal rule.
    Attention is padded to the batch's longest history. It sees neither distances nor times; places are told
    apart by the vectors that `gmeta.models.NextItemModel` adds.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "bias_by_place": False, "bias_by_time": False})

    def build(self, input_shape: Any) -> None:
        """Create the weights for tokens of the given width."""
        dim = self.width(input_shape)
        query, value = self.heads * self.attention_dim, self.heads * self.value_dim
        shapes = {
            "query": [dim, query],
            "key": [dim, query],
            "value": [dim, value],
            "output": [value, dim],
            "ffn1": [dim, dim],
            "ffn2": [dim, dim],
        }
        self.kernels = {
            name: self.weight(f"{name}/kernel", shape, tf.keras.initializers.GlorotNormal)
            for name, shape in shapes.items()
        }
        self.biases = {
            name: self.weight(f"{name}/bias", shape[1:], "zeros") for name, shape in shapes.items()
        }
        super().build(input_shape)

    def transform(
        self, values: tf.Tensor, offsets: tf.Tensor, view: SequenceView, training: bool | None
    ) -> tf.Tensor:
        """(total, dim) -> (total, dim)."""
        asking = layer_norm(values)
        q, k, v = (
            self.by_head(self._linear(name, x))
            for name, x in (("query", asking), ("key", values), ("value", values))
        )
        drop = lambda x: self.drop(x, training=training)  # noqa: E731
        found = softmax_attention(q, k, v, offsets, view.visible, 1 / math.sqrt(self.attention_dim), drop)
        found = self._linear("output", tf.reshape(found, [-1, self.heads * self.value_dim]))
        asked = layer_norm(asking + found)
        hidden = self.drop(tf.nn.relu(self._linear("ffn1", asked)), training=training)
        return asked + self.drop(self._linear("ffn2", hidden), training=training)

    def _linear(self, name: str, x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, self.kernels[name]) + self.biases[name]


def softmax_attention(
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    offsets: tf.Tensor,
    visible: tf.Tensor,
    scale: float,
    drop: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Attend with softmax, (total, heads, d) each -> (total, heads, d), padded to the longest history."""
    padded_q, padded_k, padded_v = (jagged.to_padded(Jagged(x, offsets)) for x in (q, k, v))
    scores = tf.einsum("bqhd,bkhd->bhqk", padded_q, padded_k) * scale
    seen = dense_mask(visible, offsets)[:, tf.newaxis]
    weights = tf.nn.softmax(tf.where(seen, scores, scores.dtype.min))
    found = tf.einsum("bhqk,bkhd->bqhd", drop(weights), padded_v)
    return jagged.from_padded(found, offsets[1:] - offsets[:-1]).values


class SASRec(SequenceStack):
    """Blocks of SASRec, one after another."""

    BLOCK = SASRecBlock

"""LiGR's layers, as eSASRec has them: softmax attention and SwiGLU, each let in by a gate."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf
from sasrec import softmax_attention

from gmeta.layers import SequenceBlock, SequenceStack
from gmeta.layers.sequence.reading import SequenceView
from gmeta.ops.hstu_layer import layer_norm


class LiGRBlock(SequenceBlock):
    r"""A block of LiGR (Borisyuk et al., arXiv 2502.03417), in the form of eSASRec (arXiv 2508.06450).

    .. math::
       Y &= X + \mathrm{dropout}(\mathrm{Att}(\mathrm{LN}(X)) \odot \sigma(X W_a)) \\
       Z &= Y + \mathrm{dropout}(F(\mathrm{LN}(Y)) \odot \sigma(Y W_f)), \quad
       F(X) = \mathrm{dropout}(\mathrm{SiLU}(X W_1) \odot X W_2)\, W_3

    Att is softmax attention with biases, W_a and W_f have biases, the others don't. Norms have weights. The
    hidden width is four times a token's. Kernels start by Xavier's normal rule.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "bias_by_place": False, "bias_by_time": False})

    def build(self, input_shape: Any) -> None:
        """Create the weights for tokens of the given width."""
        dim = self.width(input_shape)
        query, value = self.heads * self.attention_dim, self.heads * self.value_dim
        with_bias = {
            "query": [dim, query],
            "key": [dim, query],
            "value": [dim, value],
            "output": [value, dim],
            "attention_gate": [dim, dim],
            "ffn_gate": [dim, dim],
        }
        shapes = {**with_bias, "ffn1": [dim, 4 * dim], "ffn2": [dim, 4 * dim], "ffn3": [4 * dim, dim]}
        self.kernels = {
            name: self.weight(f"{name}/kernel", shape, tf.keras.initializers.GlorotNormal)
            for name, shape in shapes.items()
        }
        self.biases = {
            name: self.weight(f"{name}/bias", [shape[1]], "zeros") for name, shape in with_bias.items()
        }
        self.norms = {
            name: self.weight(name, [dim], "ones" if name.endswith("scale") else "zeros")
            for name in ("attention/scale", "attention/offset", "ffn/scale", "ffn/offset")
        }
        super().build(input_shape)

    def transform(
        self, values: tf.Tensor, offsets: tf.Tensor, view: SequenceView, training: bool | None
    ) -> tf.Tensor:
        """(total, dim) -> (total, dim)."""
        asking = layer_norm(values, self.norms["attention/scale"], self.norms["attention/offset"])
        q, k, v = (self.by_head(self._linear(name, asking)) for name in ("query", "key", "value"))
        drop = lambda x: self.drop(x, training=training)  # noqa: E731
        found = softmax_attention(q, k, v, offsets, view.visible, 1 / math.sqrt(self.attention_dim), drop)
        found = self._linear("output", tf.reshape(found, [-1, self.heads * self.value_dim]))
        values += drop(found * tf.sigmoid(self._linear("attention_gate", values)))
        normed = layer_norm(values, self.norms["ffn/scale"], self.norms["ffn/offset"])
        first, second, third = (self.kernels[f"ffn{number}"] for number in (1, 2, 3))
        hidden = tf.nn.silu(tf.matmul(normed, first)) * tf.matmul(normed, second)
        mixed = tf.matmul(drop(hidden), third)
        return values + drop(mixed * tf.sigmoid(self._linear("ffn_gate", values)))

    def _linear(self, name: str, x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, self.kernels[name]) + self.biases[name]


class LiGR(SequenceStack):
    """Blocks of LiGR, one after another."""

    BLOCK = LiGRBlock

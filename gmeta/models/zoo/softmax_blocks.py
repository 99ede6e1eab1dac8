"""Backbones of softmax attention over jagged sequences: SASRec, and LiGR as eSASRec has it.

HSTU and FuXi-α, which `gmeta.layers` has, are compared with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gmeta.layers.sequence.block import SequenceBlock
from gmeta.layers.sequence.reading import AppendedPlace, Kept, SequenceView
from gmeta.layers.sequence.stack import SequenceStack
from gmeta.ops import Jagged, jagged
from gmeta.ops.hstu_layer import layer_norm
from gmeta.ops.jagged_attention import dense_mask


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

    READS_ON = True

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
        return self.read(values, offsets, view, training)[0]

    def read(
        self, values: tf.Tensor, offsets: tf.Tensor, view: SequenceView, training: bool | None
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """(total, dim) -> the same, and keys and values, (total, heads, d) each."""
        asking, q, k, v = self._ask(values)
        drop: Any = lambda x: self.drop(x, training=training)  # noqa: E731
        found = softmax_attention(q, k, v, offsets, view.visible, self._scale, drop)
        return self._leave(asking, found, training), k, v

    def read_on(
        self, values: tf.Tensor, kept: Kept, place: AppendedPlace, training: bool | None
    ) -> tuple[tf.Tensor, Kept]:
        """(batch, beams, dim), a token of each beam -> the same, and what is kept with its key and value."""
        batch, beams = tf.unstack(tf.shape(values)[:2])
        asking, *of_tokens = self._ask(tf.reshape(values, [batch * beams, values.shape[-1]]))
        q, k, v = (tf.reshape(x, [batch, beams, *x.shape[1:]]) for x in of_tokens)
        kept = kept.append(k, v)
        added, own_added = (x[:, :, tf.newaxis] for x in place.biases())
        q *= self._scale
        scores = tf.einsum("bnhd,bhkd->bnhk", q, kept.keys) + added
        own_scores = tf.linalg.matvec(kept.own_keys, q) + own_added
        weights = tf.nn.softmax(tf.concat([scores, own_scores], axis=-1))
        weights, own = tf.split(
            self.drop(weights, training=training), [tf.shape(x)[-1] for x in (scores, own_scores)], axis=-1
        )
        found = tf.einsum("bnhk,bhkd->bnhd", weights, kept.values)
        found += tf.linalg.matvec(kept.own_values, own, transpose_a=True)
        return tf.reshape(self._leave(asking, found, training), tf.shape(values)), kept

    @property
    def _scale(self) -> float:
        return 1 / math.sqrt(self.attention_dim)

    def _ask(self, values: tf.Tensor) -> list[tf.Tensor]:
        """Return the normed tokens, and their queries, keys and values, by head."""
        asking = layer_norm(values)
        named = (("query", asking), ("key", values), ("value", values))
        return [asking, *(self.by_head(self._linear(name, x)) for name, x in named)]

    def _leave(self, asking: tf.Tensor, found: tf.Tensor, training: bool | None) -> tf.Tensor:
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


# LiGR: softmax attention and SwiGLU, each let in by a gate.


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
        drop: Any = lambda x: self.drop(x, training=training)  # noqa: E731
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

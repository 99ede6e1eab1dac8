"""HSTU as users write it in stock Keras: padded sequences, a dense mask, the scores of all pairs."""

from __future__ import annotations

import math
from typing import Any

from gmeta.layers import HSTU
from gmeta.layers.sequence.hstu import HSTUBlock
from gmeta.layers.sequence.reading import SequenceView
from gmeta.ops import Jagged, jagged
from gmeta.ops.hstu_layer import layer_norm
from gmeta.ops.jagged_attention import dense_mask

import tensorflow as tf


class PaddedHSTU(HSTU):
    """An `HSTU` in its production form, without biases: the same weights and numbers, in padded arithmetic.

    A block computes padding too, as Keras' dense layers do. Sequences are padded, and the mask is made, once
    for all blocks.
    """

    def transform(
        self, values: tf.Tensor, offsets: tf.Tensor, view: SequenceView, training: bool | None
    ) -> tf.Tensor:
        """(total, dim) -> (total, dim)."""
        tokens = jagged.to_padded(Jagged(values, offsets))
        seen = tf.cast(dense_mask(view.visible, offsets), tokens.dtype)[:, tf.newaxis]
        for block in self.blocks:
            if not block.built:
                block.build([tokens.shape[1:]])
            tokens = _block(block, tokens, seen, training)
        return jagged.from_padded(tokens, offsets[1:] - offsets[:-1]).values


def _block(block: HSTUBlock, tokens: tf.Tensor, seen: tf.Tensor, training: bool | None) -> tf.Tensor:
    if block.form != "production" or block.bias_by_place or block.bias_by_time:
        raise ValueError("the padded form is written for the production form without biases")
    mixed = tf.matmul(layer_norm(tokens, block.norm_scale, block.norm_offset), block.uvqk) + block.uvqk_bias
    u, v, q, k = tf.split(mixed, block.sizes, axis=2)
    scores = tf.matmul(_by_head(block, q), _by_head(block, k), transpose_b=True)
    weights = tf.nn.silu(scores / math.sqrt(block.attention_dim)) * seen / block.max_length
    attended = tf.transpose(tf.matmul(weights, _by_head(block, v)), [0, 2, 1, 3])
    attended = tf.reshape(attended, tf.shape(v))
    u = tf.nn.silu(u)
    gated = [u, attended, u * layer_norm(attended, block.attended_scale, block.attended_offset)]
    return tokens + tf.matmul(block.drop(tf.concat(gated, axis=2), training=training), block.output_kernel)


def _by_head(block: Any, x: tf.Tensor) -> tf.Tensor:
    """(batch, heads, L, width)."""
    split = tf.reshape(x, tf.concat([tf.shape(x)[:2], [block.heads, x.shape[-1] // block.heads]], axis=0))
    return tf.transpose(split, [0, 2, 1, 3])

"""The same step by TFRA's HvdAllToAllEmbedding: a layer for each feature, under its own optimizer wrapper."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


@functools.cache
def make_tfra_step(dim: int, features: int) -> Any:
    """A compiled step of one layer for each feature; None where TFRA isn't installed or doesn't load."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tensorflow_recommenders_addons import dynamic_embedding as de
    except ImportError:
        return None
    layers = [
        de.keras.layers.HvdAllToAllEmbedding(
            embedding_size=dim,
            key_dtype=tf.int64,
            value_dtype=tf.float32,
            initializer=tf.keras.initializers.RandomUniform(-0.05, 0.05),
            name=f"tfra{dim}_{feature}",
        )
        for feature in range(features)
    ]
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.legacy.Adagrad(0.1))

    @tf.function
    def step(keys: Sequence[tf.Tensor]) -> tf.Tensor:
        with tf.GradientTape() as tape:
            vectors = [layer(part) for layer, part in zip(layers, keys, strict=True)]
            loss = tf.add_n([0.005 * tf.reduce_sum(vector * vector) for vector in vectors])
        variables = [variable for layer in layers for variable in layer.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step

"""Layers that compute a task's embedding and soft cluster assignment from its support set.

Attention, means and clusters are computed for each task alone; other tasks and padding have no influence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf


@tf.keras.saving.register_keras_serializable("gmeta")
class SelfAttention(tf.keras.layers.Layer):
    r"""One block of self-attention over a task's samples, then a mean over them.

    .. math:: A = X + \mathrm{softmax}\left(\frac{Q K^T}{\sqrt{d}}\right) V, \quad
       e = \frac{1}{|S|} \sum_s \mathrm{norm}\left(A'_s + \mathrm{ReLU}(A'_s W_1 + b_1) W_2 + b_2\right),
       \quad A' = \mathrm{norm}(A)

    Q, K and V are linear in X, which is linear in the samples; norm is layer normalization. Only real samples
    are attended to and averaged. The order of the samples has no influence.

    Vaswani et al. (2017), section 3.2.1, with one head.

    Args:
      dim: d.
      seed: The seed of the initial weights.

    Shapes:
      (tasks, samples, in), mask (tasks, samples) -> (tasks, d); a task without samples gets zeros.
    """

    def __init__(self, dim: int, seed: int = 0, name: str = "self_attention", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.dim, self.seed = dim, seed
        self._tokens = self._dense("tokens", 0)
        self._query, self._key, self._value = (
            self._dense(part, number, use_bias=False)
            for number, part in enumerate(("query", "key", "value"), 1)
        )
        self._hidden, self._out = self._dense("hidden", 4, activation="relu"), self._dense("out", 5)
        self._norms = [
            tf.keras.layers.LayerNormalization(name=f"norm{number}", dtype=self.dtype) for number in (1, 2)
        ]

    def call(self, x: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        """Compute the tasks' embeddings."""
        real = mask > 0
        x = self._tokens(tf.where(real[..., tf.newaxis], x, 0))
        scores = tf.matmul(self._query(x), self._key(x), transpose_b=True) / self.dim**0.5
        # exp(min - max) is exactly 0, so the weight of padding is exactly 0.
        weights = tf.nn.softmax(tf.where(real[:, tf.newaxis], scores, scores.dtype.min))
        x = self._norms[0](x + tf.matmul(weights, self._value(x)))
        x = self._norms[1](x + self._out(self._hidden(x)))
        return tf.math.divide_no_nan(
            tf.reduce_sum(tf.where(real[..., tf.newaxis], x, 0), axis=1),
            tf.reduce_sum(tf.cast(real, x.dtype), axis=1, keepdims=True),
        )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {**super().get_config(), "dim": self.dim, "seed": self.seed}

    def _dense(self, name: str, number: int, **options: Any) -> tf.keras.layers.Dense:
        start = tf.keras.initializers.GlorotUniform(seed=1000 * self.seed + number)
        return tf.keras.layers.Dense(
            self.dim, kernel_initializer=start, name=name, dtype=self.dtype, **options
        )


@tf.keras.saving.register_keras_serializable("gmeta")
class SoftClusters(tf.keras.layers.Layer):
    r"""HSML's soft assignment p of task embeddings e to K centres, and the clusters' outputs h.

    .. math:: p_k = \frac{\exp(-\|e - c_k\|^2 / 2 \sigma^2)}{\sum_j \exp(-\|e - c_j\|^2 / 2 \sigma^2)}, \quad
       h = \sum_k p_k \tanh(W_k e + b_k)

    Args:
      clusters: K.
      scale: How far from a centre tasks still belong to it: :math:`\sigma` divided by the square root of dim,
        because distances grow with that root.
      seed: The seed of the initial weights.

    Shapes:
      (tasks, dim) -> p (tasks, K), h (tasks, dim).
    """

    def __init__(
        self, clusters: int, scale: float = 1.0, seed: int = 0, name: str = "clusters", **kwargs: Any
    ) -> None:
        super().__init__(name=name, **kwargs)
        self.clusters, self.scale, self.seed = clusters, scale, seed

    def build(self, input_shape: tf.TensorShape) -> None:
        """Create the centres and the clusters' maps."""
        dim = int(input_shape[-1])
        normal = tf.keras.initializers.RandomNormal(seed=1000 * self.seed + 1, stddev=1.0)
        glorot = tf.keras.initializers.GlorotUniform(seed=1000 * self.seed + 2)
        self.centres = self.add_weight(name="centres", shape=[self.clusters, dim], initializer=normal)
        self.kernels = self.add_weight(name="kernels", shape=[self.clusters, dim, dim], initializer=glorot)
        self.biases = self.add_weight(name="biases", shape=[self.clusters, dim], initializer="zeros")
        super().build(input_shape)

    def call(self, e: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Compute the assignments p and the clusters' outputs h."""
        distances = tf.reduce_sum((e[:, tf.newaxis] - self.centres) ** 2, axis=-1)
        assigned = tf.nn.softmax(-distances / (2 * self.scale**2 * e.shape[-1]))
        told = tf.tanh(tf.einsum("td,kde->tke", e, self.kernels) + self.biases)
        return assigned, tf.einsum("tk,tke->te", assigned, told)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {**super().get_config(), "clusters": self.clusters, "scale": self.scale, "seed": self.seed}


class ParameterGate(tf.keras.layers.Layer):
    r"""Gates of each task for every number of the weights, :math:`\theta \circ \sigma(W [e; h] + b)`.

    Gates start at 0.88 and nearly equal for all tasks, so that training begins near the weights themselves.

    Args:
      seed: The seed of the initial weights.
    """

    def __init__(self, seed: int = 0, name: str = "gate", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self._seed = seed
        self._kernels: dict[str, tf.Variable] = {}
        self._biases: dict[str, tf.Variable] = {}

    def build_for(self, weights: Mapping[str, tf.Tensor], width: int) -> None:
        """Create gates for those weights, by name, that have none; ``width`` is the width of [e; h]."""
        start = tf.keras.initializers.RandomNormal(stddev=0.1 / width**0.5, seed=1000 * self._seed + 7)
        opened = tf.keras.initializers.Constant(2.0)
        for name, weight in weights.items():
            if name not in self._kernels:
                size = weight.shape.num_elements()
                self._kernels[name] = self.add_weight(f"{name}/kernel", [width, size], initializer=start)
                self._biases[name] = self.add_weight(f"{name}/bias", [size], initializer=opened)
        self.built = True

    def call(self, told: tf.Tensor, weights: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return name -> (tasks, ...): the start weights of each task."""
        return {
            name: weight * tf.reshape(self._gate(told, name), [-1, *weight.shape])
            for name, weight in weights.items()
        }

    def _gate(self, told: tf.Tensor, name: str) -> tf.Tensor:
        return tf.sigmoid(tf.matmul(told, self._kernels[name]) + self._biases[name])


def aspect_columns(widths: Sequence[tuple[str, int]], names: Sequence[str]) -> list[int]:
    """Return the columns of some features' vectors among all features' vectors side by side.

    Args:
      widths: The features' names and widths, in order.
      names: The features whose columns are returned.
    """
    found: list[int] = []
    first = 0
    for name, width in widths:
        found += range(first, first + width) if name in names else []
        first += width
    return found

"""Codebooks by RQ-VAE: an autoencoder whose latent vectors are quantized level by level."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gmeta.core.arguments import finite_number, whole_number
from gmeta.core.data.codebooks import Codebooks, Vectors, apply_layers, nearest
from gmeta.core.errors import ConfigError
from gmeta.core.keras import select_legacy_keras
from gmeta.preprocess.semantic.residual_kmeans import fit_residual_kmeans

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True)
class RqVae:
    """Settings of an RQ-VAE, by which `semantic_ids` can make codebooks in place of k-means.

    An encoder f and a decoder g of dense layers with ReLU between them, and codebooks e_l, minimize by Adam
    the mean over items of::

      |x - g(q)|² + Σ_l |sg[r_l] - e_l(c_l)|² + commitment · |r_l - sg[e_l(c_l)]|²

    Here x is the item's vector, shifted and scaled so that the vectors have mean 0 and variance 1 in all; q
    is the sum of the codes' vectors; r_l and c_l are as in `Codebooks`; and sg stops gradients. The gradient
    of q goes to f(x) unchanged. The codebooks begin as a residual k-means of f(x). After each epoch but those
    of the last fifth, codes that no item has are put where an item's r_l is.

    Args:
      width: Of the latent vectors.
      hidden: Widths of the encoder's layers before the latent ones, the decoder's in reverse.
      epochs: Passes over the items.
      batch: Items of a step.
      rate: Adam's learning rate.
      commitment: The weight above, >= 0.

    Raises:
      ConfigError: A number is out of its limits.

    Reference: Rajput et al., Recommender systems with generative retrieval, NeurIPS 2023, section 3.1;
    Zeghidour et al., SoundStream, 2021, for codes that are not in use.
    """

    width: int = 32
    hidden: tuple[int, ...] = (512, 256, 128)
    epochs: int = 200
    batch: int = 1024
    rate: float = 1e-3
    commitment: float = 0.25

    def __post_init__(self) -> None:
        for name in ("width", "epochs", "batch"):
            whole_number(f"RqVae: {name}", getattr(self, name), 1)
        for width in self.hidden:
            whole_number("RqVae: a width in hidden", width, 1)
        if finite_number("RqVae: rate", self.rate) <= 0:
            raise ConfigError(f"RqVae: rate must be above 0, got {self.rate}")
        if finite_number("RqVae: commitment", self.commitment) < 0:
            raise ConfigError(f"RqVae: commitment must be 0 or more, got {self.commitment}")


def fit_rq_vae(vectors: Vectors, levels: int, codes: int, settings: RqVae, seed: int) -> Codebooks:
    """Train an RQ-VAE.

    Args:
      vectors: float32 (n, dim).
      levels: How many levels.
      codes: Codes of a level at most.
      settings: The `RqVae`.
      seed: Of the first weights, the order of items and the codes that are put elsewhere.

    Returns:
      The codebooks, with the encoder.
    """
    mean = vectors.mean(axis=0)
    scale = float(np.sqrt(np.mean((vectors - mean) ** 2))) or 1.0
    inputs = ((vectors - mean) / scale).astype(np.float32)
    model = _Autoencoder(inputs, levels, codes, settings, seed)
    for epoch in range(settings.epochs):
        model.train()
        if epoch < settings.epochs * 4 // 5:
            model.replace_unused()
    (kernel, bias), *rest = model.encoder()
    first = (kernel / scale).astype(np.float32), (bias - mean / scale @ kernel).astype(np.float32)
    return Codebooks(tuple(book.numpy() for book in model.books), (first, *rest))


class _Autoencoder:
    def __init__(self, inputs: Vectors, levels: int, codes: int, settings: RqVae, seed: int) -> None:
        select_legacy_keras()
        import tensorflow as tf

        self._inputs, self._settings = inputs, settings
        self._random = np.random.default_rng(seed)
        widths = (inputs.shape[1], *settings.hidden, settings.width)
        self._down = self._layers(widths)
        self._up = self._layers(widths[::-1])
        latent = apply_layers(self.encoder(), inputs)
        books, _ = fit_residual_kmeans(latent, levels, codes, balanced=False, seed=seed)
        self.books = [tf.Variable(book) for book in books]
        self._adam = tf.keras.optimizers.legacy.Adam(settings.rate)
        self._step = tf.function(
            self._train_on, input_signature=[tf.TensorSpec([None, widths[0]], tf.float32)]
        )

    def encoder(self) -> tuple[tuple[Vectors, Vectors], ...]:
        """Return the encoder's layers."""
        return tuple((kernel.numpy(), bias.numpy()) for kernel, bias in self._down)

    def train(self) -> None:
        """Take a step for each batch of the items, in a new order."""
        order = self._random.permutation(len(self._inputs))
        for first in range(0, len(order), self._settings.batch):
            self._step(self._inputs[order[first : first + self._settings.batch]])

    def replace_unused(self) -> None:
        """Put codes that no item has where an item's rest is."""
        left = apply_layers(self.encoder(), self._inputs)
        for book in self.books:
            level = book.numpy()
            unused = np.flatnonzero(np.bincount(nearest(left, level), minlength=len(level)) == 0)
            if len(unused):
                level[unused] = left[self._random.integers(0, len(left), len(unused))]
                book.assign(level)
            left = left - level[nearest(left, level)]

    def _layers(self, widths: tuple[int, ...]) -> list[tuple[tf.Variable, tf.Variable]]:
        import tensorflow as tf

        layers = []
        for inner, outer in pairwise(widths):
            most = np.sqrt(6 / (inner + outer))  # Glorot and Bengio
            kernel = self._random.uniform(-most, most, (inner, outer)).astype(np.float32)
            layers.append((tf.Variable(kernel), tf.Variable(tf.zeros([outer]))))
        return layers

    def _train_on(self, x: tf.Tensor) -> None:
        import tensorflow as tf

        def mean_square(difference: tf.Tensor) -> tf.Tensor:
            return tf.reduce_mean(tf.reduce_sum(difference**2, axis=1))

        stop = tf.stop_gradient
        with tf.GradientTape() as tape:
            latent = _apply(self._down, x)
            left, loss = latent, tf.zeros([])
            for book in self.books:
                distances = tf.reduce_sum(book**2, axis=1) - 2 * tf.matmul(left, book, transpose_b=True)
                code = tf.gather(book, tf.argmin(distances, axis=1))
                loss += mean_square(stop(left) - code)
                loss += self._settings.commitment * mean_square(left - stop(code))
                left -= stop(code)
            loss += mean_square(x - _apply(self._up, latent - stop(left)))
        weights = [*self.books, *(weight for layer in (*self._down, *self._up) for weight in layer)]
        self._adam.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


def _apply(layers: list[tuple[Any, Any]], x: tf.Tensor) -> tf.Tensor:
    import tensorflow as tf

    for number, (kernel, bias) in enumerate(layers):
        x = tf.matmul(x, kernel) + bias
        if number + 1 < len(layers):
            x = tf.nn.relu(x)
    return x

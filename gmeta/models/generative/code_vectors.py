"""The vectors of codes, and the logits that they make of queries."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class CodeVectors(tf.keras.layers.Layer):
    r"""A vector of each code of each level, which start at N(0, 1 / d²), and biases of logits.

    .. math:: p(d_l \mid q) = \mathrm{softmax}(C_l q + b_l)

    over what may follow.

    Args:
      sizes: How many codes each level has.
      depth: How many levels have logits.
      dim: d.
      seed: Of initial values.
    """

    def __init__(self, sizes: Sequence[int], depth: int, dim: int, *, seed: int) -> None:
        super().__init__(name="scorer")
        self.books, self.depth, self.dim = tuple(sizes), depth, dim
        self.vectors = self.add_weight(
            name="vectors",
            shape=(sum(self.books), dim),
            initializer=tf.keras.initializers.TruncatedNormal(stddev=1 / dim, seed=seed),
        )
        self.biases = [
            self.add_weight(name=f"bias{level}", shape=(size,), initializer="zeros")
            for level, size in enumerate(self.books[:depth])
        ]
        # A last level that numbers items has more codes when items are added (`gmeta.checkpoint`).
        for grown in (self.vectors, *self.biases[-1:]):
            grown.grows = True
        self.built = True

    def code_logits(self, level: int, query: tf.Tensor) -> tf.Tensor:
        """Compute the logits of a level, (n, d) -> (n, codes)."""
        return tf.matmul(query, self.of_level(level), transpose_b=True) + self.biases[level]

    def of_level(self, level: int) -> tf.Tensor:
        """Return C of a level, (codes, d)."""
        begin = sum(self.books[:level])
        return self.vectors[begin : begin + self.books[level]]

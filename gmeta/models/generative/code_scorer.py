"""The probabilities of items' digits, from vectors of histories, of codes and of items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.semantic_ids import SemanticIds
from gmeta.models.generative.code_tables import CodeTables
from gmeta.models.generative.digit_decoder import DigitDecoder
from gmeta.ops import jagged

# The vectors of codes, and the logits that they make of queries.


class CodeVectors(tf.keras.layers.Layer):
    r"""A vector of each code of each level, which start at N(0, 1 / d²), and biases of logits.

    .. math:: p(d_l \mid q) = \mathrm{softmax}(C_l q + b_l)

    over what may follow.

    Args:
      sizes: The number of codes of each level.
      depth: The number of levels with logits.
      dim: d.
      seed: The seed of initial values.
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


class CodeScorer(CodeVectors):
    r"""The vectors C of codes, and the decoder whose queries are compared with them.

    .. math::
       v_j &= E[j] + \textstyle\sum_l C_l[d_{jl}], \quad
       p(d_l \mid d_1 \dots d_{l-1}, h) = \mathrm{softmax}(C_l q_l + b_l) \\
       p(j \mid d_1 \dots d_D, h) &= \mathrm{softmax}_j(q_{D+1} \cdot v_j + \beta_j)

    each over what may follow, with the queries q of `DigitDecoder`.

    Args:
      ids: The semantic ids.
      depth: D, how many codes are generated as digits.
      dim: d, the width of h and E.
      width: The width of the decoder's tokens.
      seed: The seed of initial values and dropout.
      **decoder: Further arguments of `DigitDecoder`.
    """

    def __init__(
        self, ids: SemanticIds, depth: int, dim: int, *, width: int, seed: int, **decoder: Any
    ) -> None:
        super().__init__(ids.codebooks.sizes, depth, dim, seed=seed)
        self.codes = CodeTables(ids, depth)
        self.decoder = DigitDecoder(self.books[:depth], dim, width=width, seed=seed, **decoder)

    def call(
        self,
        h: tf.Tensor,
        items: tf.Tensor,
        siblings: tf.Tensor,
        rows: tf.Tensor,
        biases: tf.Tensor,
        allowed: Any = None,
        training: bool | None = None,
    ) -> tf.Tensor:
        """Compute the logs of the probabilities of items' digits.

        Args:
          h: (n, d).
          items: (n,) numbers of items.
          siblings: (n, c), the result of `siblings`.
          rows: (n * c, d), their rows E.
          biases: (n, c), added to their logits.
          allowed: For each level bool (nodes,), as `CodeTrie.allow` returns it; None: all are allowed.
          training: Whether to apply dropout.

        Returns:
          (n, D + 1); -inf from the first digit on that leads to no allowed item.
        """
        tables, found = self.codes, []
        queries = self.decoder(h, tf.gather(tables.codes[:, : self.depth], items), training=training)
        for level in range(tables.levels):
            query = queries[:, level]
            if level < self.depth:
                logits = self.code_logits(level, query)
            else:
                logits = self.item_logits(query, siblings, rows, biases)
            found.append(tables.log_probs(level, logits, items, allowed))
        return tf.stack(found, axis=1)

    def item_logits(
        self, query: tf.Tensor, siblings: tf.Tensor, rows: tf.Tensor, biases: tf.Tensor
    ) -> tf.Tensor:
        """Compute the logits of the last level, (n, c).

        Siblings share the generated codes, which would add the same to all logits, so these aren't added.
        """
        own = tf.reshape(rows, [-1, self.codes.sizes[-1], self.dim])
        logits = tf.linalg.matvec(own, query) + biases
        for level in range(self.depth, len(self.books)):
            products = tf.matmul(query, self.of_level(level), transpose_b=True)
            logits += tf.gather(products, tf.gather(self.codes.codes[:, level], siblings), batch_dims=1)
        return logits

    def with_codes(self, rows: tf.Tensor, items: tf.Tensor) -> tf.Tensor:
        """Compute v of items, (n, d), from their rows E; of an unknown item, -1, it is the row."""
        known = tf.cast(items >= 0, rows.dtype)[:, tf.newaxis]
        codes = tf.gather(self.codes.codes, tf.maximum(items, 0)) + self.codes.begins
        vectors = jagged.take(tf.convert_to_tensor(self.vectors), codes)
        return rows + known * tf.reduce_sum(vectors, axis=1)

    def siblings(self, items: tf.Tensor) -> tf.Tensor:
        """Return the items that share the generated codes with items, padded with other items: (n, c)."""
        return self.codes.siblings(self.codes.parents(items, self.depth))

"""Ways down the trie of codes: the likeliest, and drawn ones. The history is read once, before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gmeta.models.generative.code_tables import CodeTables
from gmeta.models.generative.digit_decoder import DigitDecoder, Past
from gmeta.ops.trie import trie_step

LastLogits = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
"""(n, d) queries, (n,) nodes of the last level but one, (n,) users -> (n, most items of a node)."""


class CodeWalk:
    """The beams of a batch of users, which go down the trie a digit a step.

    Args:
      decoder: The decoder.
      tables: The codes.
      h: (users, d), what is known of the histories.
      last: Computes the logits of the last level.
    """

    def __init__(self, decoder: DigitDecoder, tables: CodeTables, h: tf.Tensor, last: LastLogits) -> None:
        self.decoder, self.tables, self.h, self._last = decoder, tables, h, last
        self._entered, self._past = decoder.start(h), ()
        self.level, self.users = 0, tf.shape(h)[0]

    def logits(self, nodes: tf.Tensor, beams: tf.Tensor | None) -> tf.Tensor:
        """Compute the logits of the children of nodes, and go to the next level.

        Args:
          nodes: (users, beams) int64; what stands at -1 doesn't matter.
          beams: (users, beams) int32, the beam of the step before that each comes from; None at the root.

        Returns:
          float32 (users, beams, codes).
        """
        level, many = self.level, tf.shape(nodes)[1]
        nodes = tf.reshape(tf.maximum(nodes, 0), [-1])
        users = tf.repeat(tf.range(self.users), many)
        digits = None
        if beams is not None:
            digits = tf.gather(self.tables.digits[level - 1], nodes)
            self._past = self._follow(tf.maximum(beams, 0))
        out, self._past = self.decoder.step(tf.gather(self._entered, users), digits, self._past, level)
        self.level += 1
        if level + 1 < self.tables.levels:
            found = self.decoder.logits(out, level)
        else:
            query = self.decoder.query(tf.gather(self.h, users), out)
            found = self._last(query, nodes, tf.cast(users, tf.int64))
        return tf.reshape(found, [self.users, many, self.tables.sizes[level]])

    def _follow(self, beams: tf.Tensor) -> Past:
        """Give each beam the keys and values of the one that it comes from."""
        former = tf.shape(self._past[0][0])[0] // tf.maximum(self.users, 1) if self._past else 1
        rows = tf.reshape(beams + tf.range(self.users)[:, tf.newaxis] * former, [-1])
        return tuple((tf.gather(keys, rows), tf.gather(values, rows)) for keys, values in self._past)


def likeliest(walk: CodeWalk, k: int, beam: int, allowed: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Find the likeliest items by a beam search.

    Args:
      walk: A walk at the root.
      k: How many items.
      beam: How many prefixes are kept at each level, >= k.
      allowed: For each level bool (nodes,), as of `CodeTrie.allow`; None: all may come out.

    Returns:
      (users, k) int64 numbers of items, the likeliest first, -1 where there are fewer; and (users, k)
      float32, the logs of their probabilities.
    """
    tables = walk.tables
    scores, nodes = tf.zeros([walk.users, 1]), tf.zeros([walk.users, 1], tf.int64)
    beams = None
    for level in range(tables.levels):
        last = level + 1 == tables.levels
        step = trie_step(
            walk.logits(nodes, beams),
            scores,
            nodes,
            tables.starts[level],
            tables.digits[level],
            None if allowed is None else allowed[level],
            k=k if last else min(beam, int(tables.digits[level].shape[0])),
        )
        scores, nodes, beams = step
    return tf.where(nodes < 0, nodes, tf.gather(tables.items, tf.maximum(nodes, 0))), scores

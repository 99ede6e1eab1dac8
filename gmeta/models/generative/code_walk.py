"""Beams that go down the trie of codes. The history is read once, before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from gmeta.models.generative.code_tables import CodeTables
from gmeta.models.generative.digit_decoder import DigitDecoder, Past

Logits = Callable[[int, tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
"""A level, queries (n, d), their nodes (n,) and users (n,) -> logits of the nodes' children, (n, codes)."""


class Walk(Protocol):
    """The beams of a batch of users, which go down the trie a digit a step.

    Attributes:
      tables: The codes.
      users: How many users there are, () int32.
      levels: Of how many levels the logits are of codes, also of those that no item has.
    """

    tables: CodeTables
    users: tf.Tensor
    levels: int

    def logits(self, nodes: tf.Tensor, beams: Any = None, digits: Any = None) -> tf.Tensor:
        """Compute the logits of the children of nodes, and go to the next level.

        Args:
          nodes: (users, beams) int64; what stands at -1 doesn't matter.
          beams: (users, beams) int32, the beam of the step before that each comes from; None at the root.
          digits: (users, beams) int32, the digits that lead to them. None: those of the nodes.

        Returns:
          float32 (users, beams, codes).
        """


class CodeWalk:
    """A `Walk` by a decoder, for which the history is a vector.

    Args:
      decoder: The decoder.
      tables: The codes.
      h: (users, d), what is known of the histories.
      logits: Computes the logits of a level.
    """

    def __init__(self, decoder: DigitDecoder, tables: CodeTables, h: tf.Tensor, logits: Logits) -> None:
        self.decoder, self.tables, self.h, self._logits = decoder, tables, h, logits
        self._entered = decoder.start(h)
        self._past: Past = ()
        self.level, self.users, self.levels = 0, tf.shape(h)[0], tables.levels - 1

    def logits(self, nodes: tf.Tensor, beams: Any = None, digits: Any = None) -> tf.Tensor:
        """Compute the logits of the children of nodes, as of `Walk`."""
        level, many = self.level, tf.shape(nodes)[1]
        users = tf.repeat(tf.range(self.users), many)
        if beams is not None:
            digits = self.tables.digits_at(level, nodes) if digits is None else digits
            digits = tf.reshape(digits, [-1])
            self._past = self._follow(tf.maximum(beams, 0))
        nodes = tf.reshape(tf.maximum(nodes, 0), [-1])
        h, entered = tf.gather(self.h, users), tf.gather(self._entered, users)
        query, self._past = self.decoder.step(h, entered, digits, self._past, level)
        self.level += 1
        found = self._logits(level, query, nodes, tf.cast(users, tf.int64))
        return tf.reshape(found, [self.users, many, self.tables.sizes[level]])

    def _follow(self, beams: tf.Tensor) -> Past:
        """Give each beam the keys and values of the one that it comes from."""
        former = tf.shape(self._past[0][0])[0] // tf.maximum(self.users, 1) if self._past else 1
        rows = tf.reshape(beams + tf.range(self.users)[:, tf.newaxis] * former, [-1])
        return tuple((tf.gather(keys, rows), tf.gather(values, rows)) for keys, values in self._past)

"""Ways down the trie of codes: the likeliest, and drawn ones. The history is read once, before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gmeta.models.generative.code_tables import CodeTables
from gmeta.models.generative.digit_decoder import DigitDecoder, Past
from gmeta.ops import TrieNoise, TrieStep, trie_gumbel_step, trie_sample, trie_step

Logits = Callable[[int, tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
"""A level, queries (n, d), their nodes (n,) and users (n,) -> logits of the nodes' children, (n, codes)."""
Noise = Callable[[int], TrieNoise]
"""The noise of a level."""


class CodeWalk:
    """The beams of a batch of users, which go down the trie a digit a step.

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

    def step(level: int, *beams: Any) -> TrieStep:
        last = level + 1 == tables.levels
        return trie_step(*beams, k=k if last else min(beam, int(tables.digits[level].shape[0])))

    return _go_down(walk, 1, allowed, step)


def independent(walk: CodeWalk, group: int, noise: Noise, allowed: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Draw items with replacement, each by its probability, whatever the others are.

    Args:
      walk: A walk at the root.
      group: How many items a user.
      noise: The noise of a level.
      allowed: As for `likeliest`.

    Returns:
      As `likeliest`, in the order of draws.
    """

    def step(level: int, *beams: Any) -> TrieStep:
        return trie_sample(*beams, noise=noise(level))

    return _go_down(walk, group, allowed, step)


def distinct(walk: CodeWalk, group: int, noise: Noise, allowed: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Draw items without replacement, by a stochastic beam search.

    Args:
      walk: A walk at the root.
      group: How many items a user.
      noise: The noise of a level.
      allowed: As for `likeliest`.

    Returns:
      As `likeliest`, in the order of draws.
    """
    ranks = tf.zeros([walk.users, 1])

    def step(level: int, logits: tf.Tensor, scores: tf.Tensor, *beams: Any) -> TrieStep:
        nonlocal ranks
        *found, ranks = trie_gumbel_step(logits, scores, ranks, *beams, k=group, noise=noise(level))
        return TrieStep(*found)

    return _go_down(walk, 1, allowed, step)


def _go_down(
    walk: CodeWalk, group: int, allowed: Any, step: Callable[..., TrieStep]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Take a step a level, from ``group`` beams at the root on; a step has the arguments of `trie_step`."""
    tables = walk.tables
    scores, nodes = tf.zeros([walk.users, group]), tf.zeros([walk.users, group], tf.int64)
    beams = None
    for level in range(tables.levels):
        may = None if allowed is None else allowed[level]
        logits = walk.logits(nodes, beams)
        scores, nodes, beams = step(
            level, logits, scores, nodes, tables.starts[level], tables.digits[level], may
        )
    return tables.items_of(nodes), scores

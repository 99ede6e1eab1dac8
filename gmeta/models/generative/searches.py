"""Searches and draws in the trie of codes, the probabilities of given items, and a search without a trie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gmeta.models.generative.digit_decoder import Walk
from gmeta.ops.trie import TrieStep, trie_step
from gmeta.ops.trie_draws import TrieNoise, trie_gumbel_step, trie_sample

Noise = Callable[[int], TrieNoise]
"""The noise of a level."""


def likeliest(walk: Walk, k: int, beam: int, allowed: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Find the likeliest items by a beam search.

    Args:
      walk: A walk at the root.
      k: How many items.
      beam: How many prefixes are kept at each level, >= k.
      allowed: For each level bool (nodes,), as `CodeTrie.allow` returns it; None: all are allowed.

    Returns:
      (users, k) int64 numbers of items, the likeliest first, -1 where there are fewer; and (users, k)
      float32, the logs of their probabilities.
    """
    tables = walk.tables

    def step(level: int, *beams: Any) -> TrieStep:
        last = level + 1 == tables.levels
        return trie_step(*beams, k=k if last else min(beam, int(tables.digits[level].shape[0])))

    return _go_down(walk, 1, allowed, step)


def independent(walk: Walk, group: int, noise: Noise, allowed: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Draw items with replacement, each by its probability, whatever the others are.

    Args:
      walk: A walk at the root.
      group: The number of items per user.
      noise: The noise of a level.
      allowed: As for `likeliest`.

    Returns:
      As `likeliest`, in the order of draws.
    """

    def step(level: int, *beams: Any) -> TrieStep:
        return trie_sample(*beams, noise=noise(level))

    return _go_down(walk, group, allowed, step)


def distinct(walk: Walk, group: int, noise: Noise, allowed: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Draw items without replacement, by a stochastic beam search.

    Args:
      walk: A walk at the root.
      group: The number of items per user.
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


def of_items(walk: Walk, items: tf.Tensor, allowed: Any = None) -> tf.Tensor:
    """Compute the logs of the probabilities of given items' digits.

    Args:
      walk: A walk at the root.
      items: (users, group) numbers of items.
      allowed: As for `likeliest`.

    Returns:
      float32 (users, group, L); -inf from the first digit on that leads to no allowed item.
    """
    tables, found, flat = walk.tables, [], tf.reshape(items, [-1])
    beams = tf.broadcast_to(tf.range(tf.shape(items)[1]), tf.shape(items))
    for level in range(tables.levels):
        logits = walk.logits(tables.parents(items, level), beams if level else None)
        logits = tf.reshape(logits, [-1, tables.sizes[level]])
        found.append(tables.log_probs(level, logits, flat, allowed))
    return tf.reshape(tf.stack(found, axis=-1), tf.concat([tf.shape(items), [tables.levels]], axis=0))


def without_trie(walk: Walk, k: int, beam: int) -> tf.Tensor:
    """Find the likeliest among all possible codes, and return which of them belong to items.

    Each digit's probabilities are normalised over all codes of its level, as in a model without a trie.

    Args:
      walk: A walk at the root.
      k: How many codes.
      beam: How many prefixes are kept at each level, >= k.

    Returns:
      bool (users, k), or fewer where there are fewer codes.
    """
    tables = walk.tables
    scores, nodes = tf.zeros([walk.users, 1]), tf.zeros([walk.users, 1], tf.int64)
    beams = digits = None
    many = 1
    for level in range(walk.levels):
        size = tables.sizes[level]
        many = min(many * size, k if level + 1 == walk.levels else beam)
        reached = scores[:, :, tf.newaxis] + tf.nn.log_softmax(walk.logits(nodes, beams, digits))
        scores, places = tf.math.top_k(tf.reshape(reached, [walk.users, tf.shape(nodes)[1] * size]), many)
        beams, digits = places // size, places % size
        nodes = tables.child(level, tf.gather(nodes, beams, batch_dims=1), digits)
    return nodes >= 0


def _go_down(
    walk: Walk, group: int, allowed: Any, step: Callable[..., TrieStep]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Take one step per level from ``group`` beams at the root; a step has the arguments of `trie_step`."""
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

"""One step of a beam search over a trie."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.native import load_op_library
from gmeta.ops.portable import is_portable
from gmeta.ops.trie.level import Level
from gmeta.ops.trie.portable_step import best_children

_native = load_op_library("ops")
tf.no_gradient("GmetaTrieStep")


class TrieStep(NamedTuple):
    """The beams after a step, the best first; where there are fewer than k, -1 and a score of -inf.

    Attributes:
      scores: Logs of probabilities, float32 (users, k).
      nodes: Nodes of the next level, int64 (users, k).
      beams: Which beam each comes from, int32 (users, k).
    """

    scores: tf.Tensor
    nodes: tf.Tensor
    beams: tf.Tensor


def trie_step(
    logits: Any, scores: Any, nodes: Any, starts: Any, digits: Any, allowed: Any = None, *, k: int
) -> TrieStep:
    """Extend each user's beams by one digit, and keep the k best.

    A beam at node i with score s and logits z gives its child c the score::

      s + z[digits[c]] - log Σ exp(z[digits[c']]),   c' over the allowed children of i

    So the probabilities of a node's children sum to its own, and no code comes out that no item has. Equal
    scores are ordered by SplitMix64 of the node, the smaller first, and those of one node by the beam. There
    is no gradient.

    Args:
      logits: float32 (users, beams, codes), of the next digit.
      scores: float32 (users, beams).
      nodes: int64 (users, beams), nodes of this level; -1: there is no beam.
      starts: int64 (nodes + 1,), as `gmeta.core.data.code_trie.CodeTrie` has them for a level.
      digits: int32 (children,), of the same.
      allowed: bool (children,), which children may come out (`CodeTrie.allow`); None: all.
      k: How many beams to keep, >= 1.

    Returns:
      `TrieStep`.

    Raises:
      ConfigError: ``k`` is no such number.
      tf.errors.InvalidArgumentError: Shapes don't fit each other, a node isn't of the level, a digit that is
        read isn't there, a score is NaN, or logits that are read hold NaN or infinity. The error names the
        user and the beam.

    Example:
      >>> from gmeta.core.data.code_trie import CodeTrie
      >>> trie = CodeTrie.of(np.array([[0], [2]]))
      >>> step = trie_step([[[5.0, 9.0, 5.0]]], [[0.0]], [[0]], trie.starts[0], trie.digits[0], k=2)
      >>> tf.exp(step.scores).numpy()
      array([[0.5, 0.5]], dtype=float32)

    Reference: Rajput et al., Recommender systems with generative retrieval, NeurIPS 2023, section 3.2.
    """
    whole_number("trie_step: k", k, 1)
    logits = tf.convert_to_tensor(logits, tf.float32)
    scores = tf.convert_to_tensor(scores, tf.float32)
    nodes = tf.convert_to_tensor(nodes, tf.int64)
    level = Level.of(starts, digits, allowed)
    if is_portable():
        return TrieStep(*map(tf.stop_gradient, best_children(level, logits, scores, nodes, k)))
    return TrieStep(
        *_native.gmeta_trie_step(logits=logits, scores=scores, nodes=nodes, **level.inputs(), k=k)
    )

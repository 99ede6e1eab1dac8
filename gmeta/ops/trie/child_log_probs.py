"""The log of a child's probability among its siblings in a trie, for training."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.graph.conditions import assert_first
from gmeta.core.native import load_op_library
from gmeta.ops.portable import is_portable
from gmeta.ops.trie.level import Level
from gmeta.ops.trie.portable_form import siblings_of

_native = load_op_library("ops")


def trie_log_probs(
    logits: Any, nodes: Any, children: Any, starts: Any, digits: Any, allowed: Any = None
) -> tf.Tensor:
    """Compute the log of the probability with which each node is followed by its child.

    With the logits z of a row, whose node is i and whose child is c::

      y = z[digits[c]] - log Σ exp(z[digits[c']]),   c' over the allowed children of i

    So the sum over the levels of an item's code is the log of the item's probability, and the probabilities
    of all items sum to one: a loss by it spends nothing on codes that no item has. The gradient to the logits
    is 1 at the child less the probabilities of all that are allowed, and 0 elsewhere. A child whose logit is
    87 or more below its greatest sibling's adds nothing to the sum.

    Args:
      logits: float32 (n, codes), of the digit that follows.
      nodes: int64 (n,), nodes of this level.
      children: int64 (n,), nodes of the next level, each a child of its node; -1: none, which gives 0 and no
        gradient, whatever its node is.
      starts: int64 (nodes + 1,), as `gmeta.core.data.code_trie.CodeTrie` has them for a level.
      digits: int32 (children,), of the same.
      allowed: bool (children,), which children may come out (`CodeTrie.allow`); None: all.

    Returns:
      float32 (n,), at most 0; -inf where the child's logit is that.

    Raises:
      tf.errors.InvalidArgumentError: Shapes don't fit each other, a node isn't of the level, a child isn't
        its node's or isn't allowed, a digit is out of range, or logits that are read hold NaN or infinity.
        The error names the row.

    Example:
      >>> from gmeta.core.data.code_trie import CodeTrie
      >>> trie = CodeTrie.of(np.array([[0], [2]]))
      >>> y = trie_log_probs([[5.0, 9.0, 5.0]], [0], [1], trie.starts[0], trie.digits[0])
      >>> tf.exp(y).numpy()
      array([0.5], dtype=float32)

    Reference: Rajput et al., Recommender systems with generative retrieval, NeurIPS 2023, section 3.2, there
    over all codes.
    """
    logits = tf.convert_to_tensor(logits, tf.float32)
    nodes = tf.convert_to_tensor(nodes, tf.int64)
    children = tf.convert_to_tensor(children, tf.int64)
    level = Level.of(starts, digits, allowed)
    if is_portable():
        return _portable(logits, nodes, children, level)
    return _native.gmeta_trie_log_probs(logits=logits, nodes=nodes, children=children, **level.inputs())


def _portable(logits: tf.Tensor, nodes: tf.Tensor, children: tf.Tensor, level: Level) -> tf.Tensor:
    is_row = children != -1
    siblings = siblings_of("trie_log_probs", level, tf.where(is_row, nodes, -1), logits)
    chosen = (siblings.nodes == children[:, None]) & is_row[:, None]
    told = [
        "trie_log_probs: a child must be its node's, and allowed; got nodes",
        nodes,
        "and children",
        children,
    ]
    chosen = assert_first(chosen, tf.reduce_any(chosen, axis=1) | ~is_row, told)
    return tf.reduce_sum(tf.where(chosen, siblings.log_probs, 0.0), axis=1)


@tf.RegisterGradient("GmetaTrieLogProbs")
def _gradient(op: tf.Operation, of_log_probs: tf.Tensor) -> list[tf.Tensor | None]:
    found = _native.gmeta_trie_log_probs_gradient(of_log_probs, *op.inputs)
    return [found, None, None, None, None, None]


@tf.RegisterGradient("GmetaTrieLogProbsGradient")
def _second_gradient(op: tf.Operation, upstream: tf.Tensor) -> list[tf.Tensor | None]:
    """Differentiate the plain form, for inner loops that adapt weights below."""
    of_log_probs, logits, nodes, children, starts, digits, allowed = op.inputs
    # An empty mask allows all, and has no other meaning: so has one of all True.
    level = Level(starts, digits, tf.cond(tf.size(allowed) > 0, lambda: allowed, lambda: digits >= 0))
    with tf.GradientTape() as outer:
        outer.watch([of_log_probs, logits])
        with tf.GradientTape() as inner:
            inner.watch(logits)
            y = _portable(logits, nodes, children, level)
        first = inner.gradient(y, logits, of_log_probs)
    return [*outer.gradient(first, [of_log_probs, logits], upstream), *[None] * 5]

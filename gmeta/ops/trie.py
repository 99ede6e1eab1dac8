"""One step of a beam search over a trie."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from gmeta.core.errors import whole_number
from gmeta.core.graph import assert_first
from gmeta.core.native import load_op_library
from gmeta.core.shares import splitmix64_tensor
from gmeta.ops.device import is_portable

# A level of a trie, as input of ops.

_NO_MASK = np.zeros(0, np.bool_)


class Level(NamedTuple):
    """A level of a trie, as in `gmeta.models.generative.code_tables.CodeTrie`.

    Attributes:
      starts: int64 (nodes + 1,).
      digits: int32 or int64 (children,).
      allowed: bool (children,), or None.
    """

    starts: tf.Tensor
    digits: tf.Tensor
    allowed: tf.Tensor | None

    @classmethod
    def of(cls, starts: Any, digits: Any, allowed: Any) -> Level:
        """Create a level from anything that converts to tensors of these dtypes; int64 digits stay int64."""
        wide = getattr(digits, "dtype", None) in (tf.int64, np.int64)
        return cls(
            tf.convert_to_tensor(starts, tf.int64),
            tf.convert_to_tensor(digits, tf.int64 if wide else tf.int32),
            None if allowed is None else tf.convert_to_tensor(allowed, tf.bool),
        )

    def inputs(self) -> dict[str, Any]:
        """Return the inputs of a native op, in which an empty mask means no mask."""
        allowed = _NO_MASK if self.allowed is None else self.allowed
        return {"starts": self.starts, "digits": self.digits, "allowed": allowed}


# The children of nodes and their log-probabilities, in TensorFlow ops.

_FAR = -87.0
"""Logits this far below the greatest sibling's are ignored, as in the native form."""


class Siblings(NamedTuple):
    """The children of nodes, side by side; `most` is the maximum number of children of a node.

    Attributes:
      nodes: int64 (..., most), their numbers; -1 if a node has fewer.
      log_probs: float32 (..., most), -inf for missing ones.
    """

    nodes: tf.Tensor
    log_probs: tf.Tensor


def siblings_of(name: str, level: Level, nodes: tf.Tensor, logits: tf.Tensor) -> Siblings:
    """Compute the same as `ops/trie/host/siblings.h`, for nodes of any shape.

    Args:
      name: The op, for messages.
      level: The level of the nodes.
      nodes: int64 (...); -1: no node.
      logits: float32 (..., codes).

    Returns:
      `Siblings`, with a gradient to logits.
    """
    count = tf.size(level.starts, tf.int64) - 1
    there = [tf.reduce_min(nodes), "to", tf.reduce_max(nodes), "of", count]
    nodes = assert_first(nodes, nodes < count, [f"{name}: nodes must be of the level, got", *there])
    at = tf.maximum(nodes, 0)
    first = tf.gather(level.starts, at)
    counts = tf.where(nodes < 0, tf.zeros_like(nodes), tf.gather(level.starts, at + 1) - first)
    most = tf.maximum(tf.reduce_max(counts), 0)  # the maximum of no counts is below 0
    places = tf.range(most)
    is_child = places < counts[..., None]
    children = tf.where(is_child, first[..., None] + places, tf.zeros((), tf.int64))
    if level.allowed is not None:
        is_child &= tf.gather(level.allowed, children)
    digits = tf.where(is_child, tf.cast(tf.gather(level.digits, children), tf.int64), 0)
    codes = tf.shape(logits, tf.int64)[-1]
    told = [f"{name}: digits must be below the number of logits,", codes, "got", tf.reduce_max(digits)]
    digits = assert_first(digits, (digits >= 0) & (digits < codes), told)
    z = tf.gather(logits, digits, batch_dims=nodes.shape.rank)
    minus = tf.constant(float("-inf"))
    z = tf.where(is_child, z, minus)
    told = [f"{name}: logits hold NaN or infinity: has the model's training diverged?"]
    z = assert_first(z, z < float("inf"), told)
    greatest = tf.stop_gradient(tf.reduce_max(z, axis=-1, keepdims=True))
    below = z - tf.where(greatest > minus, greatest, 0.0)
    total = tf.reduce_sum(tf.where(below < _FAR, 0.0, tf.exp(below)), axis=-1, keepdims=True)
    log_probs = below - tf.math.log(tf.where(total > 0, total, 1.0))
    return Siblings(tf.where(is_child, children, -1), log_probs)


# A step of a beam search over a trie in TensorFlow ops.


def best_children(
    level: Level, logits: tf.Tensor, scores: tf.Tensor, nodes: tf.Tensor, k: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Compute the same as `ops/trie/host/beam_step.h`, in the same order of ties.

    The children of all beams are placed side by side and sorted by their hashes, equal hashes in the order of
    beams. `tf.math.top_k` selects the k best, and keeps the order of equal ones.

    Args:
      level: The level of the nodes.
      logits: float32 (users, beams, codes).
      scores: float32 (users, beams).
      nodes: int64 (users, beams); -1: no beam.
      k: How many beams to keep.

    Returns:
      Scores, nodes and beams, each (users, k).
    """
    told = ["trie_step: a score is NaN: has the model's training diverged?"]
    scores = assert_first(scores, (nodes < 0) | ~tf.math.is_nan(scores), told)
    siblings = siblings_of("trie_step", level, nodes, logits)
    reached = scores[..., None] + siblings.log_probs
    possible = tf.reduce_max(siblings.log_probs, axis=-1, keepdims=True) > float("-inf")
    is_child = (siblings.nodes >= 0) & possible
    beams = tf.broadcast_to(tf.range(tf.shape(nodes)[1])[:, None], tf.shape(is_child))
    last = tf.constant(np.iinfo(np.int64).max)  # the order of missing children
    hashes = tf.where(is_child, _ordered_hash(siblings.nodes), last)
    every = [_in_a_row(hashes, last, k), _in_a_row(tf.where(is_child, reached, -np.inf), -np.inf, k)]
    every += [_in_a_row(tf.where(is_child, siblings.nodes, -1), -1, k)]
    every += [_in_a_row(tf.where(is_child, beams, -1), -1, k)]
    order = tf.argsort(every[0], axis=1, stable=True)
    reached, children, beams = (tf.gather(each, order, batch_dims=1) for each in every[1:])
    best, places = tf.math.top_k(reached, k)
    return best, tf.gather(children, places, batch_dims=1), tf.gather(beams, places, batch_dims=1)


def _in_a_row(of_beams: tf.Tensor, absent: float | tf.Tensor, k: int) -> tf.Tensor:
    """Concatenate a user's beams, followed by k absent ones."""
    users = tf.shape(of_beams)[0]
    flat = tf.reshape(of_beams, tf.stack([users, tf.reduce_prod(tf.shape(of_beams)[1:])]))
    return tf.pad(flat, [[0, 0], [0, k]], constant_values=tf.cast(absent, flat.dtype))


def _ordered_hash(nodes: tf.Tensor) -> tf.Tensor:
    """Compute SplitMix64 of nodes, as signed numbers in the order of the unsigned ones."""
    hashes = splitmix64_tensor(tf.bitcast(nodes, tf.uint64))
    return tf.bitcast(tf.bitwise.bitwise_xor(hashes, tf.constant(1 << 63, tf.uint64)), tf.int64)


_native = load_op_library("ops")
tf.no_gradient("GmetaTrieStep")


class TrieStep(NamedTuple):
    """The beams after a step, best first, padded to k with -1 and a score of -inf.

    Attributes:
      scores: Log-probabilities, float32 (users, k).
      nodes: Nodes of the next level, int64 (users, k).
      beams: The source beam of each, int32 (users, k).
    """

    scores: tf.Tensor
    nodes: tf.Tensor
    beams: tf.Tensor


def trie_step(
    logits: Any, scores: Any, nodes: Any, starts: Any, digits: Any, allowed: Any = None, *, k: int
) -> TrieStep:
    """Extend each user's beams by one digit, and keep the k best.

    For a beam at node i with score s and logits z, its child c has the score::

      s + z[digits[c]] - log Σ exp(z[digits[c']]),   c' over the allowed children of i

    The probabilities of a node's children therefore sum to its own, and every returned code belongs to an
    item. Equal scores are ordered by SplitMix64 of the node, smaller first, and those of one node by the
    beam. There is no gradient.

    On a GPU, the step doesn't synchronize, so it can't raise errors about its inputs: instead, all next
    scores of the user are NaN, and nodes and beams -1. A GPU accepts and keeps at most 1,536 beams.

    Args:
      logits: float32 (users, beams, codes), of the next digit.
      scores: float32 (users, beams).
      nodes: int64 (users, beams), nodes of this level; -1: no beam.
      starts: int64 (nodes + 1,), as `gmeta.models.generative.code_tables.CodeTrie` has them for a level.
      digits: int32 or int64 (children,), of the same level. TensorFlow keeps int32 in host memory: pass int64
        on a GPU; otherwise, each step of a `tf.function` copies all digits.
      allowed: bool (children,), which children are allowed (`CodeTrie.allow`); None: all.
      k: The number of beams to keep, >= 1.

    Returns:
      `TrieStep`.

    Raises:
      ConfigError: ``k`` is invalid.
      tf.errors.InvalidArgumentError: Shapes don't fit each other; or on the CPU, a node isn't of the level, a
        digit is out of range, a score is NaN, or logits hold NaN or infinity. The error names the user and
        the beam.
      tf.errors.UnimplementedError: There are too many beams for a GPU.

    Example:
      >>> from gmeta.models.generative.code_tables import CodeTrie
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


# The log-probability of a child among its siblings in a trie, for training.


def trie_log_probs(
    logits: Any, nodes: Any, children: Any, starts: Any, digits: Any, allowed: Any = None
) -> tf.Tensor:
    """Compute each child's log-probability, given its node.

    For a row with logits z, node i and child c::

      y = z[digits[c]] - log Σ exp(z[digits[c']]),   c' over the allowed children of i

    The sum over the levels of an item's code is therefore the item's log-probability, and the probabilities
    of all items sum to one: the loss assigns no probability to codes without an item. The gradient with
    respect to the logits is 1 at the child, minus the probabilities of all allowed children, and 0 elsewhere.
    A child whose logit is 87 or more below its largest sibling's adds nothing to the sum.

    On a GPU, the op doesn't synchronize, so it can't raise errors about a row: instead, the row's result and
    gradient are NaN.

    Args:
      logits: float32 (n, codes), of the next digit.
      nodes: int64 (n,), nodes of this level.
      children: int64 (n,), nodes of the next level, each a child of its node; -1: none, for which the result
        is 0 without a gradient, for any node.
      starts: int64 (nodes + 1,), as `gmeta.models.generative.code_tables.CodeTrie` has them for a level.
      digits: int32 or int64 (children,), of the same level; int64 for a GPU, as in `trie_step`.
      allowed: bool (children,), which children are allowed (`CodeTrie.allow`); None: all.

    Returns:
      float32 (n,), at most 0; -inf if the child's logit is -inf.

    Raises:
      tf.errors.InvalidArgumentError: Shapes don't fit each other; or on the CPU, a node isn't of the level, a
        child isn't its node's or isn't allowed, a digit is out of range, or logits that are read hold NaN or
        infinity. The error names the row.

    Example:
      >>> from gmeta.models.generative.code_tables import CodeTrie
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
    # An empty mask allows all children, like a mask of all True.
    level = Level(starts, digits, tf.cond(tf.size(allowed) > 0, lambda: allowed, lambda: digits >= 0))
    with tf.GradientTape() as outer:
        outer.watch([of_log_probs, logits])
        with tf.GradientTape() as inner:
            inner.watch(logits)
            y = _portable(logits, nodes, children, level)
        first = inner.gradient(y, logits, of_log_probs)
    return [*outer.gradient(first, [of_log_probs, logits], upstream), *[None] * 5]

"""Draws of items from a trie: with replacement, or without replacement by the Gumbel-top-k trick."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.native import load_op_library
from gmeta.ops.device import is_portable
from gmeta.ops.trie import Level, TrieStep

_native = load_op_library("ops")
tf.no_gradient("GmetaTrieSample")
tf.no_gradient("GmetaTrieGumbelStep")
_MOST_LEVELS = 1 << 15


class TrieNoise(NamedTuple):
    """The inputs of random numbers, which don't depend on threads, ranks, devices or places in a batch.

    The words are those of Philox4x32-10. Its key is SplitMix64(seed) + step, modulo 2^64; the four words of
    its counter are index mod 2^32, kind · 2^31 + level · 2^16 + index // 2^32, and the lower and the upper
    half of the user's key. `trie_sample` has kind 0, and the number of the beam as index; `trie_gumbel_step`
    has kind 1, and index child // 4, and uses word child mod 4 of the block.

    Attributes:
      seed: An integer.
      step: An integer or () tensor that changes from one batch to the next, such as the training step.
      level: The level of the nodes, 0 to 32,767: each digit of a code needs its own noise.
      keys: int64 (users,): a key for each user, or for each row if a user has several. Users with the same
        key draw the same items.
    """

    seed: Any
    step: Any
    level: int
    keys: Any


class GumbelStep(NamedTuple):
    """The beams after a step, highest rank first, padded to k with -1 and -inf.

    Attributes:
      scores: Log-probabilities, float32 (users, k).
      nodes: Nodes of the next level, int64 (users, k).
      beams: The source beam of each, int32 (users, k).
      ranks: Log-probabilities with noise, float32 (users, k).
    """

    scores: tf.Tensor
    nodes: tf.Tensor
    beams: tf.Tensor
    ranks: tf.Tensor


def trie_sample(
    logits: Any, scores: Any, nodes: Any, starts: Any, digits: Any, allowed: Any = None, *, noise: TrieNoise
) -> TrieStep:
    """Draw a child of each beam by the probabilities of `trie_step`, independently of other beams.

    Beams are draws: start with one beam at the root per item to draw, and take one step per digit. The drawn
    items are independent, each with its probability, so the mean of any function of them is an unbiased
    estimate of its expectation; an item's score is its log-probability. There is no gradient:
    `trie_log_probs` has one.

    The probabilities of a node's children are converted to integers, and a draw is an integer below their
    sum, so a GPU always draws the same as the CPU from the same logits. A GPU accepts any number of beams,
    and doesn't synchronize: if a beam's input is invalid, its score is NaN, and node and beam are -1.

    Args:
      logits: As in `trie_step`.
      scores: As in `trie_step`.
      nodes: As in `trie_step`.
      starts: As in `trie_step`.
      digits: As in `trie_step`.
      allowed: As in `trie_step`.
      noise: What the draws are functions of.

    Returns:
      `TrieStep` with as many beams as before, in their order. Without a beam, or a child of positive
      probability, node and beam are -1 and the score is -inf.

    Raises:
      ConfigError: The level of the noise is out of range, its seed or step isn't an integer, or the graph is
        to be exported (`portable_ops`).
      tf.errors.InvalidArgumentError: As in `trie_step`; or keys aren't (users,).

    Example:
      >>> from gmeta.models.generative.code_tables import CodeTrie
      >>> trie = CodeTrie.of(np.array([[0], [2]]))
      >>> logits, nodes = np.zeros((1, 5, 3)), np.zeros((1, 5), np.int64)
      >>> noise = TrieNoise(seed=1, step=0, level=0, keys=[7])
      >>> level = trie.starts[0], trie.digits[0]
      >>> trie_sample(logits, np.zeros((1, 5)), nodes, *level, noise=noise).nodes.shape
      TensorShape([1, 5])
    """
    return TrieStep(
        *_native.gmeta_trie_sample(
            **_inputs("trie_sample", (logits, scores, nodes, starts, digits, allowed), noise)
        )
    )


def trie_gumbel_step(
    logits: Any,
    scores: Any,
    ranks: Any,
    nodes: Any,
    starts: Any,
    digits: Any,
    allowed: Any = None,
    *,
    k: int,
    noise: TrieNoise,
) -> GumbelStep:
    """Take a step of stochastic beam search, which draws k items without replacement.

    A child c of a beam of rank G has the score s(c) of `trie_step` and, with noise g(c) from a standard
    Gumbel distribution, p(c) = s(c) + g(c). With Z the largest p of the beam's children, its rank is::

      -log(exp(-G) - exp(-Z) + exp(-p(c)))

    which is at most G. The k children with the highest ranks are kept; equal ranks are ordered as in
    `trie_step`. After the last level, the k items are, in order, a draw without replacement, each by the
    probabilities of the remaining items; scores are their log-probabilities, without noise. There is no
    gradient: `trie_log_probs` has one.

    From the same input, a GPU returns the CPU's items and floats, except that its logarithms may round a rank
    to the next float, in fewer than one of 10^8; items may therefore differ if two ranks are that close. If a
    user's input is invalid, it behaves as in `trie_step`.

    Args:
      logits: As in `trie_step`.
      scores: As in `trie_step`.
      ranks: float32 (users, beams); 0 at the root. For estimates that weight items by the rank of the k +
        1st, pass a Gumbel variable at the root.
      nodes: As in `trie_step`; a user's beams must be at different nodes.
      starts: As in `trie_step`.
      digits: As in `trie_step`.
      allowed: As in `trie_step`.
      k: How many beams to keep, >= 1.
      noise: What the draws are functions of.

    Returns:
      `GumbelStep`.

    Raises:
      ConfigError: ``k`` or the level of the noise is out of range, its seed or step isn't an integer, or the
        graph is to be exported (`portable_ops`).
      tf.errors.InvalidArgumentError: As in `trie_step`; or keys aren't (users,); or on the CPU, a rank is
        NaN.
      tf.errors.UnimplementedError: There are too many beams for a GPU.

    Example:
      >>> from gmeta.models.generative.code_tables import CodeTrie
      >>> trie = CodeTrie.of(np.array([[0], [2]]))
      >>> noise = TrieNoise(seed=1, step=0, level=0, keys=[7])
      >>> step = trie_gumbel_step(
      ...     np.zeros((1, 1, 3)), [[0.0]], [[0.0]], [[0]], trie.starts[0], trie.digits[0], k=2, noise=noise
      ... )
      >>> sorted(step.nodes.numpy()[0].tolist()), tf.exp(step.scores).numpy()
      ([0, 1], array([[0.5, 0.5]], dtype=float32))

    Reference: Kool, van Hoof and Welling, Stochastic beams and where to find them, ICML 2019, algorithm 1.
    """
    whole_number("trie_gumbel_step: k", k, 1)
    inputs = _inputs("trie_gumbel_step", (logits, scores, nodes, starts, digits, allowed), noise)
    return GumbelStep(
        *_native.gmeta_trie_gumbel_step(ranks=tf.convert_to_tensor(ranks, tf.float32), k=k, **inputs)
    )


def _inputs(name: str, step: tuple[Any, ...], noise: TrieNoise) -> dict[str, Any]:
    if is_portable():
        raise ConfigError(
            f"{name} draws items for training and has no form in TensorFlow ops: export a graph that "
            "searches by trie_step"
        )
    if not 0 <= whole_number(f"{name}: the level of the noise", noise.level, 0) < _MOST_LEVELS:
        raise ConfigError(f"{name}: the level of the noise must be below {_MOST_LEVELS}, got {noise.level}")
    logits, scores, nodes, starts, digits, allowed = step
    return {
        "logits": tf.convert_to_tensor(logits, tf.float32),
        "scores": tf.convert_to_tensor(scores, tf.float32),
        "nodes": tf.convert_to_tensor(nodes, tf.int64),
        **Level.of(starts, digits, allowed).inputs(),
        "seed": _integer(f"{name}: the seed", noise.seed),
        "step": _integer(f"{name}: the step", noise.step),
        "level": noise.level,
        "keys": tf.convert_to_tensor(noise.keys, tf.int64),
    }


def _integer(what: str, value: Any) -> tf.Tensor:
    number = tf.convert_to_tensor(value)
    if not number.dtype.is_integer:
        raise ConfigError(f"{what} of the noise must be an integer, got {value!r}")
    return tf.cast(number, tf.int64)

"""Draws of items from a trie: with replacement, or without by the Gumbel-top-k trick."""

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
    """The inputs of random numbers, which depend on no thread, rank, device or place in a batch.

    The words are those of Philox4x32-10. Its key is SplitMix64(seed) + step, modulo 2^64; the four words of
    its counter are index mod 2^32, kind · 2^31 + level · 2^16 + index // 2^32, and the lower and the upper
    half of the user's key. `trie_sample` has kind 0, and the number of the beam as index; `trie_gumbel_step`
    has kind 1, and child // 4, of whose block it takes word child mod 4.

    Attributes:
      seed: An integer.
      step: An integer or () tensor that changes from one batch to the next, such as the training step.
      level: The level of the nodes, 0 to 32,767: each digit of a code needs its own noise.
      keys: int64 (users,): a key of each user, or of each row if a user has several. Users of the same key
        draw the same.
    """

    seed: Any
    step: Any
    level: int
    keys: Any


class GumbelStep(NamedTuple):
    """The beams after a step, the highest rank first; where there are fewer than k, -1 and -inf.

    Attributes:
      scores: Logs of probabilities, float32 (users, k).
      nodes: Nodes of the next level, int64 (users, k).
      beams: Which beam each comes from, int32 (users, k).
      ranks: Logs of probabilities with noise, float32 (users, k).
    """

    scores: tf.Tensor
    nodes: tf.Tensor
    beams: tf.Tensor
    ranks: tf.Tensor


def trie_sample(
    logits: Any, scores: Any, nodes: Any, starts: Any, digits: Any, allowed: Any = None, *, noise: TrieNoise
) -> TrieStep:
    """Draw a child of each beam by the probabilities of `trie_step`, whatever other beams draw.

    Beams are draws: begin with as many beams at the root as items are wanted, and take a step for each digit.
    The drawn items are independent, each with its probability, so the mean of any function of them is an
    unbiased estimate of its expectation; an item's score is the log of its probability. There is no gradient:
    `trie_log_probs` has one.

    The probabilities of a node's children are converted to integers, and a draw is an integer below their
    sum, so from the same logits a GPU always draws the same as the CPU. A GPU takes any number of beams, and
    doesn't synchronize: where a beam's input is invalid, its score is NaN, and node and beam are -1.

    Args:
      logits: As in `trie_step`.
      scores: As in `trie_step`.
      nodes: As in `trie_step`.
      starts: As in `trie_step`.
      digits: As in `trie_step`.
      allowed: As in `trie_step`.
      noise: What the draws are functions of.

    Returns:
      `TrieStep` with as many beams as before, in their order. Where there is no beam, or no child that has a
      chance, node and beam are -1 and the score is -inf.

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

    A child c of a beam of rank G has the score s(c) that `trie_step` gives it, and with noise g(c) of a
    standard Gumbel distribution p(c) = s(c) + g(c). With Z, the greatest p of the beam's children, its rank
    is::

      -log(exp(-G) - exp(-Z) + exp(-p(c)))

    which is at most G. The k children of the highest ranks are kept; equal ranks are ordered as in
    `trie_step`. After the last level the k items are a draw without replacement, each next one by the
    probabilities of those that are left, in that order; scores are logs of their probabilities, without
    noise. There is no gradient: `trie_log_probs` has one.

    A GPU gives from the same input the CPU's items and the CPU's floats, except that its logarithms may round
    a rank to the next float, in fewer than one of 10^8; so items differ where two ranks are that close. Where
    a user's input is wrong, it behaves as in `trie_step`.

    Args:
      logits: As in `trie_step`.
      scores: As in `trie_step`.
      ranks: float32 (users, beams); 0 at the root. For estimates that weigh items by the rank of the k + 1st,
        a Gumbel variable there.
      nodes: As in `trie_step`; no two beams of a user may be at one node.
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

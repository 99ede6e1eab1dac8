"""Steps over a trie, and the steps that draw, on either device, for one batch of beams."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gmeta.models.generative.code_tables import CodeTrie
from support.gpu.cuda_library import Event, Stream
from support.gpu.gpu_trie import GpuTrieLevel, GpuTrieNoise, GpuTrieStep
from support.reference.trie_draws import ReferenceNoise, gumbel_ranks, sampled_place

import numpy as np
from numpy.typing import NDArray

_QUEUED = 200  # steps of the GPU between two events
_SEED, _STEP = 3, 5


class Batch(NamedTuple):
    """Beams at nodes of a level; a user's number is their key.

    Attributes:
      logits: float32 (users, beams, codes).
      scores: float32 (users, beams), descending.
      nodes: int64 (users, beams).
      prefixes: The digits of each beam's node.
    """

    logits: NDArray[np.float32]
    scores: NDArray[np.float32]
    nodes: NDArray[np.int64]
    prefixes: list[list[list[int]]]


def cpu_step(kind: str, trie: CodeTrie, level: int, batch: Batch, k: int) -> Callable[[], list[NDArray[Any]]]:
    """Make a step of the CPU's ops: ``step``, ``sample`` or ``gumbel``, whose ranks are the scores."""
    from gmeta.ops.trie import trie_step
    from gmeta.ops.trie_draws import TrieNoise, trie_gumbel_step, trie_sample

    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    logits, scores, nodes, *of_level = (
        tf.constant(each) for each in (*batch[:3], trie.starts[level], trie.digits[level])
    )
    noise = TrieNoise(*(tf.constant(each, tf.int64) for each in (_SEED, _STEP)), level, np.arange(len(nodes)))
    if kind == "step":
        return lambda: list(trie_step(logits, scores, nodes, *of_level, k=k))
    if kind == "sample":
        return lambda: list(trie_sample(logits, scores, nodes, *of_level, noise=noise))
    return lambda: list(trie_gumbel_step(logits, scores, scores, nodes, *of_level, k=k, noise=noise))


def queued_steps(
    kind: str, trie: CodeTrie, level: int, batches: Sequence[Batch], k: int, rounds: int
) -> tuple[float, list[NDArray[Any]]]:
    """Seconds of a step on the GPU, and the results of the first batch."""
    on_gpu = GpuTrieLevel(trie.starts[level], trie.digits[level])
    noise = None if kind == "step" else GpuTrieNoise(_SEED, _STEP, level, np.arange(len(batches[0].nodes)))
    kept = None if kind == "sample" else k
    steps = [
        GpuTrieStep(on_gpu, *batch[:3], kept, noise, batch.scores if kind == "gumbel" else None)
        for batch in batches
    ]
    stream, events = Stream(), (Event(), Event())
    seconds = []
    for number in range(rounds + 2):
        events[0].record(stream)
        for i in range(_QUEUED):
            steps[i % len(steps)].run(stream)
        events[1].record(stream)
        took = events[1].seconds_since(events[0]) / _QUEUED
        if number >= 2:
            seconds.append(took)
    return statistics.median(seconds), [each.numpy() for each in steps[0].results]


def check_draws(kind: str, trie: CodeTrie, level: int, batch: Batch, found: Sequence[NDArray[Any]]) -> None:
    """Compare the draws for the first user with those that its noise determines."""
    starts, digits = trie.starts[level], trie.digits[level]
    noise = ReferenceNoise(_SEED, _STEP, level, 0)
    ranks: list[NDArray[np.float64]] = []
    for beam, node in enumerate(batch.nodes[0]):
        children = np.arange(starts[node], starts[node + 1])
        z = batch.logits[0, beam, digits[children]].astype(np.float64)
        log_probs = z - np.logaddexp.reduce(z)
        if kind == "gumbel":
            score = float(batch.scores[0, beam])
            ranks.append(gumbel_ranks(score, score + log_probs + noise.gumbel(children)))
            continue
        which = sampled_place(log_probs, noise.uniform(beam))
        if which is not None and found[1][0, beam] != children[which]:
            raise AssertionError(f"level {level}, beam {beam}: child {found[1][0, beam]} was drawn")
    if ranks:
        best = np.sort(np.concatenate(ranks))[::-1][: found[3].shape[1]]
        np.testing.assert_allclose(found[3][0, : len(best)], best, rtol=1e-4, atol=1e-4)

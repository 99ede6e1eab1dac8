"""Steps over a trie, draws, and logs of probabilities by the ops of a GPU against those of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gmeta.models.generative.code_tables import CodeTrie
from gmeta.ops.trie import trie_log_probs, trie_step
from gmeta.ops.trie_draws import TrieNoise, trie_gumbel_step, trie_sample

pytestmark = pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="needs a GPU")

CODES, USERS, BEAMS = 64, 5, 40


class Level:
    """The second level of a trie, and beams and rows at its nodes."""

    def __init__(self, dtype: type) -> None:
        rng = np.random.default_rng(2)
        trie = CodeTrie.of(np.unique(rng.integers(0, CODES, (5000, 3)), axis=0))
        self.arrays = trie.starts[1], trie.digits[1].astype(dtype), rng.random(len(trie.digits[1])) < 0.8
        self.logits = rng.normal(0, 2, (USERS, BEAMS, CODES)).astype(np.float32)
        self.scores = -rng.exponential(5, (USERS, BEAMS)).astype(np.float32)
        self.nodes = rng.integers(-1, len(trie.starts[1]) - 1, (USERS, BEAMS))
        self.ranks = rng.normal(size=(USERS, BEAMS)).astype(np.float32)
        self.noise = TrieNoise(7, 8, 1, rng.integers(-(2**63), 2**63 - 1, USERS))
        self.children = rng.choice(np.flatnonzero(self.arrays[2]), USERS * BEAMS)
        self.parents = np.searchsorted(trie.starts[1], self.children, side="right") - 1

    def on(self, device: str) -> tuple[tf.Tensor, ...]:
        with tf.device(device):
            step = trie_step(self.logits, self.scores, self.nodes, *self.arrays, k=30)
            sample = trie_sample(self.logits, self.scores, self.nodes, *self.arrays, noise=self.noise)
            drawn = trie_gumbel_step(
                self.logits, self.scores, self.ranks, self.nodes, *self.arrays, k=30, noise=self.noise
            )
            z = tf.constant(self.logits.reshape(-1, CODES))
            with tf.GradientTape() as tape:
                tape.watch(z)
                y = trie_log_probs(z, self.parents, self.children, *self.arrays)
            return (*step, *sample, *drawn, y, tape.gradient(y, z))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("graph", [False, True])
def test_a_gpu_computes_what_the_cpu_does(dtype: type, graph: bool) -> None:
    level = Level(dtype)
    on = tf.function(level.on) if graph else level.on
    found, expected = on("GPU:0"), level.on("CPU:0")
    assert all(
        "GPU:0" in each.device for each in found if each.dtype != tf.int32
    )  # a function brings these back
    for ours, theirs in zip(found, expected, strict=True):
        check = np.testing.assert_allclose if ours.dtype.is_floating else np.testing.assert_array_equal
        check(ours, theirs, **({"rtol": 1e-5, "atol": 1e-5} if ours.dtype.is_floating else {}))


def test_what_is_wrong_shows_in_results() -> None:
    level = Level(np.int64)
    level.nodes[1, 3] = 10**9
    level.parents[4] = 0 if level.parents[4] else 1
    scores, nodes, _, samples, sampled, *_, y, gradient = level.on("GPU:0")
    assert np.isnan(scores[1]).all()
    assert (nodes[1].numpy() == -1).all()
    assert not np.isnan(np.delete(scores, 1, axis=0)).any()
    assert np.argwhere(np.isnan(samples)).tolist() == [[1, 3]]
    assert sampled[1, 3] == -1
    assert np.flatnonzero(np.isnan(y)).tolist() == [4]
    assert np.isnan(gradient[4]).all()

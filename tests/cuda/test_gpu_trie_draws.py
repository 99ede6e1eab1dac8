"""Draws from tries on the GPU against NumPy in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gmeta.models.generative.code_tables import CodeTrie
from support.gpu.cuda_library import CudaError
from support.gpu.gpu_trie import GpuTrieLevel, GpuTrieNoise
from support.reference.trie_draws import ReferenceNoise, gumbel_ranks, sampled_place

CODES, USERS = 256, 3


class Case:
    """Beams at random nodes of a level of a random trie; no two of a user at one node."""

    def __init__(self, seed: int, level: int, beams: int) -> None:
        rng = np.random.default_rng(seed)
        trie = CodeTrie.of(np.unique(rng.integers(0, CODES, (20_000, 3)), axis=0))
        self.starts, self.digits = trie.starts[level], trie.digits[level]
        self.allowed = rng.random(len(self.digits)) < 0.8
        self.logits = rng.normal(0, 2, (USERS, beams, CODES)).astype(np.float32)
        self.scores = -rng.exponential(5, (USERS, beams)).astype(np.float32)
        self.ranks = rng.normal(size=(USERS, beams)).astype(np.float32)
        count = len(self.starts) - 1
        self.nodes = np.stack([rng.permutation(max(count, beams))[:beams] for _ in range(USERS)])
        self.nodes[self.nodes >= count] = -1
        self.numbers = int(rng.integers(-(2**63), 2**63 - 1)), 2**40 + seed, level
        self.keys = rng.integers(-(2**63), 2**63 - 1, USERS)

    def level(self) -> GpuTrieLevel:
        return GpuTrieLevel(self.starts, self.digits, self.allowed)

    def noise(self) -> GpuTrieNoise:
        return GpuTrieNoise(*self.numbers, self.keys)

    def sample(self) -> list[npt.NDArray[Any]]:
        return [
            each.numpy() for each in self.level().sample(self.logits, self.scores, self.nodes, self.noise())
        ]

    def gumbel_step(self, k: int) -> list[npt.NDArray[Any]]:
        beams = self.logits, self.scores, self.ranks, self.nodes
        return [each.numpy() for each in self.level().gumbel_step(*beams, k, self.noise())]

    def reference(self, user: int) -> ReferenceNoise:
        return ReferenceNoise(*self.numbers, int(self.keys[user]))

    def siblings(self, user: int, beam: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Children and their scores."""
        node = self.nodes[user, beam]
        children = np.arange(self.starts[node], self.starts[node + 1]) if node >= 0 else np.arange(0)
        children = children[self.allowed[children]]
        z = self.logits[user, beam, self.digits[children]].astype(np.float64)
        return children, self.scores[user, beam] + z - np.logaddexp.reduce(z)


@pytest.mark.parametrize(("level", "beams"), [(0, 1), (0, 40), (1, 50), (2, 200)])
def test_a_sample_is_the_references(level: int, beams: int) -> None:
    case = Case(level, level, beams)
    scores, nodes, numbers = case.sample()
    compared = 0
    for user in range(USERS):
        for beam in range(beams):
            children, expected = case.siblings(user, beam)
            found = scores[user, beam], nodes[user, beam], numbers[user, beam]
            if not len(children):
                assert found == (-np.inf, -1, -1)
                continue
            which = sampled_place(expected - case.scores[user, beam], case.reference(user).uniform(beam))
            if which is None:
                continue
            compared += 1
            assert found[1:] == (children[which], beam)
            np.testing.assert_allclose(found[0], expected[which], rtol=1e-5, atol=1e-5)
    assert compared > 0


@pytest.mark.parametrize(("level", "beams"), [(0, 1), (1, 50), (2, 200)])
@pytest.mark.parametrize("k", [1, 50, 300])
def test_a_gumbel_step_is_the_references(level: int, beams: int, k: int) -> None:
    case = Case(k, level, beams)
    scores, nodes, numbers, ranks = case.gumbel_step(k)
    for user in range(USERS):
        found: list[tuple[float, float, int, int]] = []
        for beam in range(beams):
            children, expected = case.siblings(user, beam)
            if not len(children):
                continue
            noisy = expected + case.reference(user).gumbel(children)
            of_children = gumbel_ranks(float(case.ranks[user, beam]), noisy)
            found += [(-r, s, int(c), beam) for r, s, c in zip(of_children, expected, children, strict=True)]
        best = sorted(found)[:k] + [(np.inf, -np.inf, -1, -1)] * (k - len(found))
        np.testing.assert_allclose(ranks[user], [-each[0] for each in best], rtol=1e-4, atol=1e-4)
        close = np.abs(np.diff([each[0] for each in sorted(found)[: k + 1]])) < 1e-5
        if close.any():
            continue  # double precision tells apart what floats don't
        np.testing.assert_allclose(scores[user], [each[1] for each in best], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(nodes[user], [each[2] for each in best])
        np.testing.assert_array_equal(numbers[user], [each[3] for each in best])


def test_draws_give_the_same_bits_each_time() -> None:
    case = Case(9, 1, 50)
    first = case.sample(), case.gumbel_step(50)
    for _ in range(5):
        for again, before in zip((case.sample(), case.gumbel_step(50)), first, strict=True):
            for ours, theirs in zip(again, before, strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_what_is_wrong_shows_in_its_beams_samples_and_its_users_ranks() -> None:
    case = Case(1, 1, 10)
    samples, steps = case.sample(), case.gumbel_step(7)
    case.scores[1, 4] = np.nan
    case.nodes[1, 4] = 0
    found = case.sample()
    assert np.isnan(found[0][1, 4])
    assert found[1][1, 4] == found[2][1, 4] == -1
    for before, now in zip(samples, found, strict=True):
        before[1, 4] = now[1, 4]
        np.testing.assert_array_equal(now, before)
    case.scores[1, 4], case.ranks[1, 4] = 0, np.nan
    found = case.gumbel_step(7)
    assert np.isnan(found[0][1]).all()
    assert np.isnan(found[3][1]).all()
    for before, now in zip(steps, found, strict=True):
        np.testing.assert_array_equal(now[[0, 2]], before[[0, 2]])


def test_too_many_beams_are_refused() -> None:
    with pytest.raises(CudaError, match="trie_gumbel_step: a GPU takes and keeps at most 1536 beams"):
        Case(1, 2, 10).gumbel_step(3000)

"""Draws from a trie: which numbers they are functions of, and that frequencies are the probabilities."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.models.generative.code_tables import CodeTrie
from gmeta.ops.table.portable_tables import portable_ops
from gmeta.ops.trie import trie_step
from gmeta.ops.trie_draws import TrieNoise, trie_gumbel_step, trie_sample
from support.reference.trie_draws import ReferenceNoise, gumbel_ranks, sampled_place

SEEDS = st.integers(0, 2**31 - 1)
CODES = 5
ITEMS = CodeTrie.of(np.array([[0, 1, 2], [0, 1, 3], [0, 4, 0], [2, 0, 0], [2, 3, 1], [3, 3, 3]]))
LOGITS = [np.random.default_rng(7).normal(size=(len(starts) - 1, CODES)) for starts in ITEMS.starts]


def probabilities() -> np.ndarray:
    """Of all items, from the leaves' nodes on."""
    step = trie_search(lambda level, *args: trie_step(*args, k=len(ITEMS.places)), 1, 1)
    return np.exp(step.scores.numpy()[0][np.argsort(step.nodes.numpy()[0])]).astype(np.float64)


def trie_search(take, users: int, beams: int):
    step = None
    scores, nodes = tf.zeros([users, beams]), tf.zeros([users, beams], tf.int64)
    for level in range(ITEMS.levels):
        logits = LOGITS[level][np.maximum(nodes, 0)]
        step = take(level, logits, scores, nodes, ITEMS.starts[level], ITEMS.digits[level])
        scores, nodes = step.scores, step.nodes
    return step


class Case:
    """Beams at random nodes of a random trie, each user's at different ones."""

    def __init__(self, seed: int, users: int, beams: int) -> None:
        rng = np.random.default_rng(seed)
        trie = CodeTrie.of(np.unique(rng.integers(0, CODES, (rng.integers(1, 50), 3)), axis=0))
        level = rng.integers(0, 3)
        self.starts, self.digits = trie.starts[level], trie.digits[level]
        self.allowed = rng.random(len(self.digits)) < 0.7
        nodes = [rng.permutation(max(beams, len(self.starts) - 1))[:beams] for _ in range(users)]
        self.nodes = np.array(nodes, np.int64).reshape(users, beams)
        self.nodes[self.nodes >= len(self.starts) - 1] = -1
        self.logits = rng.normal(0, 2, (users, beams, CODES)).astype(np.float32)
        self.scores = -rng.random((users, beams)).astype(np.float32)
        self.ranks = rng.normal(size=(users, beams)).astype(np.float32)
        keys = rng.integers(-(2**63), 2**63 - 1, users)
        self.noise = TrieNoise(int(rng.integers(-(2**63), 2**63 - 1)), int(rng.integers(0, 2**40)), 2, keys)

    def reference(self, user: int) -> ReferenceNoise:
        """The noise of a user."""
        return ReferenceNoise(*self.noise[:3], int(self.noise.keys[user]))

    def siblings(self, user: int, beam: int) -> tuple[np.ndarray, np.ndarray]:
        """Children and the logs of their probabilities."""
        node = self.nodes[user, beam]
        children = np.arange(self.starts[node], self.starts[node + 1]) if node >= 0 else np.arange(0)
        children = children[self.allowed[children]]
        z = self.logits[user, beam, self.digits[children]].astype(np.float64)
        return children, z - np.logaddexp.reduce(z)


@given(SEEDS, st.integers(0, 3), st.integers(1, 5))
def test_a_sample_is_the_references(seed: int, users: int, beams: int) -> None:
    case = Case(seed, users, beams)
    step = trie_sample(
        case.logits, case.scores, case.nodes, case.starts, case.digits, case.allowed, noise=case.noise
    )
    assert step.nodes.shape == (users, beams)
    for user, beam in itertools.product(range(users), range(beams)):
        children, log_probs = case.siblings(user, beam)
        got = step.nodes[user, beam], step.beams[user, beam], step.scores[user, beam]
        if not len(children):
            assert got == (-1, -1, -np.inf)
            continue
        which = sampled_place(log_probs, case.reference(user).uniform(beam))
        if which is None:
            continue
        assert got[:2] == (children[which], beam)
        np.testing.assert_allclose(got[2], case.scores[user, beam] + log_probs[which], rtol=1e-5, atol=1e-5)


@given(SEEDS, st.integers(0, 3), st.integers(1, 5), st.integers(1, 12))
def test_a_gumbel_step_is_the_references(seed: int, users: int, beams: int, k: int) -> None:
    case = Case(seed, users, beams)
    given_ = case.logits, case.scores, case.ranks, case.nodes, case.starts, case.digits, case.allowed
    step = trie_gumbel_step(*given_, k=k, noise=case.noise)
    for user in range(users):
        found = []
        for beam in range(beams):
            children, log_probs = case.siblings(user, beam)
            if not len(children):
                continue
            scores = case.scores[user, beam] + log_probs
            noisy = scores + case.reference(user).gumbel(children)
            ranks = gumbel_ranks(float(case.ranks[user, beam]), noisy)
            found += [(-r, s, c, beam) for r, s, c in zip(ranks, scores, children, strict=True)]
        found = sorted(found)[:k] + [(np.inf, -np.inf, -1, -1)] * (k - len(found))
        np.testing.assert_allclose(step.ranks[user], [-each[0] for each in found], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(step.scores[user], [each[1] for each in found], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(step.nodes[user], [each[2] for each in found])
        np.testing.assert_array_equal(step.beams[user], [each[3] for each in found])


def test_draws_do_not_depend_on_the_batch() -> None:
    case = Case(3, 6, 4)
    level = case.starts, case.digits, case.allowed
    order = np.array([4, 1, 3])
    moved = case.noise._replace(keys=case.noise.keys[order])
    beams = case.logits, case.scores, case.nodes
    whole = trie_sample(*beams, *level, noise=case.noise)
    part = trie_sample(*(each[order] for each in beams), *level, noise=moved)
    np.testing.assert_array_equal(part.nodes, whole.nodes.numpy()[order])
    beams = case.logits, case.scores, case.ranks, case.nodes
    whole = trie_gumbel_step(*beams, *level, k=3, noise=case.noise)
    part = trie_gumbel_step(*(each[order] for each in beams), *level, k=3, noise=moved)
    np.testing.assert_array_equal(part.ranks, whole.ranks.numpy()[order])


def test_frequencies_of_samples_are_the_probabilities() -> None:
    """By χ² over beams of one user, over users, and over steps."""
    expected = probabilities()
    np.testing.assert_allclose(expected.sum(), 1, rtol=1e-5)
    draws = 20_000

    def drawn(users: int, beams: int, step: int) -> np.ndarray:
        def take(level, *args):
            return trie_sample(*args, noise=TrieNoise(5, step, level, np.arange(users)))

        return trie_search(take, users, beams).nodes.numpy().ravel()

    for nodes in (
        drawn(1, draws, 0),
        drawn(draws, 1, 0),
        np.concatenate([drawn(50, 20, i) for i in range(20)]),
    ):
        counts = np.bincount(nodes, minlength=len(expected))
        chi2 = ((counts - draws * expected) ** 2 / (draws * expected)).sum()
        assert chi2 < 20.5  # of 5 degrees of freedom: one in a thousand seeds is above


def inclusion(p: np.ndarray, k: int) -> np.ndarray:
    """The probability of each item to be among k that are drawn one after another without replacement."""
    found = np.zeros(len(p))
    for drawn in itertools.permutations(range(len(p)), k):
        left, chance = 1.0, 1.0
        for item in drawn:
            chance *= p[item] / left
            left -= p[item]
        found[list(drawn)] += chance
    return found


@pytest.mark.parametrize("k", [1, 3])
def test_gumbel_draws_are_distinct_and_each_item_is_in_them_as_often_as_it_should(k: int) -> None:
    users = 20_000
    ranks = tf.zeros([users, 1])

    def take(level, logits, scores, nodes, *trie):
        nonlocal ranks
        noise = TrieNoise(9, 4, level, np.arange(users))
        step = trie_gumbel_step(logits, scores, ranks, nodes, *trie, k=k, noise=noise)
        ranks = step.ranks
        return step

    step = trie_search(take, users, 1)
    nodes = np.sort(step.nodes.numpy(), axis=1)
    assert (nodes >= 0).all()
    assert (np.diff(nodes, axis=1) > 0).all()
    p = probabilities()
    np.testing.assert_allclose(np.exp(step.scores), p[step.nodes.numpy()], rtol=1e-4)
    expected = inclusion(p, k)
    spread = np.sqrt(expected * (1 - expected) / users)
    assert (np.abs(np.bincount(nodes.ravel()) / users - expected) < 4 * spread + 1e-6).all()
    first = np.bincount(step.nodes.numpy()[:, 0], minlength=len(p)) / users
    assert (np.abs(first - p) < 4 * np.sqrt(p / users)).all()
    assert (ranks.numpy()[:, 0] == 0).all()  # the greatest is the root's


def test_what_does_not_fit_is_named() -> None:
    case = Case(1, 2, 2)
    level = case.starts, case.digits
    beams = case.logits, case.scores, case.nodes
    noise = TrieNoise(0, 0, 0, [1, 2])
    with portable_ops(), pytest.raises(ConfigError, match="trie_sample draws items for training"):
        trie_sample(*beams, *level, noise=noise)
    with pytest.raises(ConfigError, match="the level of the noise must be below 32768, got 40000"):
        trie_sample(*beams, *level, noise=noise._replace(level=40_000))
    with pytest.raises(ConfigError, match=r"trie_sample: the step of the noise must be an integer, got 0\.5"):
        trie_sample(*beams, *level, noise=noise._replace(step=0.5))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"keys one for each of 2 users, got .*\[3\]"):
        trie_sample(*beams, *level, noise=noise._replace(keys=[1, 2, 3]))
    wrong = "trie_sample: the score of beam 1 of user 0 is NaN"
    with tf.device("CPU:0"), pytest.raises(tf.errors.InvalidArgumentError, match=wrong):  # a GPU's is NaN too
        trie_sample(beams[0], [[0, np.nan], [0, 0]], np.zeros((2, 2)), *level, noise=noise)
    with pytest.raises(ConfigError, match="trie_gumbel_step: k must be"):
        trie_gumbel_step(*beams[:2], beams[1], beams[2], *level, k=0, noise=noise)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"ranks must have the shape of scores"):
        trie_gumbel_step(*beams[:2], [[0.0]], beams[2], *level, k=1, noise=noise)

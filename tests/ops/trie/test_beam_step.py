"""A step of a beam search over a trie against NumPy, and whole searches against all items."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.core.shares import splitmix64
from gmeta.models.generative.code_tables import CodeTrie
from gmeta.ops.table.portable_tables import portable_ops
from gmeta.ops.trie import trie_step

SEEDS = st.integers(0, 2**31 - 1)
WHOLE = {
    "logits": np.zeros((1, 1, 3)),
    "scores": [[0.0]],
    "nodes": [[0]],
    "starts": [0, 3],
    "digits": [0, 1, 2],
}


def reference(logits, scores, nodes, starts, digits, allowed, k):
    """The step for one user, child by child."""
    found = []
    for beam, node in enumerate(nodes):
        children = np.arange(starts[node], starts[node + 1]) if node >= 0 else np.arange(0)
        children = children[allowed[children]]
        z = logits[beam, digits[children]].astype(np.float64)
        for child, score in zip(children, scores[beam] + z - np.logaddexp.reduce(z), strict=True):
            found.append((-score, int(splitmix64(np.array([child], np.uint64))[0]), beam, child))
    found = sorted(found)[:k]
    return found + [(np.inf, 0, -1, -1)] * (k - len(found))


def draw(seed: int, levels: int, codes: int = 6):
    rng = np.random.default_rng(seed)
    return rng, CodeTrie.of(np.unique(rng.integers(0, codes, (rng.integers(1, 50), levels)), axis=0))


@given(SEEDS, st.integers(1, 4), st.integers(0, 4), st.integers(1, 5), st.integers(1, 12), st.booleans())
def test_a_step_is_the_references(seed: int, level: int, users: int, beams: int, k: int, masks: bool) -> None:
    rng, trie = draw(seed, 4)
    starts, digits = trie.starts[level - 1], trie.digits[level - 1]
    logits = rng.normal(size=(users, beams, 6)).astype(np.float32)  # no two scores are equal
    scores = -rng.random((users, beams)).astype(np.float32)
    nodes = rng.integers(-1, len(starts) - 1, (users, beams))
    mask = rng.random(len(trie.places)) < 0.5
    mask[0] = True
    allowed = trie.allow(mask)[level - 1]
    digits = digits.astype(rng.choice([np.int32, np.int64]))
    step = trie_step(logits, scores, nodes, starts, digits, allowed if masks else None, k=k)
    assert step.scores.shape == (users, k)
    for user in range(users):
        may = allowed if masks else np.ones(len(digits), bool)
        wanted = reference(logits[user], scores[user], nodes[user], starts, digits, may, k)
        np.testing.assert_allclose(step.scores[user], [-each[0] for each in wanted], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(step.beams[user], [each[2] for each in wanted])
        np.testing.assert_array_equal(step.nodes[user], [each[3] for each in wanted])


@given(SEEDS, st.integers(0, 4), st.integers(0, 5), st.integers(1, 40), st.booleans(), st.booleans())
def test_the_portable_form_keeps_the_order_of_ties(
    seed: int, users: int, beams: int, k: int, masks: bool, alike: bool
) -> None:
    rng, trie = draw(seed, 3)
    level = rng.integers(0, 3)
    starts, digits = trie.starts[level], trie.digits[level]
    allowed = rng.random(len(digits)) < 0.5 if masks else None
    # Alike, siblings are equal or impossible, so that scores tie often, also those of several beams.
    kinds = [0.0, 0.0, -np.inf] if alike else rng.normal(0, 3, 10_000)
    logits = rng.choice(kinds, (users, beams, 6)).astype(np.float32)
    scores = rng.choice([0.0, -1.0, -np.inf], (users, beams)).astype(np.float32)
    nodes = rng.integers(-1, len(starts) - 1, (users, beams))
    ours = trie_step(logits, scores, nodes, starts, digits, allowed, k=k)
    with portable_ops():
        wide = digits.astype(np.int64)
        found = trie_step(logits, scores, nodes, starts, wide, allowed, k=k)
    np.testing.assert_allclose(found.scores, ours.scores, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found.nodes, ours.nodes)
    np.testing.assert_array_equal(found.beams, ours.beams)


def test_the_portable_form_is_of_stock_ops_for_batches_of_any_size() -> None:
    rng, trie = draw(5, 2)
    level = [tf.constant(each[1]) for each in (trie.starts, trie.digits)]

    @tf.function
    def step(logits: tf.Tensor, scores: tf.Tensor, nodes: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return tuple(trie_step(logits, scores, nodes, *level, k=5))

    with portable_ops():
        shapes = ((None, None, None), tf.float32), ((None, None), tf.float32), ((None, None), tf.int64)
        portable = step.get_concrete_function(*(tf.TensorSpec(*each) for each in shapes))
    assert not [op.type for op in portable.graph.get_operations() if op.type.startswith("Gmeta")]
    for users, beams in ((0, 3), (2, 0), (3, 4)):
        logits = tf.constant(rng.normal(size=(users, beams, 6)), tf.float32)
        nodes = tf.constant(rng.integers(-1, len(trie.starts[1]) - 1, (users, beams)))
        given_ = logits, tf.zeros([users, beams]), nodes
        for ours, found in zip(trie_step(*given_, *level, k=5), portable(*given_), strict=True):
            np.testing.assert_allclose(found, ours, rtol=1e-6, atol=1e-6)


@given(SEEDS, st.integers(1, 4), st.booleans())
def test_a_beam_as_wide_as_the_catalogue_finds_each_item_once_and_probabilities_sum_to_one(
    seed: int, levels: int, masks: bool
) -> None:
    rng, trie = draw(seed, levels)
    items = len(trie.places)
    mask = rng.random(items) < (0.5 if masks else 2.0)
    mask[rng.integers(items)] = True
    may = trie.allow(mask)
    scores, nodes = tf.zeros([1, 1]), tf.zeros([1, 1], tf.int64)
    for level in range(levels):
        logits = rng.normal(0, 3, (1, nodes.shape[1], 6))
        step = trie_step(logits, scores, nodes, trie.starts[level], trie.digits[level], may[level], k=items)
        scores, nodes = step.scores, step.nodes
    there = nodes.numpy()[0] >= 0
    assert sorted(trie.places[nodes.numpy()[0, there]]) == np.flatnonzero(mask).tolist()
    np.testing.assert_allclose(np.exp(scores.numpy()[0]).sum(), 1, rtol=1e-5)
    assert (np.diff(scores.numpy()[0, there]) <= 0).all()


@pytest.mark.parametrize("form", [portable_ops, nullcontext])
def test_equal_scores_are_ordered_by_the_hash(form: type) -> None:
    with form():
        check_order()


def check_order() -> None:
    trie = CodeTrie.of(np.arange(50)[:, None])
    step = trie_step(np.zeros((1, 1, 50)), [[0.0]], [[0]], trie.starts[0], trie.digits[0], k=50)
    order = np.argsort(splitmix64(np.arange(50, dtype=np.uint64)))
    np.testing.assert_array_equal(step.nodes[0], order)
    few = trie_step(np.zeros((1, 1, 50)), [[0.0]], [[0]], trie.starts[0], trie.digits[0], k=7)
    np.testing.assert_array_equal(few.nodes[0], order[:7])


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"nodes": [[9]]}, "beam 0 of user 0 is at node 9, but the level has 1"),
        ({"digits": np.array([0, 1, 2**32 + 2])}, "child 2 has digit 4294967298, but there are 3 logits"),
        ({"logits": np.zeros((1, 1, 2))}, "child 2 has digit 2, but there are 2 logits for beam 0 of user 0"),
        ({"logits": np.full((1, 1, 3), np.nan)}, "the logits of beam 0 of user 0 hold NaN"),
        ({"scores": [[np.nan]]}, "the score of beam 0 of user 0 is NaN"),
        ({"logits": np.zeros((2, 1, 3))}, r"got \[2,1,3\], \[1,1\] and \[1,1\]"),
        ({"starts": [0, 9]}, "node 0 has children 0 to 9, but the level has 3"),
        ({"allowed": [True]}, "the level has 3 children, but 1 values of allowed"),
    ],
)
def test_what_does_not_fit_is_named(given_: dict, said: str) -> None:
    wrong = pytest.raises(tf.errors.InvalidArgumentError, match=f"trie_step: .*{said}")
    with wrong, tf.device("CPU:0"):  # a GPU's results are NaN
        trie_step(**{**WHOLE, **given_}, k=2)
    with pytest.raises(ConfigError, match="k must be a whole number from 1 on, got 0"):
        trie_step(**WHOLE, k=0)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"nodes": [[9]]}, "nodes must be of the level"),
        ({"logits": np.zeros((1, 1, 2))}, "digits must be below the number of logits"),
        ({"digits": np.array([0, 1, 2**32 + 2])}, "digits must be below the number of logits"),
        ({"logits": np.full((1, 1, 3), np.nan)}, "logits hold NaN or infinity"),
        ({"scores": [[np.nan]]}, "a score is NaN"),
    ],
)
def test_the_portable_form_names_it_too(given_: dict, said: str) -> None:
    with portable_ops(), pytest.raises(tf.errors.InvalidArgumentError, match=f"trie_step: {said}"):
        trie_step(**{**WHOLE, **given_}, k=2)

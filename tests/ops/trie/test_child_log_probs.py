"""Logs of children's probabilities against NumPy, their gradients, and their form in plain TensorFlow."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.models.generative.code_tables import CodeTrie
from gmeta.ops.table.portable_tables import portable_ops
from gmeta.ops.trie import trie_log_probs

SEEDS = st.integers(0, 2**31 - 1)
CODES = 6


class Case:
    """Rows at random nodes of a level of a random trie."""

    def __init__(self, seed: int, rows: int, masks: bool) -> None:
        rng = np.random.default_rng(seed)
        trie = CodeTrie.of(np.unique(rng.integers(0, CODES, (rng.integers(1, 50), 3)), axis=0))
        level = rng.integers(0, 3)
        self.starts, self.digits = trie.starts[level], trie.digits[level]
        mask = rng.random(len(trie.places)) < 0.5
        mask[0] = True
        self.allowed = trie.allow(mask)[level] if masks else None
        may = np.flatnonzero(np.ones(len(self.digits), bool) if self.allowed is None else self.allowed)
        self.children = rng.choice(may, rows)
        self.nodes = np.searchsorted(self.starts, self.children, side="right") - 1
        absent = rng.random(rows) < 0.2
        self.nodes[absent], self.children[absent] = rng.integers(-1, 2, absent.sum()), -1
        self.logits = rng.normal(0, 3, (rows, CODES)).astype(np.float32)
        self.upstream = rng.normal(size=rows).astype(np.float32)

    def reference(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Values, the logits' gradient under ``upstream``, and which logits have a part in them."""
        y, gradient = np.zeros(len(self.nodes)), np.zeros(self.logits.shape)
        part = np.zeros(self.logits.shape, bool)
        for row, (node, child) in enumerate(zip(self.nodes, self.children, strict=True)):
            if child < 0:
                continue
            siblings = np.arange(self.starts[node], self.starts[node + 1])
            siblings = siblings if self.allowed is None else siblings[self.allowed[siblings]]
            z = self.logits[row].astype(np.float64)
            whole = np.logaddexp.reduce(z[self.digits[siblings]])
            y[row] = z[self.digits[child]] - whole
            gradient[row, self.digits[siblings]] -= np.exp(z[self.digits[siblings]] - whole)
            gradient[row, self.digits[child]] += 1
            part[row, self.digits[siblings]] = True
        return y, gradient * self.upstream[:, None], part

    def run(self, logits: tf.Tensor) -> tf.Tensor:
        return trie_log_probs(logits, self.nodes, self.children, self.starts, self.digits, self.allowed)

    def with_gradient(self, logits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(logits)
            y = self.run(logits)
        return y, tape.gradient(y, logits, self.upstream)


@pytest.mark.parametrize("form", ["eager", "function", "portable"])
@given(SEEDS, st.integers(0, 20), st.booleans())
def test_values_and_gradients_are_the_references(form: str, seed: int, rows: int, masks: bool) -> None:
    case = Case(seed, rows, masks)
    y, gradient, part = case.reference()
    logits = tf.constant(case.logits)
    if form == "portable":
        with portable_ops():
            found = case.with_gradient(logits)
    else:
        found = (tf.function(case.with_gradient) if form == "function" else case.with_gradient)(logits)
    np.testing.assert_allclose(found[0], y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], gradient, rtol=1e-5, atol=1e-5)
    assert not found[1].numpy()[~part].any()


def test_probabilities_of_all_items_sum_to_one() -> None:
    rng = np.random.default_rng(3)
    trie = CodeTrie.of(np.unique(rng.integers(0, CODES, (80, 3)), axis=0))
    paths = [np.arange(len(trie.places))]
    for starts in trie.starts[:0:-1]:
        paths.append(np.searchsorted(starts, paths[-1], side="right") - 1)
    paths.append(np.zeros_like(paths[0]))
    total = np.zeros(len(trie.places))
    for level, (nodes, children) in enumerate(itertools.pairwise(paths[::-1])):
        z = rng.normal(0, 3, (len(trie.starts[level]) - 1, CODES))[nodes]  # of the prefix alone
        total += trie_log_probs(z, nodes, children, trie.starts[level], trie.digits[level]).numpy()
    np.testing.assert_allclose(np.exp(total).sum(), 1, rtol=1e-5)


@pytest.mark.parametrize("masks", [False, True])
def test_a_gradient_has_a_gradient(masks: bool) -> None:
    case = Case(11, 5, masks)
    logits = tf.constant(case.logits)

    weights = tf.constant(np.random.default_rng(1).normal(size=case.logits.shape), tf.float32)

    def second() -> tf.Tensor:
        with tf.GradientTape() as outer:
            outer.watch(logits)
            gradient = case.with_gradient(logits)[1]
        return outer.gradient(gradient, logits, weights)

    with portable_ops():
        expected = second()
    np.testing.assert_allclose(second(), expected, atol=1e-6)


def test_what_has_no_chance_is_minus_infinity_and_adds_nothing() -> None:
    minus = -np.inf
    logits = tf.constant([[1.0, minus, 1.0], [minus, minus, 5.0], [minus, minus, minus]])
    starts, digits = [0, 2], [0, 1]  # the third code is no child
    for form in (portable_ops(), tf.device("CPU:0")):
        with form, tf.GradientTape() as tape:
            tape.watch(logits)
            y = trie_log_probs(logits, [0, 0, 0], [0, 1, 0], starts, digits)
        np.testing.assert_array_equal(y, [0, minus, minus])
        assert not np.isnan(tape.gradient(y, logits)).any()


WHOLE = {"logits": np.zeros((2, 3)), "nodes": [0, 1], "children": [1, 2], "starts": [0, 2, 4]}
WHOLE["digits"] = [0, 1, 0, 2]


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"children": [1, 1]}, "in row 1 node 1 has the children 2 to 3, not 1: give a child of the node"),
        ({"children": [-2, 2]}, "in row 0 node 0 has the children 0 to 1, not -2"),
        ({"nodes": [0, 2]}, "row 1 is at node 2, but the level has 2"),
        ({"nodes": [-1, 1]}, "row 0 is at node -1"),
        ({"digits": [0, 7, 0, 2]}, "child 1 has digit 7, but there are 3 logits for row 0"),
        ({"digits": [0, 1, 0, -1]}, "child 3 has digit -1"),
        ({"logits": [[0, 0, 0], [0, 0, np.nan]]}, "the logits of row 1 hold NaN or infinity"),
        ({"logits": [[np.inf, 0, 0], [0, 0, 0]]}, "the logits of row 0 hold NaN or infinity"),
        ({"allowed": [True, False, True, True]}, "in row 0 the mask forbids child 1 of node 0"),
        ({"allowed": [True]}, "the level has 4 children, but 1 values of allowed"),
        ({"starts": [0, 2, 9]}, "node 1 has children 2 to 9, but the level has 4"),
        ({"nodes": [0]}, r"got \[2,3\], \[1\] and \[2\]"),
    ],
)
def test_what_does_not_fit_is_named(given_: dict, said: str) -> None:
    wrong = pytest.raises(tf.errors.InvalidArgumentError, match=f"trie_log_probs: .*{said}")
    with wrong, tf.device("CPU:0"):  # a GPU's results are NaN
        trie_log_probs(**{**WHOLE, **given_})


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"children": [1, 1]}, "a child must be its node's, and allowed"),
        ({"allowed": [True, False, True, True]}, "a child must be its node's, and allowed"),
        ({"nodes": [0, 2]}, "nodes must be of the level"),
        ({"digits": [0, 7, 0, 2]}, "digits must be below the number of logits"),
        ({"logits": [[0, 0, 0], [0, 0, np.nan]]}, "logits hold NaN or infinity"),
    ],
)
def test_the_portable_form_names_it_too(given_: dict, said: str) -> None:
    with portable_ops(), pytest.raises(tf.errors.InvalidArgumentError, match=f"trie_log_probs: {said}"):
        trie_log_probs(**{**WHOLE, **given_})


def test_what_is_not_read_may_be_anything() -> None:
    logits = [[0.0, 0.0, np.nan], [0.0, np.nan, 0.0], [np.nan] * 3]
    y = trie_log_probs(logits, [0, 1, 0], [1, 2, -1], [0, 2, 4], [0, 1, 0, 2])
    np.testing.assert_allclose(y, [-np.log(2), -np.log(2), 0], rtol=1e-6)

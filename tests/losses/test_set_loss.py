"""The softmax of several right items is that of loops; negatives drawn by popularity keep its law."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.losses.softmax import popularity_negatives, set_softmax


def by_loops(scores, known, users, columns, counts, q):
    """The definition, item by item."""
    found = []
    for user, column in zip(users, columns, strict=True):
        right = np.exp(scores[user, column]) / q[column]
        others = sum(
            counts[j] * np.exp(scores[user, j]) / q[j] for j in range(scores.shape[1]) if not known[user, j]
        )
        found.append(-np.log(right / (right + others)))
    return found


@settings(max_examples=25, deadline=None)
@given(users=st.integers(1, 4), items=st.integers(1, 6), seed=st.integers(0, 999), right=st.integers(0, 7))
def test_losses_are_those_of_loops(users, items, seed, right):
    rng = np.random.default_rng(seed)
    scores, known = rng.normal(size=(users, items)), rng.random((users, items)) < 0.4
    owner, columns = rng.integers(0, users, right), rng.integers(0, items, right)
    known[owner, columns] = True
    counts, q = rng.integers(0, 3, items), rng.uniform(0.1, 2, items)
    with np.errstate(divide="ignore"):
        found = set_softmax(scores, known, owner, columns, log_counts=np.log(counts), log_q=np.log(q))
    np.testing.assert_allclose(found, by_loops(scores, known, owner, columns, counts, q), atol=1e-9)
    plain = set_softmax(scores, known, owner, columns)
    ones = np.ones(items)
    np.testing.assert_allclose(plain, by_loops(scores, known, owner, columns, ones, ones), atol=1e-9)


def test_a_user_who_has_everything_has_neither_loss_nor_gradient():
    scores = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    with tf.GradientTape() as tape:
        losses = set_softmax(scores, [[True, True], [True, False]], [0, 1], [0, 0])
    gradient = tape.gradient(losses, scores).numpy()
    np.testing.assert_allclose(losses, [0.0, np.log(1 + np.e)], rtol=1e-6)
    np.testing.assert_array_equal(gradient[0], 0)
    assert np.isfinite(gradient).all()
    with pytest.raises(ConfigError, match=r"must be \(users, candidates\)"):
        set_softmax([1.0], [[True]], [0], [0])


def test_draws_have_the_shares_of_items_and_are_those_of_seed_and_step():
    shares = np.array([0, 5, 1, 0, 3, 1, 0])
    drawn = popularity_negatives([1000, 50], shares, seed=4, step=2)
    assert drawn.shape == (1000, 50)
    counts = np.bincount(np.ravel(drawn), minlength=7)
    assert (counts[shares == 0] == 0).all()
    expected = 50_000 * shares[shares > 0] / shares.sum()
    assert ((counts[shares > 0] - expected) ** 2 / expected).sum() < 21  # of 3 degrees: once in 10,000
    again = tf.function(popularity_negatives)([1000, 50], shares, seed=4, step=tf.Variable(2, dtype=tf.int64))
    np.testing.assert_array_equal(again, drawn)
    assert (popularity_negatives([1000, 50], shares, seed=4, step=3) != drawn).numpy().mean() > 0.5

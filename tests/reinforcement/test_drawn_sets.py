"""Weights of sets drawn without replacement: against the sum over all orders, and unbiased."""

from itertools import combinations, permutations

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.reinforcement.losses import set_weights


def chance(p, chosen):
    """The probability that just these are drawn, in whatever order."""
    total = 0.0
    for order in permutations(chosen):
        left, product = 1.0, 1.0
        for item in order:
            product *= p[item] / left
            left -= p[item]
        total += product
    return total


def by_orders(p, chosen):
    found = []
    for item in chosen:
        rest = p.copy()
        rest[item] = 0
        found.append(
            p[item] * chance(rest / rest.sum(), [i for i in chosen if i != item]) / chance(p, chosen)
        )
    return np.array(found)


@pytest.mark.parametrize("power", [0.0, 1.0, 6.0, 20.0])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_as_the_sum_over_all_orders(power, group):
    p = np.random.default_rng(0).uniform(0.05, 1, 6) ** power
    p /= p.sum()
    for chosen in combinations(range(6), group):
        found = set_weights(np.log(p[list(chosen)])[None])[0]
        np.testing.assert_allclose(found, by_orders(p, chosen), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("group", [2, 3])
def test_the_estimate_is_unbiased(group):
    """The expectation, over all sets by their probabilities, is exact; with equal weights it is far off."""
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.full(7, 0.5))
    values = rng.normal(size=7)
    sets = list(combinations(range(7), group))
    weights = set_weights(np.log(p[np.array(sets)])).numpy()
    chances = np.array([chance(p, each) for each in sets])
    assert chances.sum() == pytest.approx(1)
    exact = (p * values).sum()
    assert (chances * (weights * values[np.array(sets)]).sum(axis=1)).sum() == pytest.approx(exact, rel=1e-5)
    plain = (chances * values[np.array(sets)].mean(axis=1)).sum()
    assert abs(plain - exact) > 0.05


def test_of_a_large_catalogue():
    """16 items of about 1e-6 each: their set has a probability that no float could hold."""
    found = set_weights(tf.fill([2, 16], np.log(1e-6))).numpy()
    np.testing.assert_allclose(found, 1 / 16, rtol=1e-4)


def test_of_all_items():
    found = set_weights(np.log([[0.7, 0.2, 0.1]])).numpy()
    np.testing.assert_allclose(found, [[0.7, 0.2, 0.1]], rtol=1e-4)


def test_what_is_refused():
    with pytest.raises(ConfigError, match=r"log_probs must be \(users, group\), got \(1, 2, 3\)"):
        set_weights(tf.zeros([1, 2, 3]))

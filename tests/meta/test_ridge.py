"""The closed form against NumPy in float64, in both of its systems, and its gradients."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.meta.ridge import factorize, solve, variance


def draw(seed, tasks, samples, width, outputs):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(tasks, samples, width))
    residuals = rng.normal(size=(tasks, samples, outputs))
    weights = rng.uniform(0.2, 3.0, (tasks, samples)) * (rng.random((tasks, samples)) < 0.8)
    return features, residuals, weights, rng.uniform(0.05, 2.0, width), rng.normal(size=(tasks, 3, width))


def by_normal_equations(features, residuals, weights, prior, query):
    """The head's posterior as the textbook has it: precision P^-1 + X' M X, in float64."""
    heads, variances = [], []
    for x, r, m, q in zip(features, residuals, weights, query, strict=True):
        precision = np.diag(1 / prior) + x.T @ (m[:, None] * x)
        heads.append(np.linalg.solve(precision, x.T @ (m[:, None] * r)))
        variances.append(np.einsum("if,if->i", q, np.linalg.solve(precision, q.T).T))
    return np.array(heads), np.array(variances)


def run(features, residuals, weights, prior, query, dtype=tf.float64):
    features, residuals, weights, prior, query = (
        tf.constant(each, dtype) for each in (features, residuals, weights, prior, query)
    )
    ridge = factorize(features, prior, weights)
    return solve(ridge, prior, weights, residuals), variance(ridge, prior, query)


@given(
    seed=st.integers(0, 2**32 - 1),
    tasks=st.integers(1, 3),
    samples=st.integers(1, 9),
    width=st.integers(1, 9),
    outputs=st.integers(1, 2),
)
def test_heads_and_variances_are_those_of_the_normal_equations(seed, tasks, samples, width, outputs):
    drawn = draw(seed, tasks, samples, width, outputs)
    for found, want in zip(run(*drawn), by_normal_equations(*drawn), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("samples", "width"), [(4, 30), (30, 4)])
def test_float32_agrees_in_both_systems(samples, width):
    drawn = draw(1, 5, samples, width, 1)
    for found, want in zip(run(*drawn, dtype=tf.float32), by_normal_equations(*drawn), strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-4, atol=2e-5)


def test_without_samples_the_head_is_the_priors():
    features, residuals, weights, prior, query = draw(2, 2, 5, 3, 1)
    heads, variances = run(features, residuals, 0 * weights, prior, query)
    np.testing.assert_array_equal(heads, np.zeros([2, 3, 1]))
    np.testing.assert_allclose(variances, (query**2 * prior).sum(-1), rtol=1e-12)
    heads, _ = run(features[:, :0], residuals[:, :0], weights[:, :0], prior, query)
    np.testing.assert_array_equal(heads, np.zeros([2, 3, 1]))


@pytest.mark.parametrize(("samples", "width"), [(3, 5), (6, 3)])
def test_gradients_are_those_of_finite_differences(samples, width):
    features, residuals, weights, prior, query = draw(3, 2, samples, width, 1)
    weights = weights + 0.1  # the root of a weight has no slope at 0
    given_ = [tf.constant(each) for each in (features, residuals, weights, prior)]

    def loss(features, residuals, weights, prior):
        ridge = factorize(features, prior, weights)
        head, spread = solve(ridge, prior, weights, residuals), variance(ridge, prior, tf.constant(query))
        return tf.reduce_sum(tf.sin(tf.matmul(query, head))) + tf.reduce_sum(tf.math.log(spread))

    with tf.GradientTape() as tape:
        tape.watch(given_)
        value = tf.function(loss)(*given_)
    gradients = tape.gradient(value, given_)
    rng = np.random.default_rng(0)
    for place, gradient in enumerate(gradients):
        way = rng.normal(size=gradient.shape)
        ends = []
        for step in (1e-6, -1e-6):
            moved = list(given_)
            moved[place] = given_[place] + step * way
            ends.append(float(loss(*moved)))
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(float(tf.reduce_sum(gradient * way)), rel=1e-5)

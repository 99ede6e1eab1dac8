"""Kriging and factors against Gaussian processes and expectation maximisation written out task by task."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gmeta.experiment.baselines.attributes import Biases
from gmeta.experiment.baselines.vectors import CoRatings, Factors, ItemVectors, Kriging, Start, _State, _turn
from support.drawn_batches import task_rows, tasks_of


@given(task_rows(), st.integers(1, 4))
def test_ridge_on_vectors_is_kriging_with_their_covariance(case, width):
    tasks, items = case
    rng = np.random.default_rng(width)
    bias, vectors = rng.normal(size=items + 1), rng.normal(size=[items + 1, width])
    model = ItemVectors(3.0, bias, np.arange(items + 1), vectors, noise=0.7)
    covariance = vectors @ vectors.T
    predicted, variance = model.predict(tasks), model.variance(tasks)
    for row, (t, i) in enumerate(zip(tasks.query.task, tasks.query.items, strict=True)):
        own = tasks.support.items[tasks.support.task == t]
        rest = tasks.support.labels[tasks.support.task == t] - 3.0 - bias[own]
        weights = np.linalg.solve(covariance[np.ix_(own, own)] + 0.7 * np.eye(len(own)), covariance[own, i])
        np.testing.assert_allclose(predicted[row], 3.0 + bias[i] + weights @ rest, atol=1e-8)
        left = covariance[i, i] - weights @ covariance[own, i]
        np.testing.assert_allclose(variance[row], left + 0.7, atol=1e-8)


@given(task_rows())
def test_kriging_has_the_shrunk_covariance_where_that_is_positive_definite(case):
    tasks, items = case
    rows = tasks.whole()
    biases = Biases(3.0, 2.0).fit(rows, items)
    pairs = CoRatings.of(rows, biases)
    model = Kriging(shrinkage=4.0, rank=items + 1, noise=0.9).fit(biases, pairs)
    wanted = pairs.products.astype(np.float64) / (pairs.counts + 4.0)
    values, vectors = np.linalg.eigh(wanted)
    wanted = (vectors * np.maximum(values, 0)) @ vectors.T + pairs.common
    np.testing.assert_allclose(model.vectors @ model.vectors.T, wanted, atol=1e-3)


def turn_by_hand(state, rows, damping, precision):
    """One turn of expectation maximisation, a task and an item at a time."""
    bias, vectors, noise = state.bias, state.vectors, state.noise
    slots, width = vectors.shape
    means, covariances, error = [], [], 0.0
    for t in range(len(rows.sizes)):
        own = rows.task == t
        x, y = vectors[rows.items[own]], rows.labels[own] - bias[rows.items[own]]
        covariances.append(np.linalg.inv(x.T @ x / noise + np.eye(width)))
        means.append(covariances[-1] @ x.T @ y / noise)
        error += np.square(y - x @ means[-1]).sum() + np.trace(x @ covariances[-1] @ x.T)
    found_bias, found = np.zeros(slots), np.zeros([slots, width])
    for i in range(slots - 1):
        left = np.diag([damping / noise, *[precision] * (width - 1)])
        right = np.zeros(width)
        for t in rows.task[rows.items == i]:
            second = np.outer(means[t], means[t]) + covariances[t]
            design = second.copy()
            design[0, 0], design[0, 1:], design[1:, 0] = 1, means[t][1:], means[t][1:]
            left += design / noise
            right -= vectors[0, 0] * np.concatenate([[means[t][0]], second[0, 1:]]) / noise
        for t, y in zip(rows.task[rows.items == i], rows.labels[rows.items == i], strict=True):
            right += y * np.concatenate([[1], means[t][1:]]) / noise
        solved = np.linalg.solve(left, right)
        found_bias[i], found[i, 1:] = solved[0], solved[1:]
    spread = np.mean([m[0] ** 2 + c[0, 0] for m, c in zip(means, covariances, strict=True)])
    found[:, 0] = vectors[0, 0] * np.sqrt(spread)
    return found_bias, found, error / len(rows.labels)


@given(task_rows(), st.integers(0, 3))
def test_a_turn_of_factors_is_expectation_maximisation(case, rank):
    tasks, items = case
    rows = tasks.whole()
    rng = np.random.default_rng(rank)
    vectors = np.concatenate([np.full([items + 1, 1], 0.4), rng.normal(size=[items + 1, rank])], axis=1)
    bias = rng.normal(size=items + 1)
    vectors[-1, 1:] = bias[-1] = 0
    state = _State(bias, vectors, 0.8)
    found = _turn(state, rows, 2.0, 3.0, 0.0)
    for one, other in zip(
        (found.bias, found.vectors, found.noise), turn_by_hand(state, rows, 2.0, 3.0), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-7)


def test_factors_find_what_tells_tasks_apart():
    rng = np.random.default_rng(0)
    tasks = tasks_of(0, [20] * 200, [5] * 200, 30)
    taste, kind = rng.normal(size=200), rng.choice([-1.0, 1.0], 30)
    for side in (tasks.support, tasks.query):
        side.labels[:] = 3 + taste[side.task] * kind[side.items] + rng.normal(0, 0.3, len(side.labels))
    biases = Biases(5.0, 5.0)
    fitted = biases.fit(tasks.whole(), 30)
    pairs = CoRatings.of(tasks.whole(), fitted)
    model = Factors(rank=2, penalty=10.0).fit(tasks.whole(), biases, fitted, Start.of(pairs, 2))
    off = [np.sqrt(np.square(one.predict(tasks) - tasks.query.labels).mean()) for one in (model, fitted)]
    assert off[0] < 0.36 < 0.8 < off[1]
    assert 0.07 < model.noise < 0.11

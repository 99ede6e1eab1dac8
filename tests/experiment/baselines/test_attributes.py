"""Ridge on attributes against dense matrices, a row, a pair and a task at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from gmeta.experiment.baselines import attributes
from gmeta.experiment.baselines import attributes as attribute_variances
from gmeta.experiment.baselines.attributes import Attributes, FittedBiases, ItemAttributes, Levels, Variances
from gmeta.experiment.baselines.task_rows import Rows, Tasks, cut_blocks, multiply
from gmeta.experiment.baselines.tuning import Baselines
from support.drawn_batches import task_rows, tasks_of


def attributes_of(items, seed=0):
    """A column of single values, and one of lists that may be empty."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, items)
    values = [rng.choice(5, count, replace=False) for count in counts]
    single = rng.integers(0, 3, items), np.ones(items, np.int64)
    return ItemAttributes.of({"one": single, "many": (np.concatenate(values), counts)})


def dense(known):
    return np.concatenate([each.toarray() for each in known.columns.values()], axis=1)


def test_a_list_says_as_much_as_a_single_value():
    known = attributes_of(50)
    lengths = np.square(known.columns["many"].toarray()).sum(axis=1)
    assert set(lengths.round(12)) == {0.0, 1.0}
    np.testing.assert_allclose(np.square(known.columns["one"].toarray()).sum(axis=1), 1)


@given(task_rows())
def test_levels_are_the_joint_ridge_regression(case):
    tasks, items = case
    rows, known = tasks.whole(), attributes_of(items + 2)
    found = Levels(penalty=3.0, item_damping=2.0, task_damping=4.0).fit(rows, known)
    has, each = dense(known), np.eye(items + 2)
    design = np.concatenate([has[rows.items], each[rows.items], np.eye(len(rows.sizes))[rows.task]], axis=1)
    penalty = np.repeat([3.0, 2.0, 4.0], [has.shape[1], items + 2, len(rows.sizes)])
    left = design.T @ design + np.diag(penalty)
    best = np.linalg.solve(left, design.T @ (rows.labels - rows.labels.mean()))
    expected = has @ best[: has.shape[1]] + best[has.shape[1] : has.shape[1] + items + 2]
    np.testing.assert_allclose(found.item, expected, atol=1e-5)
    assert (found.mean, found.task_damping) == (rows.labels.mean(), 4.0)


@given(task_rows(), st.integers(1, 40))
def test_rows_are_multiplied_with_those_of_their_own_task(case, most):
    tasks, items = case
    vectors = attributes_of(items).columns["many"]
    expected = (vectors @ vectors.T).toarray()
    for block in cut_blocks(tasks, most):
        found = multiply(vectors, tasks.query, tasks.support, block)
        pairs = block.asked[:, :, None] & block.given[:, None]
        rows, columns = tasks.query.items[block.query], tasks.support.items[block.support]
        wanted = np.where(pairs, expected[rows[:, :, None], columns[:, None]], 0)
        np.testing.assert_allclose(found, wanted, atol=1e-12)


@given(task_rows())
def test_no_variances_from_zero_on_fit_the_products_of_pairs_better(case):
    tasks, items = case
    rows, known = tasks.whole(), attributes_of(items)
    levels = Levels(3.0, 2.0, 4.0).fit(rows, known)
    residuals, parts = levels.residuals(rows), [each.toarray() for each in known.columns.values()]
    kernels = [part @ part.T for part in [np.ones((items, 1)), *parts, np.eye(items)]]
    pairs = [(a, b) for a, t in enumerate(rows.task) for b, u in enumerate(rows.task) if t == u and a != b]
    scale = np.array([1 / np.sqrt(rows.sizes[rows.task[a]] - 1) for a, _ in pairs])
    products = scale * [residuals[a] * residuals[b] for a, b in pairs]

    def told(kernel):
        return scale * [kernel[rows.items[a], rows.items[b]] for a, b in pairs]

    found = Variances.of(rows, levels, known)
    covariance = (found.vectors @ found.vectors.T).toarray()
    design = np.stack([told(each) for each in kernels], axis=1)
    cost = 2 * lsq_linear(design, products, (0, np.inf), tol=1e-12).cost if pairs else 0
    assert np.square(told(covariance) - products).sum() == pytest.approx(cost, abs=1e-4 * (1 + cost))
    whole = np.square(residuals).mean()
    noise = whole - covariance[rows.items, rows.items].mean()
    assert found.noise == pytest.approx(max(noise, 1e-3 * whole, 1e-15))


def test_variances_are_found_column_by_column():
    rng = np.random.default_rng(0)
    known, sizes = attributes_of(40), np.full(3000, 8)
    items = np.concatenate([rng.choice(40, 8, replace=False) for _ in sizes])
    rows = Rows(items, rng.normal(size=len(items)), np.arange(0, len(items) + 1, 8))
    for name, deviation in (("one", 0.5), ("many", 1.0)):
        column = known.columns[name].toarray()
        taste = rng.normal(0, deviation, (len(sizes), column.shape[1]))
        rows.labels[:] += np.einsum("rk,rk->r", column[items], taste[rows.task])
    found = Variances.of(rows, FittedBiases(0.0, np.zeros(40), 1.0), known)
    diagonal = (found.vectors @ found.vectors.T).toarray().diagonal()
    listed = known.columns["many"].getnnz(axis=1) > 0
    assert diagonal[~listed].mean() == pytest.approx(0.25, abs=0.05)
    assert diagonal[listed].mean() == pytest.approx(1.25, abs=0.1)
    assert found.noise == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("most", [1000, 2])
@given(case=task_rows())
def test_support_rows_condition_a_gaussian_process(most, case):
    tasks, items = case
    known = attributes_of(items)
    with pytest.MonkeyPatch.context() as patch:
        for module in (attributes, attribute_variances):
            patch.setattr(module, "MOST_ROWS", most)
        fitted = Attributes(Levels(3.0, 2.0, 4.0), known).fit(tasks.whole())
        predicted, variance = fitted.predict(tasks), fitted.variance(tasks)
    level, noise = fitted.levels.mean + fitted.levels.item, fitted.variances.noise
    covariance = (fitted.variances.vectors @ fitted.variances.vectors.T).toarray()
    support = tasks.latest(most).support
    for row, (t, i) in enumerate(zip(tasks.query.task, tasks.query.items, strict=True)):
        own = support.items[support.task == t]
        inner = covariance[np.ix_(own, own)] + noise * np.eye(len(own))
        weights = np.linalg.solve(inner, covariance[own, i])
        rest = support.labels[support.task == t] - level[own]
        np.testing.assert_allclose(predicted[row], level[i] + weights @ rest, atol=1e-8)
        np.testing.assert_allclose(
            variance[row], noise + covariance[i, i] - weights @ covariance[own, i], atol=1e-8
        )


def liked(items):
    """Tasks whose labels are their items' single attribute: 1, 3 or 5."""
    tasks, known = tasks_of(0, [6] * 200, [3] * 200, items), attributes_of(30)
    means = known.columns["one"].toarray() @ [1.0, 3.0, 5.0]
    for side in (tasks.support, tasks.query):
        side.labels[:] = means[side.items]
    return tasks, known, means


def test_a_new_item_has_the_level_of_its_attributes_and_other_baselines_give_the_mean():
    warm, known, means = liked(20)
    baselines = Baselines.of(warm, 20, attributes=known)
    nothing = Rows(np.zeros(0, np.int64), np.zeros(0), np.zeros(2, np.int64))
    new = np.arange(20, 30)
    asked = Tasks(nothing, Rows(new, np.zeros(10), np.array([0, 10])))
    found = baselines.predict(asked)
    assert list(found) == ["item_mean", "biases", "neighbours", "kriging", "factors", "attributes"]
    np.testing.assert_allclose(found["attributes"], means[new], atol=0.5)
    assert np.ptp(found["biases"]) == np.ptp(found["factors"]) == 0
    assert list(baselines.variances(asked)) == ["kriging", "factors", "attributes"]
    again = baselines.predict_warm(warm, warm)["attributes"]
    np.testing.assert_allclose(again, warm.query.labels, atol=0.4)
    assert "rows of an item" in baselines.tuned.describe()["attributes"]


def test_a_task_s_rows_tell_its_taste_in_attributes_of_new_items():
    warm, known, _ = liked(20)
    rng = np.random.default_rng(1)
    column = known.columns["one"].toarray()
    taste = rng.normal(0, 2, (200, 3))
    for rows in (warm.support, warm.query):
        rows.labels[:] += np.einsum("rk,rk->r", column[rows.items], taste[rows.task])
    fitted = Attributes(Levels(1.0, 5.0, 5.0), known).fit(warm.whole())
    [first, *_], [second, *_] = (np.flatnonzero(column[20:, each]) + 20 for each in (0, 1))
    support = Rows(np.array([first]), fitted.levels.mean + fitted.levels.item[[first]] + 3, np.array([0, 1]))
    alike = np.flatnonzero(column[:, 0])[:1]
    asked = Tasks(support, Rows(np.array([alike[0], second]), np.zeros(2), np.array([0, 2])))
    moved = fitted.predict(asked) - fitted.levels.mean - fitted.levels.item[asked.query.items]
    assert moved[0] > 1 > moved[1]

"""Item mean, damped biases and neighbours against what their formulas say, written out row by row."""

import numpy as np
import pytest
from hypothesis import given

from gmeta.experiment.baselines.attributes import TURNS, Biases, ItemMean
from gmeta.experiment.baselines.tuning import Neighbours
from gmeta.experiment.baselines.vectors import CoRatings, number_frequent
from support.drawn_batches import task_rows


@given(task_rows())
def test_an_item_mean_is_damped_and_falls_back_to_the_mean_of_all(case):
    tasks, items = case
    rows = tasks.whole()
    found = ItemMean(2.0).fit(rows, items).predict(tasks)
    mean = rows.labels.mean()
    for item, value in zip(tasks.query.items, found, strict=True):
        own = [label for other, label in zip(rows.items, rows.labels, strict=True) if other == item]
        assert value == pytest.approx((sum(own) + 2 * mean) / (len(own) + 2))


def biases_by_hand(rows, items, d_item, d_task):
    mean, item, task = rows.labels.mean(), np.zeros(items + 1), np.zeros(len(rows.sizes))
    for _ in range(TURNS):
        for i in range(items + 1):
            own = [
                y - mean - task[t]
                for t, j, y in zip(rows.task, rows.items, rows.labels, strict=True)
                if j == i
            ]
            item[i] = sum(own) / (len(own) + d_item)
        for t in range(len(task)):
            own = [
                y - mean - item[j]
                for u, j, y in zip(rows.task, rows.items, rows.labels, strict=True)
                if u == t
            ]
            task[t] = sum(own) / (len(own) + d_task)
    return mean, item


@given(task_rows())
def test_biases_are_fitted_by_turns_and_a_task_s_comes_from_its_support(case):
    tasks, items = case
    fitted = Biases(3.0, 2.0).fit(tasks.whole(), items)
    mean, item = biases_by_hand(tasks.whole(), items, 3.0, 2.0)
    np.testing.assert_allclose(fitted.item, item, atol=1e-9)
    expected = []
    for t, i in zip(tasks.query.task, tasks.query.items, strict=True):
        rest = (tasks.support.labels - mean - item[tasks.support.items])[tasks.support.task == t]
        expected.append(mean + item[i] + rest.sum() / (len(rest) + 2.0))
    np.testing.assert_allclose(fitted.predict(tasks), expected, atol=1e-9)


def pairs_by_hand(rows, residuals, slots):
    width = slots.max() + 1
    products, counts, each = np.zeros([width, width]), np.zeros([width, width]), []
    for t in range(len(rows.sizes)):
        own = np.flatnonzero(rows.task == t)
        each.append([residuals[a] * residuals[b] for a in own for b in own if a != b])
        for a in own:
            for b in own:
                i, j = slots[rows.items[a]], slots[rows.items[b]]
                if a != b and max(i, j) < width - 1:
                    products[i, j] += residuals[a] * residuals[b]
                    counts[i, j] += 1
    sizes = [len(pairs) and int(0.5 + np.sqrt(len(pairs) + 0.25)) for pairs in each]
    common = sum(np.mean(p) * n for p, n in zip(each, sizes, strict=True) if n) / max(sum(sizes), 1)
    return products, counts, max(common, np.square(residuals).mean() / 1000)


@given(task_rows())
def test_pairs_of_rows_are_those_of_one_task_and_never_a_row_with_itself(case):
    tasks, items = case
    rows = tasks.whole()
    biases = Biases(3.0, 2.0).fit(rows, items)
    found = CoRatings.of(rows, biases, most=3)
    products, counts, common = pairs_by_hand(rows, biases.residuals(rows), found.slots)
    assert found.common == pytest.approx(common, rel=1e-4)
    np.testing.assert_array_equal(found.counts, counts)
    np.testing.assert_allclose(found.products, products - common * counts, atol=1e-4)


@given(task_rows())
def test_the_vectors_are_those_of_the_nearest_matrix_without_negative_eigenvalues(case):
    tasks, items = case
    rows = tasks.whole()
    pairs = CoRatings.of(rows, Biases(3.0, 2.0).fit(rows, items))
    centred = pairs.products.astype(np.float64) / (pairs.counts + 5.0)
    values, vectors = np.linalg.eigh(centred)
    kept = np.maximum(values, 0)
    found = pairs.vectors(5.0, len(values)).astype(np.float64)
    np.testing.assert_allclose(found @ found.T, (vectors * kept) @ vectors.T, atol=1e-3)


@given(task_rows())
def test_the_nearest_rows_speak_for_an_item(case):
    tasks, items = case
    rows = tasks.whole()
    biases = Biases(3.0, 2.0).fit(rows, items)
    pairs = CoRatings.of(rows, biases)
    found = Neighbours(size=2, shrinkage=1.0, damping=0.1).fit(biases, pairs).predict(tasks)
    own, rest = biases.tasks(tasks.support), biases.residuals(tasks.support)
    for row, (t, i) in enumerate(zip(tasks.query.task, tasks.query.items, strict=True)):
        near = []
        for s in np.flatnonzero(tasks.support.task == t):
            a, b = pairs.slots[i], pairs.slots[tasks.support.items[s]]
            weight = max(pairs.products[a, b], 0) / (pairs.counts[a, b] + 1.0)
            near.append((weight, rest[s] - own[t]))
        near = sorted(near, key=lambda each: -each[0])[:2]
        moved = sum(w * r for w, r in near) / (sum(w for w, _ in near) + 0.1 * pairs.variance)
        assert found[row] == pytest.approx(biases.mean + biases.item[i] + own[t] + moved, abs=1e-5)


def test_items_with_most_rows_get_numbers_of_their_own():
    np.testing.assert_array_equal(number_frequent(np.array([2, 2, 0, 0, 0, 1]), 4, 2), [0, 2, 1, 2, 2])

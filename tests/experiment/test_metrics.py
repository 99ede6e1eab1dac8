import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import DataError
from gmeta.experiment.results.metrics import OF_RATINGS, auc, ndcg, rating_metrics


def naive_auc(labels, predictions):
    pairs = [
        1.0 if p > q else 0.5 if p == q else 0.0
        for r, p in zip(labels, predictions, strict=True)
        for s, q in zip(labels, predictions, strict=True)
        if r >= 4 > s
    ]
    return sum(pairs) / len(pairs) if pairs else math.nan


def naive_ndcg(labels, predictions, splits, k):
    """The expectation over all orders of tied items, each written out."""
    values = []
    for start, end in itertools.pairwise(splits):
        gains = [2.0**rating - 1 for rating in labels[start:end]]
        if len(gains) < 2 or not any(gains):
            continue

        def dcg(order):
            return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(order[:k]))

        falling = sorted(predictions[start:end], reverse=True)
        orders = [
            [gains[i] for i in order]
            for order in itertools.permutations(range(end - start))
            if [predictions[start + i] for i in order] == falling
        ]
        values.append(sum(map(dcg, orders)) / len(orders) / dcg(sorted(gains, reverse=True)))
    return sum(values) / len(values) if values else math.nan


@st.composite
def ragged(draw):
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    rows = sum(sizes)
    labels = draw(
        st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0]), min_size=rows, max_size=rows)
    )
    # Few distinct predictions, so that ties are the rule.
    predictions = draw(st.lists(st.sampled_from([1.0, 2.5, 2.75, 4.5]), min_size=rows, max_size=rows))
    return labels, predictions, [0, *itertools.accumulate(sizes)]


@settings(max_examples=60, deadline=None)
@given(ragged())
def test_equals_the_definitions_written_out(case):
    labels, predictions, splits = case
    measured = rating_metrics(labels, predictions, splits)
    errors = [p - r for r, p in zip(labels, predictions, strict=True)]
    expected = {
        "mae": sum(map(abs, errors)) / len(errors) if errors else math.nan,
        "rmse": math.sqrt(sum(e * e for e in errors) / len(errors)) if errors else math.nan,
        "auc": naive_auc(labels, predictions),
        "ndcg@1": naive_ndcg(labels, predictions, splits, 1),
        "ndcg@3": naive_ndcg(labels, predictions, splits, 3),
    }
    assert list(measured) == list(OF_RATINGS)
    assert measured == pytest.approx(expected, nan_ok=True)


def test_a_case_computed_by_hand():
    labels, predictions = [5, 3, 1, 4, 2], [3.0, 4.0, 1.0, 5.0, 2.0]
    measured = rating_metrics(labels, predictions, [0, 3, 5])
    # Task 1 ranks gains 7, 31, 1 where 31, 7, 1 is ideal; task 2 is ranked ideally.
    task_1 = (7 + 31 / math.log2(3) + 1 / 2) / (31 + 7 / math.log2(3) + 1 / 2)
    assert measured["mae"] == pytest.approx((2 + 1 + 0 + 1 + 0) / 5)
    assert measured["rmse"] == pytest.approx(math.sqrt((4 + 1 + 0 + 1 + 0) / 5))
    assert measured["auc"] == pytest.approx(5 / 6)  # only (5 predicted 3) against (3 predicted 4) is wrong
    assert measured["ndcg@1"] == pytest.approx((7 / 31 + 1) / 2)
    assert measured["ndcg@3"] == pytest.approx((task_1 + 1) / 2)


def test_a_task_without_an_order_is_left_out_of_the_mean():
    whole = ndcg([1, 5], [2.0, 1.0], [0, 2], 1)
    with_others = ndcg([1, 5, 0, 0, 5], [2.0, 1.0, 1.0, 2.0, 3.0], [0, 2, 4, 4, 5], 1)
    assert with_others == whole == pytest.approx(1 / 31)
    assert math.isnan(ndcg([0, 0, 5], [1.0, 2.0, 1.0], [0, 2, 3], 3))


def test_auc_of_one_class_is_undefined():
    assert math.isnan(auc([4, 5], [1.0, 2.0]))
    assert math.isnan(auc([3.5, 1], [1.0, 2.0]))
    assert auc([3.5, 4], [1.0, 2.0]) == 1.0


def test_no_rows_at_all_are_undefined():
    assert all(math.isnan(value) for value in rating_metrics([], [], [0, 0]).values())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_diverged_run_has_no_metrics(bad):
    measured = rating_metrics([1, 4, 5], [1.0, bad, 2.0], [0, 3])
    assert list(measured) == list(OF_RATINGS)
    assert all(math.isnan(value) for value in measured.values())


def test_float32_predictions_tie_as_they_are():
    predictions = np.array([0.1, 0.1, 0.2], np.float32)
    assert ndcg([5, 1, 0], predictions, [0, 3], 2) == pytest.approx(
        naive_ndcg([5, 1, 0], predictions.tolist(), [0, 3], 2)
    )


@pytest.mark.parametrize(
    ("labels", "predictions", "splits", "message"),
    [
        ([1, 2], [1.0], [0, 2], r"\(2,\) and \(1,\)"),
        ([[1, 2]], [[1.0, 2.0]], [0, 2], "flat"),
        ([1, 2], [1.0, 2.0], [0, 1], "number of rows, 2"),
        ([1, 2], [1.0, 2.0], [1, 2], "start at 1"),
        ([1, 2], [1.0, 2.0], [0, 2, 1, 2], "falling between"),
        ([1, 2], [1.0, 2.0], [0.0, 2.0], "integers, got float64"),
        ([1, 2], [1.0, 2.0], [], "flat array of integers"),
        ([1, -1], [1.0, 2.0], [0, 2], r"row 1: .* got -1\.0"),
        ([math.nan, 1], [1.0, 2.0], [0, 2], "row 0"),
        ([1, 1e9], [1.0, 2.0], [0, 2], "row 1"),
    ],
)
def test_what_does_not_fit_is_named(labels, predictions, splits, message):
    with pytest.raises(DataError, match=message):
        rating_metrics(labels, predictions, splits)

"""Baselines of the next item have the scores that loops over histories have."""

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.experiment.next_item import counting
from gmeta.experiment.next_item.counting import Als, Ease, Neighbours, Popularity, Rules, Walks
from support.next_item import histories

ITEMS = 7
SEQUENCES = st.lists(st.lists(st.integers(0, ITEMS - 1), min_size=1, max_size=9), min_size=2, max_size=8)


def log_shares(sums):
    return np.log(sums / np.maximum(sums.sum(axis=1, keepdims=True), 1e-9) + 1e-5)


def pair_scores(matrix, asked, last, decay):
    found = np.zeros((len(asked), ITEMS))
    for user, history in enumerate(asked):
        for back, item in enumerate(reversed(history)):
            if not last or back < last:
                found[user] += matrix[item] * (back + 1) ** -decay
    return found


@given(
    SEQUENCES, SEQUENCES, st.sampled_from([1, 3, 10]), st.sampled_from([0.0, 0.5]), st.sampled_from([2, 50])
)
def test_rules(train, asked, window, popularity, last):
    matrix = np.zeros((ITEMS, ITEMS))
    for history in train:
        for a in range(len(history)):
            for b in range(a + 1, min(a + window + 1, len(history))):
                matrix[history[a], history[b]] += (b - a) ** -0.5
    counts = np.bincount(np.concatenate(train), minlength=ITEMS)
    matrix /= np.maximum(counts, 1) ** popularity
    rules = Rules(window, 0.5, popularity, last, 1.0).fit(histories(train), ITEMS)
    expected = log_shares(pair_scores(matrix, asked, last, 1.0))
    np.testing.assert_allclose(rules.scores(histories(asked)), expected, rtol=1e-4, atol=1e-4)


@given(SEQUENCES, SEQUENCES)
def test_neighbours(train, asked):
    sets = [set(history) for history in train]
    matrix = np.zeros((ITEMS, ITEMS))
    size = [sum(i in each for each in sets) for i in range(ITEMS)]
    for i in range(ITEMS):
        for j in range(ITEMS):
            shared = sum(i in each and j in each for each in sets)
            if i != j and shared:
                matrix[i, j] = shared / (np.sqrt(size[i] * size[j]) + 10)
    found = Neighbours(10.0, 0, 0.5).fit(histories(train), ITEMS).scores(histories(asked))
    expected = log_shares(pair_scores(matrix, asked, 0, 0.5))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@given(SEQUENCES, SEQUENCES, st.sampled_from([(1.0, 0.6), (0.5, 0.2)]))
def test_walks(train, asked, exponents):
    flatness, popularity = exponents
    sets = [set(history) for history in train]
    size = np.array([max(sum(i in each for each in sets), 1) for i in range(ITEMS)], float)
    matrix = np.zeros((ITEMS, ITEMS))
    for own in sets:
        for i in own:
            for j in own - {i}:
                matrix[i, j] += size[i] ** -flatness * len(own) ** -flatness * size[j] ** -popularity
    found = Walks(flatness, popularity).fit(histories(train), ITEMS).scores(histories(asked))
    expected = log_shares(pair_scores(matrix, asked, 0, 0.0))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@given(SEQUENCES, SEQUENCES)
def test_ease_is_the_ridge_regression_of_each_item_on_the_others(train, asked):
    sets = np.array([[float(i in history) for i in range(ITEMS)] for history in train])
    found = Ease(3.0, 0, 0.0).fit(histories(train), ITEMS).scores(histories(asked))
    for item in range(ITEMS):
        others = [i for i in range(ITEMS) if i != item]
        x = sets[:, others]
        weights = np.linalg.solve(x.T @ x + 3.0 * np.eye(ITEMS - 1), x.T @ sets[:, item])
        expected = [sum(weights[others.index(i)] for i in history if i != item) for history in asked]
        np.testing.assert_allclose(found[:, item], expected, atol=1e-4)


def test_als_of_four_sets_is_where_neither_side_can_be_better():
    check_als([[0, 1, 2], [2, 1, 4], [3, 1, 1], [5, 6]])


@settings(max_examples=10)
@given(SEQUENCES)
@pytest.mark.shown_by("test_als_of_four_sets_is_where_neither_side_can_be_better")
def test_als_is_where_neither_side_can_be_better(train):
    check_als(train)


def check_als(train):
    als = Als(rank=3, confidence=4.0, penalty=2.0, sweeps=200)
    solved = als.fit(histories(train), ITEMS)
    sets = np.array([[float(i in history) for i in range(ITEMS)] for history in train])
    users = als._solve(counting.sets_of(histories(train), ITEMS), solved.vectors)
    confidence = 1 + 4.0 * sets
    for one, other, c, p in (
        (users, solved.vectors, confidence, sets),
        (solved.vectors, users, confidence.T, sets.T),
    ):
        gradient = 2.0 * one - (c * (p - one @ other.T)) @ other
        assert np.abs(gradient).max() < 2e-2


def test_popularity_counts_and_forgets():
    train = histories([[0, 1, 1], [2]], np.array([0, 0, 100, 100]))
    asked = histories([[0], [1]])
    found = Popularity().fit(train, 4).scores(asked)
    np.testing.assert_allclose(np.exp(found), [[1, 2, 1, 0]] * 2, atol=1e-4)
    recent = Popularity(0.5).fit(train, 4).scores(asked)
    np.testing.assert_allclose(np.exp(recent[0]), [0.25, 1.25, 1, 0], atol=1e-4)


def test_ease_is_left_out_of_large_catalogues_and_recent_popularity_without_times():
    assert "ease" in counting.grids(counting.MOST_ITEMS, times=True)
    assert {"ease", "recent_popularity"}.isdisjoint(counting.grids(counting.MOST_ITEMS + 1, times=False))


def test_of_sets_no_baseline_reads_the_order():
    train = histories([[0, 1, 2], [2, 1, 4], [3, 1]], np.arange(8))
    for name, grid in counting.grids(5, times=True, ordered=False).items():
        for each in grid:
            scorer = each.fit(train, 5)
            turned = scorer.scores(histories([[2, 1, 0]])), scorer.scores(histories([[0, 1, 2]]))
            np.testing.assert_allclose(*turned, rtol=1e-5, atol=1e-6, err_msg=name)
            assert counting.settings_of(name, asdict(each)) == each


@pytest.mark.parametrize(
    "name", list(counting.grids(5, times=True) | counting.grids(5, times=False, ordered=False))
)
def test_an_empty_history_gets_finite_scores(name):
    train = histories([[0, 1, 2], [2, 1, 4]], np.arange(6))
    nothing = histories([[0]]).first(np.array([0]))
    grids = counting.grids(5, times=True) | counting.grids(5, times=False, ordered=False)
    scores = grids[name][0].fit(train, 5).scores(nothing)
    assert scores.shape == (1, 5)
    assert np.isfinite(scores).all()

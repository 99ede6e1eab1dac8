"""The paired bootstrap against a plain loop, and calibration against its definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.experiment.results.evaluation import Calibration
from gmeta.experiment.results.metrics import compare


def drawn(seed, seeds, tasks):
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 6, tasks)
    errors = [{m: rng.gamma(2.0, rows, [n, tasks]) for m in ("mae", "rmse")} for n in (seeds, 1)]
    return rows, *errors


def error(metric, sums, rows, chosen):
    means = [one[chosen].sum() / rows[chosen].sum() for one in sums]
    return np.mean(np.sqrt(means) if metric == "rmse" else means)


@given(st.integers(0, 2**16), st.integers(1, 3), st.integers(2, 7))
def test_the_interval_is_that_of_a_plain_loop_over_draws(seed, seeds, tasks):
    rows, ours, theirs = drawn(seed, seeds, tasks)
    found = compare({("maml", 5): ours}, {"mean": theirs}, rows, resamples=40, seed=3)
    assert (found.resamples, [one.metric for one in found.comparisons]) == (40, ["mae", "rmse"])
    draws = np.random.default_rng(3).integers(0, tasks, [40, tasks])
    for one in found.comparisons:
        sums = ours[one.metric], theirs[one.metric]
        whole = [error(one.metric, each, rows, np.arange(tasks)) for each in sums]
        assert one.difference == pytest.approx(whole[0] - whole[1])
        values = []
        for chosen in draws:
            first, second = (error(one.metric, each, rows, chosen) for each in sums)
            values.append(first - second)
        assert [one.low, one.high] == pytest.approx(list(np.percentile(values, [2.5, 97.5])))


def test_draws_are_the_same_for_all_and_in_any_number_at_once(monkeypatch):
    rows, ours, theirs = drawn(0, 2, 30)
    alone = compare({("a", 1): ours}, {"mean": theirs}, rows).find("a", 1, "mean", "rmse")
    monkeypatch.setattr("gmeta.experiment.results.metrics.AT_ONCE", 300)
    beside = compare({("b", 0): theirs, ("a", 1): ours}, {"x": ours, "mean": theirs}, rows)
    assert beside.find("a", 1, "mean", "rmse") == alone
    assert beside.find("a", 2, "mean", "rmse") is None
    same = beside.find("b", 0, "mean", "mae")
    assert (same.difference, same.low, same.high, same.wins, same.loses) == (0, 0, 0, False, False)


def test_what_diverged_is_not_compared_nor_is_a_single_task():
    rows, ours, theirs = drawn(0, 2, 4)
    broken = {"mae": np.full([2, 4], np.nan)}
    found = compare({("a", 0): ours, ("b", 0): broken}, {"mean": theirs}, rows)
    assert {one.method for one in found.comparisons} == {"a"}
    rows, ours, theirs = drawn(0, 2, 1)
    assert compare({("a", 0): ours}, {"mean": theirs}, rows).comparisons == []


def test_true_variances_are_found_to_be_true_and_too_small_ones_too_sure():
    rng = np.random.default_rng(0)
    variance = rng.uniform(0.5, 4.0, 20_000)
    labels = rng.normal(3.0, np.sqrt(variance))
    guess = np.full(20_000, 3.0)
    found = Calibration.of(labels, [guess, guess], [variance, variance / 4])
    assert found.ratio == pytest.approx([1.0, 4.0], rel=0.05)
    assert [found.coverage[level][0] for level in (50, 80, 95)] == pytest.approx([0.5, 0.8, 0.95], abs=0.01)
    assert found.coverage[95][1] == pytest.approx(0.673, abs=0.01)  # within 0.98 deviations
    alone = Calibration.of(labels, [guess], [variance])
    assert alone.errors == pytest.approx(alone.deviations, rel=0.1)
    assert len(alone.errors) == 10

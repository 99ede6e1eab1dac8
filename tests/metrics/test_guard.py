"""Rules on windows: what breaks them, what they decide, and which texts are none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.core.settings import from_mapping
from gmeta.metrics.guard import Guard, Rule
from gmeta.metrics.progressive import Window


def windows(values, metric="auc", rows=100):
    good = {"auc": 0.7, "gauc": 0.7, "log_loss": 0.5, "normalised_entropy": 0.9, "calibration": 1.0}
    return [
        Window(number, number, number + 1, rows, 10, rows, **{**good, metric: value})
        for number, value in enumerate(values)
    ]


@given(
    values=st.lists(st.sampled_from([0.5, 0.6, 0.7, math.nan]), max_size=8),
    of=st.integers(1, 4),
    runs=st.integers(1, 3),
)
def test_a_rule_equals_its_definition(values, of, runs):
    rule = Rule.parse(f"auc < best of {of} windows - 0.05 for {runs} windows")
    known = [value for value in values if not math.isnan(value)]
    before = known[: max(len(known) - runs, 0)][-of:]
    expected = bool(before) and all(value < max(before) - 0.05 for value in known[-runs:])
    assert bool(rule.broken_by(windows(values))) == expected


@pytest.mark.parametrize(
    ("text", "metric", "values", "broken"),
    [
        ("normalised_entropy > 1.05 for 3 windows", "normalised_entropy", [1.1, 1.2, 1.06], True),
        ("normalised_entropy > 1.05 for 3 windows", "normalised_entropy", [1.1, 1.0, 1.06], False),
        ("normalised_entropy > 1.05 for 3 windows", "normalised_entropy", [1.1, 1.2], False),
        ("calibration<.8", "calibration", [0.79], True),
        ("log_loss > 1.1 * best of 2 windows", "log_loss", [0.1, 0.5, 0.4, 0.45], True),
        ("log_loss > 1.1*best of 2 windows + 0.1 for 1 window", "log_loss", [0.1, 0.5, 0.4, 0.45], False),
    ],
)
def test_rules_of_all_forms(text, metric, values, broken):
    decision = Guard(stop_if=[text]).decide(windows(values, metric))
    assert (decision is not None) == broken
    if broken:
        assert decision.action == "stop"
        assert decision.since == len(values) - Rule.parse(text).runs
        assert metric in str(decision)


def test_a_prediction_that_is_not_finite_breaks_every_rule():
    last = Window(5, 0, 1, 1, 0, 1, *[math.nan] * 5, not_finite=2)
    decision = Guard(fall_back_if=["auc < 0.1 for 9 windows"], min_rows=50).decide([*windows([0.7]), last])
    assert (decision.action, decision.since) == ("fall back", 5)
    assert "2 predictions" in decision.reason


def test_small_windows_and_too_many_fall_backs():
    guard = Guard(fall_back_if=["auc < 0.6"], min_rows=50, most_fall_backs=2)
    assert guard.decide(windows([0.5], rows=49)) is None
    assert [guard.decide(windows([0.5]), falls).action for falls in (0, 1, 2)] == [
        "fall back",
        "fall back",
        "stop",
    ]
    assert guard.decide([*windows([0.5, 0.5]), *windows([0.5], rows=49)]) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auc below 0.5", "is no rule: write METRIC"),
        ("auc < -1", "is no rule"),
        ("auc < best - 0.1", "is no rule"),
        ("auc < 0.5 or gauc < 0.5", "is no rule"),
        ("ndcg < 0.5", "'ndcg' is no metric: name one of auc, gauc"),
        ("auc < 0.5 for 0 windows", "at least 1"),
        ("auc < best of 0 windows", "at least 1"),
        ("auc > best of 3 windows", "write <"),
        ("log_loss < best of 3 windows", "write >"),
        ("calibration < best of 3 windows", "write two rules"),
        (3, "is no rule"),
    ],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        Guard(stop_if=[text])


def test_a_guard_can_be_read_from_settings():
    guard = from_mapping(Guard, {"stop_if": ["auc < 0.5"], "min_rows": 10})
    assert guard.decide(windows([0.4])).action == "stop"
    with pytest.raises(ConfigError, match="must be a list"):
        Guard(stop_if="auc < 0.5")

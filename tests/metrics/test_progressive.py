"""Progressive metrics: windows equal a plain oracle wherever batches are cut, and after any restart."""

from __future__ import annotations

import math
from dataclasses import astuple
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from gmeta.core.errors import ConfigError, DataError
from gmeta.metrics.progressive import ProgressiveMetrics

SECOND = 1_000_000
ROW = st.tuples(
    st.integers(0, 3 * SECOND),  # time
    st.integers(-1, 2),  # user
    st.booleans(),  # label
    st.sampled_from([0.0, 0.25, 0.25, 0.7, 1.0]),  # score; few, so that ties are the rule
    st.sampled_from([1.0, 1.0, 2.5, 0.0, -1.0]),  # weight
    st.sampled_from([False, False, False, True]),  # whether it corrects an earlier one
)
NAMES = ("times", "users", "labels", "scores", "weights", "corrects")


def feed(metrics, rows):
    columns = dict(zip(NAMES, zip(*rows, strict=True) if rows else [()] * 6, strict=True))
    return metrics.update(columns.pop("labels"), columns.pop("scores"), **columns)


def windows_of(rows, seconds=None, most=1000):
    """Row by row: the windows' rows, with counts of late ones and of corrections."""
    windows, clock, waiting = [], None, 0
    for row in rows:
        time, *_, weight, corrects = row
        if weight < 0 or (weight and corrects):
            waiting += 1
        elif weight:
            now = time // (seconds * SECOND) if seconds else 0
            if clock is None or now > clock or len(windows[-1][0]) == most:
                windows.append(([], [0, 0]))
            clock = now if clock is None else max(clock, now)
            windows[-1][0].append(row)
            windows[-1][1][0] += now < clock
            windows[-1][1][1] += waiting
            waiting = 0
    return windows


def auc(labels, scores, weights):
    return roc_auc_score(labels, scores, sample_weight=weights) if len(set(labels)) == 2 else math.nan


def check(window, rows, counts):
    _, users, labels, scores, weights, _ = map(np.array, zip(*rows, strict=True))
    by_user = [
        (auc(labels[users == user], scores[users == user], weights[users == user]), weights[users == user])
        for user in set(users.tolist())
    ]
    known = [(value, its.sum()) for value, its in by_user if not math.isnan(value)]
    rate = np.average(labels, weights=weights)
    clipped = np.clip(scores, 1e-7, 1 - 1e-7)
    loss = log_loss(labels, clipped, sample_weight=weights, labels=[False, True])
    base = log_loss(labels, np.full(len(labels), rate), sample_weight=weights, labels=[False, True])
    expected = (
        auc(labels, scores, weights),
        sum(value * its for value, its in known) / sum(its for _, its in known) if known else math.nan,
        loss,
        loss / base if 0 < rate < 1 else math.nan,
        (weights * np.float32(scores)).sum() / (weights * labels).sum() if rate else math.nan,
    )
    found = (window.auc, window.gauc, window.log_loss, window.normalised_entropy, window.calibration)
    assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert (window.rows, window.late, window.corrections) == (len(rows), *counts)
    assert (window.positives, window.weight) == pytest.approx(((weights * labels).sum(), weights.sum()))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(ROW, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    window=st.sampled_from(["1s", "2s", 3, 7]),
    most=st.sampled_from([7, 1000]),
)
def test_windows_equal_the_oracle_in_any_batches_and_restarts(rows, cuts, window, most):
    seconds = int(window[0]) if isinstance(window, str) else None
    expected = windows_of(rows, seconds, most if seconds else window)
    whole = ProgressiveMetrics(window, max_rows=most)
    feed(whole, rows)
    parts, ended = ProgressiveMetrics(window, max_rows=most), []
    edges = sorted({0, len(rows), *(min(cut, len(rows)) for cut in cuts)})
    for begin, end in pairwise(edges):
        ended += feed(parts, rows[begin:end])
        state, parts = parts.state(), ProgressiveMetrics(window, max_rows=most)
        parts.restore(state)
    assert repr(parts.current()) == repr(whole.current())  # repr tells every bit, and NaN equals NaN
    ended += [last] if (last := parts.close()) else []
    whole.close()
    assert repr(ended) == repr(parts.windows) == repr(whole.windows)
    assert repr(parts.overall()) == repr(whole.overall())
    assert parts.state() == whole.state()
    for number, (found, (own, counts)) in enumerate(zip(ended, expected, strict=True)):
        assert found.number == number
        check(found, own, counts)
    if ended:
        every = [row for own, _ in expected for row in own]
        overall, one = parts.overall(), ProgressiveMetrics(1000)
        feed(one, every)
        assert astuple(overall)[8:11] == pytest.approx(astuple(one.close())[8:11], rel=1e-9, nan_ok=True)
        assert overall.rows == len(every)


def test_windows_of_a_duration_have_its_limits():
    metrics = ProgressiveMetrics("1h")
    hour = 3600 * SECOND
    times = [5 * hour + 1, 5 * hour + 9, 8 * hour, 5 * hour + 3, 8 * hour + 5]
    (first,) = metrics.update([0, 1, 0, 1, 0], [0.1, 0.9, 0.5, 0.5, 0.5], times=times)
    assert (first.start, first.end, first.rows) == (5 * hour, 6 * hour, 2)
    second = metrics.current()
    assert (second.number, second.start, second.end, second.rows, second.late) == (
        1,
        8 * hour,
        9 * hour,
        3,
        1,
    )


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(-80, 80, width=32)), min_size=1, max_size=20))
def test_logits_are_measured_as_their_probabilities(rows):
    labels, logits = map(np.array, zip(*rows, strict=True))
    metrics = ProgressiveMetrics(len(rows), logits=True)
    (window,) = metrics.update(labels, logits)
    exact = [np.longdouble(each) for each in np.where(labels, -logits, logits)]
    assert window.log_loss == pytest.approx(float(np.mean(np.log1p(np.exp(exact)))), rel=1e-9)
    predicted = float(np.sum(1 / (1 + np.exp(-logits.astype(np.longdouble)))))
    assert window.calibration * labels.sum() == pytest.approx(
        predicted if labels.any() else math.nan, nan_ok=True
    )


def test_a_prediction_that_is_not_finite_leaves_its_window_without_metrics():
    metrics = ProgressiveMetrics(2)
    bad, good = metrics.update([0, 1, 0, 1], [0.1, math.nan, 0.2, 0.6])
    assert bad.not_finite == 1
    assert all(math.isnan(each) for each in (bad.auc, bad.log_loss, bad.normalised_entropy, bad.calibration))
    assert (metrics.overall().log_loss, metrics.overall().not_finite) == (good.log_loss, 1)


def test_padding_may_hold_anything():
    metrics = ProgressiveMetrics(2)
    (window,) = metrics.update([1, math.nan, 0], [0.5, math.nan, 0.25], weights=[1, 0, 1])
    assert (window.auc, window.not_finite) == (1.0, 0)


def test_a_taken_back_negative_and_its_late_click_are_not_evaluated():
    metrics = ProgressiveMetrics(3)
    labels, weights, corrects = [0, 0, 1, 1, 0], [1, -1, 1, 1, 1], [0, 1, 1, 0, 0]
    (window,) = metrics.update(labels, [0.1, 0.9, 0.9, 0.8, 0.2], weights=weights, corrects=corrects)
    assert (window.rows, window.positives, window.corrections, window.auc) == (3, 1, 2, 1)


def test_memory_and_state_hold_17_bytes_a_row():
    metrics = ProgressiveMetrics("1h", max_rows=100_000)
    metrics.update(np.zeros(90_000), np.zeros(90_000), users=np.arange(90_000), times=np.zeros(90_000, int))
    assert len(metrics.state()) < 17 * 90_000 + 4_000
    (window,) = metrics.update(*np.zeros((2, 20_000)), users=np.arange(20_000), times=np.zeros(20_000, int))
    assert (window.rows, metrics.current().rows) == (100_000, 10_000)


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({"window": "0s"}, None, "longer than 0"),
        ({"window": 0}, None, "whole number from 1 on"),
        ({"window": 9, "max_rows": 8}, None, "exceeds max_rows=8"),
        ({"window": "1h"}, {}, "needs times"),
        ({"window": 2}, {"users": [1]}, "2 scores, but 1 users"),
        ({"window": 2}, {"scores": [2.0, 3.0]}, "logits=True"),
        ({"window": 2}, {"labels": [4, 1]}, "positive=4"),
        ({"window": 2}, {"labels": [math.nan, 1]}, "weight 0"),
        ({"window": 2, "positive": 4}, {"labels": [math.nan, 5]}, "must be numbers"),
        ({"window": 2}, {"weights": [math.nan, 1]}, "weights hold NaN"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, given, message):
    with pytest.raises((ConfigError, DataError), match=message):
        ProgressiveMetrics(**options).update(**{"labels": [0, 1], "scores": [0.1, 0.2], **(given or {})})


def test_users_come_always_or_never():
    metrics = ProgressiveMetrics(9)
    metrics.update([1], [0.5], users=[3])
    with pytest.raises(ConfigError, match="in all calls"):
        metrics.update([1], [0.5])


def test_a_foreign_or_damaged_state_is_refused():
    metrics = ProgressiveMetrics(9)
    metrics.update([1], [0.5])
    with pytest.raises(ConfigError, match="same settings"):
        ProgressiveMetrics(8).restore(metrics.state())
    for damaged in (b"", b"{}", metrics.state()[:300], metrics.state()[:-40]):
        with pytest.raises(DataError, match="damaged"):
            ProgressiveMetrics(9).restore(damaged)

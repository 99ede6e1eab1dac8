"""The synthetic log of exposures: its shape, and that clicks depend on the order of the past."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from gmeta.core.errors import ConfigError
from gmeta.preprocess import PrepareConfig, prepare
from gmeta.preprocess.synthetic.exposures import (
    BUY,
    EXPOSURE_SPEC,
    ExposureConfig,
    event_counts,
    exposure_log,
    write_exposures,
)

CONFIG = ExposureConfig(users=300, mean_events=120, exposures=20)


@pytest.fixture(scope="module")
def log():
    return exposure_log(CONFIG)


def gauc(log, labels, scores):
    shown = log["exposed"] == 1
    found, weights = [], []
    for user in range(1, CONFIG.users + 1):
        own = log["user"][shown] == user
        if 0 < labels[own].mean() < 1:
            found.append(roc_auc_score(labels[own], scores[own]))
            weights.append(own.sum())
    return np.average(found, weights=weights)


def test_histories_are_as_long_as_published():
    lengths = event_counts(np.random.default_rng(0), ExposureConfig(users=5000))
    assert abs(lengths.mean() - 600) < 1
    assert lengths.max() == 3000
    assert 350 < np.median(lengths) < 450
    assert np.log(lengths[lengths < 3000]).std() == pytest.approx(0.9, abs=0.1)


def test_its_rows(log):
    shown = log["exposed"] == 1
    assert np.bincount(log["user"][shown])[1:].tolist() == [20] * 300
    assert abs((~shown).sum() / 300 - 120) < 1
    assert np.all(np.diff(log["timestamp"])[np.diff(log["user"]) == 0] >= 0)
    assert not log["click"][~shown].any()
    assert np.all(log["buy"] <= log["click"])
    assert 0.1 < log["click"][shown].mean() < 0.4
    assert np.all((log["action"] > 0) == ~shown)
    assert (log["action"] == BUY).any()
    for name, size in (("item", 2000), ("category", 20), ("style", 8)):
        assert np.unique(log[name]).max() < size
    by_item = np.full(2000, -1)
    by_item[log["item"]] = log["category"]
    assert np.array_equal(by_item[log["item"]], log["category"])


def test_labels_are_drawn_with_the_stated_probabilities(log):
    shown = log["exposed"] == 1
    for label in ("click", "buy"):
        y, p = log[label][shown], log[f"p_{label}"][shown].astype(np.float64)
        assert abs((y - p).sum()) < 4 * np.sqrt((p * (1 - p)).sum())
        high = p > np.median(p)
        assert abs((y - p)[high].sum()) < 4 * np.sqrt((p * (1 - p))[high].sum())


def test_the_latest_events_tell_of_clicks_what_all_of_them_do_not(log):
    shown = np.flatnonzero(log["exposed"] == 1)
    shares = {3: [], 10**6: []}
    for row in shown:
        first = np.searchsorted(log["user"], log["user"][row])
        events = first + np.flatnonzero(log["exposed"][first:row] == 0)
        before = log["category"][events][log["timestamp"][events] < log["timestamp"][row]]
        for window, found in shares.items():
            found.append(np.mean(before[-window:] == log["category"][row]))
    clicks = log["click"][shown]
    recent, whole = (gauc(log, clicks, np.array(found)) for found in shares.values())
    best = gauc(log, clicks, log["p_click"][shown])
    assert best > recent + 0.08
    assert recent > whole + 0.02


def test_a_slow_interest_takes_more_than_the_latest_events_to_tell():
    slow = exposure_log(ExposureConfig(users=200, mean_events=300, fresh=0.05, drift=0.0005, focus=0.15))
    events = slow["exposed"] == 0
    stays = (np.diff(slow["category"][events]) == 0).mean()
    usual = exposure_log(ExposureConfig(users=200, mean_events=300))
    assert stays < (np.diff(usual["category"][usual["exposed"] == 0]) == 0).mean() - 0.2
    constant = exposure_log(ExposureConfig(users=50, mean_events=100, fresh=0, drift=0, focus=1))
    by_user = {(user, c) for user, c in zip(constant["user"], constant["category"], strict=True)}
    bought = constant["action"] == BUY
    assert len({user for user, _ in by_user}) == 50
    assert all(
        len(np.unique(constant["category"][bought & (constant["user"] == user)])) <= 1
        for user in range(1, 51)
    )


def test_a_seed_is_a_log():
    small = {"users": 5, "mean_events": 20, "exposures": 5}
    one, same, other = (exposure_log(ExposureConfig(seed=seed, **small)) for seed in (1, 1, 2))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["item"], other["item"])


def test_it_is_prepared_as_a_table(tmp_path):
    small = ExposureConfig(users=20, mean_events=20, exposures=10)
    table = write_exposures(tmp_path / "raw" / "log.parquet", small)
    summary = prepare([table], tmp_path / "data", PrepareConfig(cold_modulus=5), spec=EXPOSURE_SPEC)
    assert {name: split.tasks for name, split in summary.splits.items()} == {"warm": 16, "cold": 4}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"items": 10}, "20 and 10"),
        ({"mean_events": 3000}, "most_events=3000"),
        ({"exposures": 12}, "multiple of page=5"),
        ({"focus": 1.5}, "'focus': 1.5"),
        ({"drift": -0.1}, "'drift': -0.1"),
    ],
)
def test_sizes_that_cannot_be(settings, told):
    with pytest.raises(ConfigError, match=told):
        ExposureConfig(**settings)

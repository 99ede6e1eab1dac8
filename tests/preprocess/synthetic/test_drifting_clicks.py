"""The drifting log of clicks follows its law: clicks, drift, and which items are shown when."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.preprocess.synthetic.drifting_clicks import START, DriftConfig, Walk, click_minutes

CONFIG = DriftConfig(hours=10, events=6000, users=300, fades=1.0, appears=10)


def whole(config):
    minutes = [*click_minutes(config)]
    return {name: np.concatenate([minute[name] for minute in minutes]) for name in minutes[0]}


@pytest.fixture(scope="module")
def log():
    return whole(CONFIG)


def test_clicks_have_the_stated_probabilities(log):
    assert log["p_click"].min() < 0.05
    assert log["p_click"].max() > 0.5
    order = np.argsort(log["p_click"])
    for part in np.array_split(order, 10):
        p = log["p_click"][part].astype(np.float64)
        assert abs((log["click"][part] - p).sum()) < 4 * math.sqrt((p * (1 - p)).sum())


def test_events_are_in_the_order_of_time_and_follow_the_time_of_day(log):
    minutes = (log["ts"] - START * 1_000_000) / 60e6
    assert (np.diff(minutes) >= 0).all()
    assert 0 <= minutes[0] < minutes[-1] < 60 * CONFIG.hours
    found = np.bincount((minutes // 60).astype(int), minlength=CONFIG.hours)
    moments = np.arange(60 * CONFIG.hours)
    rate = (1 - CONFIG.day * np.cos(2 * np.pi * moments / 1440)).reshape(CONFIG.hours, 60).mean(axis=1)
    expected = CONFIG.events * rate
    assert (np.abs(found - expected) < 5 * np.sqrt(expected)).all()


def test_an_item_is_shown_from_its_appearance_on_and_less_with_age(log):
    hours = (log["ts"] - START * 1_000_000) / 3600e6
    appears = (log["item"] - CONFIG.items + 1) * CONFIG.appears / 60
    new = log["item"] >= CONFIG.items
    assert (hours[new] >= appears[new]).all()
    # Of the items that appeared in the hour before 4 h, impressions fall by half from one hour to the next.
    young = new & (appears > 3) & (appears <= 4)
    per_event = [(young & (hours >= h) & (hours < h + 1)).sum() for h in (4, 5, 6)]
    assert per_event[0] > 500
    assert per_event[0] > per_event[1] > per_event[2]


def test_each_seed_draws_another_log_and_always_the_same(log):
    again, other = whole(CONFIG), whole(dataclasses.replace(CONFIG, seed=1))
    for name, values in log.items():
        np.testing.assert_array_equal(values, again[name])
    assert len(other["ts"]) != len(log["ts"]) or (other["ts"] != log["ts"]).any()


@settings(max_examples=10, deadline=None)
@given(
    hours=st.floats(0.2, 10), deviation=st.floats(0.1, 3), steps=st.integers(1, 90), seed=st.integers(0, 99)
)
def test_a_walk_keeps_its_deviation_and_forgets_exponentially(hours, deviation, steps, seed):
    walk = Walk(np.random.default_rng(seed), (40_000,), deviation, hours)
    first = walk.now
    for _ in range(steps):
        walk.step()
    assert walk.now.std() == pytest.approx(deviation, rel=0.03)
    found = np.corrcoef(first, walk.now)[0, 1]
    assert found == pytest.approx(math.exp(-steps / (60 * hours)), abs=0.03)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"users": 0}, "users"),
        ({"fades": 0.0}, "fades must be more than 0"),
        ({"appeal": -1.0}, "appeal must be 0 or more"),
        ({"own": 1.5}, "own must be from 0 to 1"),
        ({"click": math.nan}, "click"),
    ],
)
def test_impossible_settings_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        DriftConfig(**wrong)

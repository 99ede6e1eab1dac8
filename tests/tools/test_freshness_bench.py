"""The benchmark of freshness: which state predicts each event, and that a served replica does the same."""

import importlib
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.export import Publisher
from gmeta.export.delivery import catch_up
from gmeta.preprocess.synthetic.drifting_clicks import DriftConfig
from support.drifting_log import FEATURES, Log, measure

TOOLS = Path(__file__).resolve().parents[2] / "tools"
OWN = ("harness", "freshness", "demo_online", "draw_freshness")


@pytest.fixture(scope="module")
def tools():
    with pytest.MonkeyPatch.context() as patched:
        for folder in ("bench", "dev"):
            patched.syspath_prepend(str(TOOLS / folder))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in OWN})
    for name in OWN:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def log():
    return Log(DriftConfig(hours=3, events=300, users=40, items=20))


def test_each_period_is_predicted_by_the_state_at_its_beginning(tools, log):
    trained = []

    def predict(first, last):
        assert trained == [*range(first)]  # no event that is predicted has been trained
        rows = log.rows(first, last)
        return {"": np.full(rows.stop - rows.start, len(trained))}

    periods = {"minute": 1, "half": 30, "hour": 60, "never": None}
    scores = tools.freshness.replay(log, periods, 60, predict, trained.append)
    minutes = np.repeat(np.arange(log.minutes), np.diff(log.begins))
    assert trained == [*range(log.minutes)]
    for name, period in periods.items():
        since = 0 if period is None else (minutes - 60) // period * period
        expected = np.where(minutes < 60, np.nan, 60 + since)
        np.testing.assert_array_equal(scores[name], expected)


def test_a_replica_that_applies_deltas_predicts_the_same(tools, log, tmp_path):
    model, predict, train = tools.freshness.online(log, 0)
    for minute in range(60):
        train(minute)
    publisher = Publisher(model, tmp_path, export={"signatures": {"predict": model.signature()}})
    replica = tools.demo_online.Replica(publisher.publish_base().path)
    first = None
    for begin, end in itertools.pairwise((60, 61, 90, 150)):
        catch_up(tmp_path, replica, lambda _: None)
        here = predict(begin, 180)[""]
        np.testing.assert_allclose(
            replica.predict(log.features(log.rows(begin, 180))), here, rtol=1e-6, atol=1e-7
        )
        first = here if first is None else first
        for minute in range(begin, end):
            train(minute)
        publisher.publish()
    assert np.abs(first[-50:] - predict(60, 180)[""][-50:]).max() > 0.001  # training changes predictions
    publisher.close()


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99), users=st.integers(1, 30))
def test_tasks_hold_the_last_events_before_the_minute(tools, seed, users):
    log = Log(DriftConfig(hours=1, events=400, users=users, items=9, seed=seed))
    recent = tools.freshness.Recent(log)
    for minute in (0, 1, 30, 59):
        rows, found = log.rows(minute, minute + 1), recent.batch(minute)
        assert (found is None) == (rows.stop == rows.start)
        if found is None:
            continue
        batch, places = found
        asked = batch["features"]["item"][batch["query"]["index"]].reshape(-1)[places]
        np.testing.assert_array_equal(asked, log.columns["item"][rows])
        assert batch["query"]["mask"].sum() == len(places)
        for task, user in enumerate(batch["task"]):
            known = np.flatnonzero(log.columns["user"][: rows.start] == user)[-tools.freshness.KEPT :]
            chosen = batch["support"]["index"][task][batch["support"]["mask"][task] > 0]
            np.testing.assert_array_equal(batch["features"]["item"][chosen], log.columns["item"][known])
            np.testing.assert_array_equal(batch["label"][chosen], log.columns["click"][known])


def test_metrics_are_those_of_the_asked_minutes(log):
    scores = np.random.default_rng(0).random(len(log.columns["ts"]))
    rows = log.rows(20, 100)
    clicks, p = log.columns["click"][rows], scores[rows]
    pairs = p[clicks == 1][:, None] - p[clicks == 0]
    found = measure(log, scores, 20, 100)
    assert found["auc"] == pytest.approx((pairs > 0).mean() + (pairs == 0).mean() / 2)
    loss, rate = -np.log(np.where(clicks == 1, p, 1 - p)).mean(), clicks.mean()
    assert found["log_loss"] == pytest.approx(loss)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert found["normalised_entropy"] == pytest.approx(loss / entropy)


def test_the_picture_is_drawn_from_the_results(tools, tmp_path):
    pytest.importorskip("matplotlib")
    names = ("minute", "day")
    about = {"auc_by_hour": {"oracle": [0.8], **{name: [0.6, 0.7] for name in names}, "maml/day/adapt": [1]}}
    values = [{"name": f"freshness/{name}/auc", "value": 0.7} for name in ("oracle", *names)]
    (tmp_path / "results.json").write_text(json.dumps([about, *values]))
    tools.draw_freshness.main(tmp_path / "results.json", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_refreshes_at_multiples_of_the_period(tools):
    serving = tools.demo_online.Serving.__new__(tools.demo_online.Serving)
    serving._begin = 1440
    assert [serving._next(60, now) for now in (1440, 1441, 1499, 1500)] == [1500, 1500, 1500, 1560]
    assert serving._next(0, 1450) == 1450
    assert serving._next(None, 1450) == np.inf
    assert set(FEATURES) == {"user", "item", "topic"}

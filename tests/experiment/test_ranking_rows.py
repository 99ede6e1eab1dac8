"""Rows of an experiment on ranking without a run: cuts, encodings, baselines and their calibration."""

import json
import math

import numpy as np
from scipy.special import expit

from gmeta.experiment.baselines.task_rows import Rows, Tasks
from gmeta.experiment.plan.ranking_config import RankingConfig
from gmeta.experiment.ranking.baselines import Bilinear, DriftSettings
from gmeta.experiment.ranking.examples import Encoding, Scale, cut, row_keys
from gmeta.experiment.ranking.page import calibration
from gmeta.experiment.ranking.runs import Blend


def test_random_rows_are_cut_by_their_values():
    rng = np.random.default_rng(0)
    columns = {"a": rng.integers(0, 5, 4000), "b": rng.random(4000).astype(np.float32)}
    train, validation, test = cut(columns, "random", task=None, time=None)
    assert sorted([*train, *validation, *test]) == list(range(4000))
    assert abs(len(train) - 3200) < 100
    assert abs(len(test) - 400) < 80
    order = rng.permutation(4000)
    again = cut({name: values[order] for name, values in columns.items()}, "random", task=None, time=None)
    assert set(order[again[2]]) == set(test)


def test_equal_rows_are_spread():
    keys = row_keys({"a": np.zeros(1000, np.int64)})
    assert len(np.unique(keys)) == 1000
    parts = cut({"a": np.zeros(1000, np.int64)}, "random", task=None, time=None)
    assert all(len(part) > 50 for part in parts)


def test_time_and_tasks_cut_as_they_say():
    columns = {"ts": np.arange(100)[::-1].copy(), "user": np.arange(100) // 2}
    train, validation, test = cut(columns, "time", task="user", time="ts")
    assert max(columns["ts"][train]) < min(columns["ts"][validation])
    assert max(columns["ts"][validation]) < min(columns["ts"][test])
    parts = cut(columns, "tasks", task="user", time=None)
    users = [set(columns["user"][part]) for part in parts]
    assert not users[0] & users[2]
    assert not users[1] & users[2]


def test_unknown_ids_are_zero_and_left_out_of_lists():
    config = RankingConfig("y", ("user", "tags"), ("price",))
    training = {
        "user": np.array([5, 9]),
        "tags": (np.array([1, 2, 3]), np.array([0, 1, 3])),
        "price": np.array([1.0, 3.0], np.float32),
        "y": np.array([0.0, 1.0]),
    }
    new = {
        "user": np.array([9, 6]),
        "tags": (np.array([3, 8, 1]), np.array([0, 2, 3])),
        "price": np.array([np.nan, 3.0], np.float32),
    }
    found = Encoding.of(config, training)(new)
    assert found.ids["user"].tolist() == [2, 0]
    values, splits = found.ids["tags"]
    assert (values.tolist(), splits.tolist()) == ([3, 1], [0, 1, 2])
    assert found.numbers[:, 0].tolist() == [0.0, 1.0]
    assert np.isnan(found.labels).all()


def test_wide_numbers_are_on_a_logarithmic_scale():
    wide = Scale.of(np.array([1.0, 2.0, 3.0, 1e6]))
    assert wide.log
    assert not Scale.of(np.arange(9.0)).log
    assert wide(np.array([-(2.0**53)]))[0] == 0.0  # a gap


def test_drift_adds_the_residuals_about_a_rows_time():
    """The formula, a row at a time."""
    rng = np.random.default_rng(0)
    config = RankingConfig("y", ("user", "item"), item="item", user="user", time="ts", binary=False)

    def draw(rows):
        user, item = rng.integers(0, 4, rows), rng.integers(0, 5, rows)
        return {"user": user, "item": item, "ts": rng.integers(0, 500, rows), "y": rng.normal(size=rows)}

    train, asked = draw(80), draw(30)
    asked["user"][0] = 99
    encoding = Encoding.of(config, train)
    rows, new = encoding(train), encoding(asked)
    base = Bilinear(None, "item", 0.1, rng.normal(size=6), np.zeros((6, 0)), np.zeros((1, 0)), binary=False)
    found = DriftSettings(scale=30.0, damping=2.0).fit(rows, encoding, base).scores(new)
    rest, want = train["y"] - base.scores(rows), base.scores(new)
    for row in range(30):
        near = np.exp(-np.abs(train["ts"] - asked["ts"][row]) / 30) * (train["user"] == asked["user"][row])
        want[row] += near @ rest / (near.sum() + 2)
    np.testing.assert_allclose(found, want)


def test_posterior_means_make_the_predictions():
    from gmeta.experiment.baselines.vectors import ItemVectors

    rng = np.random.default_rng(0)
    fitted = ItemVectors(0.5, rng.normal(size=4), np.arange(4), rng.normal(size=(4, 2)), noise=0.3)
    rows = Rows(np.array([0, 1, 2, 1]), rng.normal(size=4), np.array([0, 3, 4]))
    means = fitted.posterior_means(rows)
    want = 0.5 + fitted.bias[rows.items] + (fitted.vectors[rows.items] * means[rows.task]).sum(axis=1)
    np.testing.assert_allclose(fitted.predict(Tasks(rows, rows)), want)


def test_a_blend_of_one_score_is_its_calibration():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=5000)
    labels = (rng.random(5000) < expit(logits)).astype(float)
    found = Blend.fit({"sure": 4 * logits + 3}, labels, binary=True)
    np.testing.assert_allclose(found.weigh({"sure": 4 * logits + 3}), logits, atol=0.2)
    again = Blend.from_json(json.loads(json.dumps(found.to_json())))
    assert again.describe() == found.describe()


def test_calibration_compares_rates_in_parts():
    scores = np.array([-math.log(3), -math.log(3), math.log(3), math.log(3)])
    said, happened = calibration(scores, np.array([0.0, 1.0, 1.0, 1.0]), bins=2)
    np.testing.assert_allclose(said, [0.25, 0.75])
    assert happened.tolist() == [0.5, 1.0]
    said, happened = calibration(np.zeros(4), np.array([0.0, 0.0, 1.0, 1.0]), bins=2)
    assert happened.tolist() == [0.5, 0.5]  # ties

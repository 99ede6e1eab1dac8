"""GRM among the methods of ranking: it reads what its users did before, and nothing else."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.core.errors import ConfigError, DataError
from gmeta.experiment.plan.ranking_config import RankingConfig, RankingMethod
from gmeta.experiment.ranking.examples import Encoding, Parts
from gmeta.experiment.ranking.models import ModelScorer, batches, build
from gmeta.experiment.ranking.networks import Histories
from gmeta.experiment.ranking.page import evaluate_ranking
from gmeta.experiment.ranking.plan import plan_ranking
from gmeta.experiment.runs.run_folder import RunFolder
from support.eager import eagerly

USERS, ITEMS, ROWS = 20, 12, 1600
SMALL = """
for = "ranking"
exposed = "exposed"
blend = false
[methods.grm]
label = "GRM"
model = "grm"
dim = 8
width = 16
blocks = 1
experts = 2
hidden = [8]
learning_rate = 0.01
epochs = 8
rows_per_batch = 32
"""


def gmeta(*arguments, code=0):
    result = CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output + result.stderr
    return result


def log(rows=ROWS, seed=0):
    """Exposures that a user clicks while the last events are of items of one kind: only a history tells."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, USERS, rows), rng.integers(0, ITEMS, rows)
    time = np.sort(rng.integers(0, 40 * rows, rows))
    exposed = (rng.random(rows) < 0.4).astype(np.int64)
    mood, click = rng.integers(0, 2, USERS), np.zeros(rows, np.int64)
    for row in range(rows):
        if exposed[row]:
            click[row] = rng.random() < (0.95 if mood[user[row]] else 0.05)
        else:
            mood[user[row]] ^= rng.random() < 0.1
            item[row] += mood[user[row]] - item[row] % 2
    return {
        "user": [f"u{each}" for each in user],
        "ts": 1_600_000_000 + time,
        "item": item + 50,
        "tags": [[int(each) % 3, 7] if each % 4 else [] for each in item],
        "price": rng.normal(size=rows),
        "exposed": exposed,
        "click": click,
    }


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grm")
    pq.write_table(pa.table(log()), folder / "log.parquet")
    new = {name: values[-40:] for name, values in log().items() if name != "click"}
    new["user"][0] = "nobody"
    pq.write_table(pa.table(new), folder / "new.parquet")
    (folder / "small.toml").write_text(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        gmeta("prepare", "--data", "log.parquet", "--task", "user", "--time", "ts", "--label", "click")
    return folder


@pytest.fixture(scope="module")
def folder(prepared):
    """A folder in which all commands ran as printed."""
    folder = prepared
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "said.txt").write_text(gmeta("train", "--config", "small.toml").stderr)
        gmeta("export", "--method", "grm")
        gmeta("predict", "--data", "new.parquet", "--method", "grm")
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return evaluate_ranking(RunFolder(folder / "runs/default"))


@pytest.mark.shown_by("test_no_label_of_its_own_time_or_later_reaches_a_row")
def test_it_learns_what_only_histories_tell(folder, results):
    found = {name: seeds[0]["auc"] for name, seeds in results.metrics.items()}
    assert found["grm"] > 0.75
    assert max(auc for name, auc in found.items() if name != "grm") < 0.65
    said = (folder / "said.txt").read_text()
    events = sum(each == 0 for each in log()["exposed"])
    assert f"{events:,} events, of which a GRM makes histories" in said


def test_events_are_no_examples(prepared):
    methods = {"grm": {"label": "GRM", "model": "grm"}}
    planned = plan_ranking({"exposed": "exposed", "methods": methods}, prepared / "data")
    parts = planned.parts
    assert len(parts.train) + len(parts.validation) + len(parts.test) == sum(log()["exposed"])
    assert np.isnan(parts.history.labels).sum() == len(parts.history) - len(parts.train)
    assert "exposed" not in (*planned.config.features, *planned.config.numbers)


@pytest.mark.shown_by("experiment/test_ranking.py::test_what_is_served_is_what_the_run_predicts")
def test_what_is_served_is_what_the_run_predicts(folder, results):
    served = tf.saved_model.load(str(folder / "serving/1")).signatures["predict"]
    new = pq.read_table(folder / "new.parquet").to_pydict()
    sent = {
        "user": tf.constant(new["user"]),
        "item": tf.constant(new["item"], tf.int64),
        "ts": tf.constant(new["ts"], tf.int64),
        "tags": tf.ragged.constant(new["tags"], dtype=tf.int64).to_tensor(-1),
        "price": tf.constant(new["price"], tf.float32),
    }
    scores = pq.read_table(folder / "scores").to_pydict()["score"]
    np.testing.assert_allclose(served(**sent)["score"], scores, rtol=2e-4)
    # A history is that of the data set: without it, with another user, scores are others.
    strange = served(**{**sent, "user": tf.constant(["nobody"] * 40)})["score"].numpy()
    assert strange[0] == pytest.approx(scores[0], rel=2e-4)
    assert np.abs(strange[1:] - scores[1:]).max() > 0.3


# The model, at random weights.


def example_parts(seed=0, *, binary=True, protocol="time"):
    """Rows of few users, many of them at the same time, with labels as they are read."""
    rng = np.random.default_rng(seed)
    config = RankingConfig(
        "y", ("user", "item"), ("price",), item="item", user="user", time="ts", binary=binary, methods={}
    )
    columns = {
        "user": rng.integers(0, 6, 200),
        "item": rng.integers(0, 9, 200),
        "ts": np.sort(rng.integers(0, 60, 200)),
        "price": rng.normal(size=200),
        "y": rng.integers(0, 2, 200) if binary else rng.normal(size=200),
    }
    rows = np.arange(200) if protocol == "time" else rng.permutation(200)
    encoding = Encoding.of(config, columns)
    train, validation, test = (encoding(columns).take(each) for each in np.split(rows, [120, 160]))
    return Parts(encoding, train, validation, test, train)


def model_of(parts, seed=0, **settings):
    settings = {"dim": 4, "width": 8, "hidden": (8,), "experts": 2, "rows_per_batch": 32, **settings}
    model = build(RankingMethod("GRM", "grm", **settings), parts, seed)
    for weight in model.trainable_variables:  # so that histories matter
        weight.assign(tf.random.stateless_normal(weight.shape, [seed, weight.shape.num_elements()]) * 0.7)
    return model


def scores_of(parts, asked, **settings):
    with eagerly():
        return ModelScorer(model_of(parts, **settings), parts.encoding).scores(asked)


def relabelled(parts, rows):
    labels = parts.train.labels.copy()
    labels[rows] = 1 - labels[rows]
    train = replace(parts.train, labels=labels)
    return replace(parts, train=train, history=train)


# Quick: of HSTU.
@pytest.mark.parametrize("backbone", ["hstu", pytest.param("fuxi", marks=pytest.mark.slow)])
def test_no_label_of_its_own_time_or_later_reaches_a_row(backbone):
    parts = example_parts()
    times = parts.train.times
    before = scores_of(parts, parts.train, backbone=backbone)
    for time in (times[20], times[60], times[-1]):
        changed = scores_of(relabelled(parts, times >= time), parts.train, backbone=backbone)
        np.testing.assert_array_equal(changed[times <= time], before[times <= time])
        if time < times[-1]:
            assert np.any(changed[times > time] != before[times > time])


def test_rows_of_the_protocol_random_see_no_later_row():
    parts = example_parts(protocol="random")
    order = np.argsort(parts.test.times, kind="stable")
    asked = parts.test.take(order)
    before, time = scores_of(parts, asked), asked.times[20]
    some = parts.train.times < time
    model, moved = model_of(parts), replace(parts.train, times=np.where(some, parts.train.times, 10**6))
    model.histories = Histories.of(moved, parts.encoding, model)
    with eagerly():
        again = ModelScorer(model, parts.encoding).scores(asked)
    np.testing.assert_allclose(again[:20], before[:20], rtol=1e-6)
    assert np.any(np.abs(again[20:] - before[20:]) > 1e-3)


def test_a_score_depends_on_no_other_row_that_is_asked():
    parts = example_parts()
    model = model_of(parts, longest=5)  # less than users have
    scorer, some = ModelScorer(model, parts.encoding), np.arange(0, len(parts.train), 7)
    with eagerly():
        whole, inside = scorer.scores(parts.test), scorer.scores(parts.train)
        alone = [scorer.scores(parts.test.take(np.array([row])))[0] for row in range(0, 40, 8)]
        again = scorer.scores(parts.train.take(some))
    np.testing.assert_allclose(whole[::8], alone, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(again, inside[some], rtol=1e-5, atol=1e-6)


def test_an_epoch_has_every_row_once_and_users_rows_together():
    parts = example_parts()
    model = model_of(parts, longest=8)
    epochs = batches(model, parts.train, parts.encoding, 32, (3, 0))
    size, orders = int(epochs.cardinality()), []
    assert size == 4
    for _ in range(2):
        of_epoch = list(epochs)
        users = np.concatenate([inputs["/user"] for inputs, _ in of_epoch])
        times = np.concatenate([inputs["/time"] for inputs, _ in of_epoch])
        assert sorted(zip(users, times, strict=True)) == sorted(
            zip(np.asarray(parts.train.ids["user"]), parts.train.times, strict=True)
        )
        assert np.mean(users[1:] == users[:-1]) > 0.8
        assert min(len(labels) for _, labels in of_epoch) > 15
        orders.append(times.tolist())
    assert orders[0] != orders[1]


def test_numbers_as_labels_are_regressed():
    parts = example_parts(binary=False)
    scores = scores_of(parts, parts.test)
    encoding = parts.encoding
    twice = replace(encoding, deviation=2 * encoding.deviation)
    model = model_of(parts)
    with eagerly():
        found = ModelScorer(model, twice).scores(parts.test)
    np.testing.assert_allclose(found - encoding.mean, 2 * (scores - encoding.mean), rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"protocol": "tasks"}, "tests users without any: choose protocol 'time' or 'random'"),
        ({"time": "", "protocol": "random"}, 'have no times: name a column, time = "COLUMN"'),
        ({"user": None, "protocol": "random"}, "have no users: name a column"),
    ],
)
def test_what_gives_no_history_is_refused_in_one_line(prepared, given, message):
    methods = {"grm": {"label": "GRM", "model": "grm"}}
    with pytest.raises(ConfigError, match="grm") as error:
        plan_ranking({**given, "methods": methods}, prepared / "data")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_flag_that_marks_no_row_is_refused(prepared, tmp_path):
    with pytest.raises(ConfigError, match="exposed names 'ghost', which isn't there"):
        plan_ranking({"exposed": "ghost"}, prepared / "data")
    table = {**log(50), "exposed": np.zeros(50, np.int64)}
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    gmeta(
        "prepare",
        "--data",
        tmp_path / "log.parquet",
        "--task",
        "user",
        "--label",
        "click",
        "--out",
        tmp_path / "d",
    )
    with pytest.raises(DataError, match="no row to predict: 'exposed' is 0 in all rows"):
        plan_ranking({"exposed": "exposed", "item": "item", "features": ["item"]}, tmp_path / "d")


def test_settings_that_no_model_has_are_refused():
    with pytest.raises(ConfigError, match="width must be a multiple of heads, got 9 and 2"):
        RankingMethod("GRM", "grm", width=9)
    with pytest.raises(ConfigError, match="backbone must be one of hstu, fuxi"):
        RankingMethod("GRM", "grm", backbone="bert")

"""From a table of rows with labels to probabilities: trained, measured, served, applied to new files."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from click.testing import CliRunner
from scipy.special import expit

from gmeta.cli import main
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.terminal import Interrupts
from gmeta.experiment.ranking.baselines import LinearSettings, design
from gmeta.experiment.ranking.drawn_data import read_rows
from gmeta.experiment.ranking.page import evaluate_ranking
from gmeta.experiment.ranking.plan import plan_ranking
from gmeta.experiment.ranking.predictions import predict_file
from gmeta.experiment.ranking.runs import load_ranking
from gmeta.experiment.ranking.served import export_ranking
from gmeta.experiment.runs.all_runs import choose_trained
from gmeta.experiment.runs.run_folder import RunFolder, choose_families
from gmeta.experiment.search.tunables import FAMILIES
from gmeta.ops import hash_text
from gmeta.preprocess.source import take

USERS, ITEMS, ROWS = 40, 30, 3000
SMALL = """
for = "ranking"
protocol = "random"
[methods.dcn]
label = "DCN-v2"
dim = 4
hidden = [8]
epochs = 2
[methods.fm]
label = "FM"
model = "fm"
dim = 4
epochs = 2
"""
TABLE = ("logloss", "auc", "gauc", "ece", "ratio")


def gmeta(*arguments, code=0):
    result = CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output + result.stderr
    return result


def events(rows=ROWS, seed=0):
    """Clicks by the tastes of users and items, with texts, a list, a number and useless columns."""
    rng = np.random.default_rng(seed)
    law = np.random.default_rng(9)
    tastes, traits = law.normal(size=(USERS, 2)), law.normal(size=(ITEMS, 2))
    user, item = rng.integers(0, USERS, rows), rng.integers(0, ITEMS, rows)
    price = rng.lognormal(3, 2, rows)
    logit = (tastes[user] * traits[item]).sum(axis=1) + traits[item, 0] - 0.3 * np.log(price)
    return {
        "user": [f"u{each}" for each in user],
        "ts": 1_600_000_000 + rng.permutation(rows),
        "item": item * 7 + 100,
        "sku": [f"sku-{each}" for each in item],
        "tags": [[int(each) % 3, 7] if each % 4 else [] for each in item],
        "price": price,
        "one": np.ones(rows, np.int64),
        "click": (rng.random(rows) < expit(logit)).astype(np.int64),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which all commands ran as printed."""
    folder = tmp_path_factory.mktemp("ranking")
    pq.write_table(pa.table(events()), folder / "log.parquet")
    new = {name: values for name, values in events(50, seed=1).items() if name != "click"}
    new["user"][0], new["item"][1] = "nobody", 3
    pq.write_table(pa.table(new), folder / "new.parquet")
    (folder / "small.toml").write_text(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        gmeta("prepare", "--data", "log.parquet", "--task", "user", "--time", "ts", "--label", "click")
        (folder / "said.txt").write_text(gmeta("train", "--config", "small.toml").stderr)
        (folder / "shown.txt").write_text(gmeta("evaluate", "--json", "table.json").stdout)
        gmeta("export", "--method", "blend")
        gmeta("predict", "--data", "new.parquet", "--method", "blend", "--rows-per-part", 20)
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    return load_ranking(RunFolder(folder / "runs/default"))


def test_training_prints_its_choices(folder):
    said = (folder / "said.txt").read_text()
    assert "predicts the probability of click for user and item" in said
    assert "features: user, item, tags" in said
    assert "numbers: price" in said
    assert "left out: one (the same in all rows), sku (another name of item)" in said or (
        "one (the same in all rows)" in said and "sku (another name of item)" in said
    )
    assert "blend, seed 0: " in said


def test_the_table_has_all_methods_and_a_verdict(folder):
    shown, found = (folder / "shown.txt").read_text(), json.loads((folder / "table.json").read_text())
    for label in (
        "blend of all",
        "DCN-v2",
        "FM",
        "factors (ALS)",
        "factors with drift",
        "linear",
        "item mean",
    ):
        assert label in shown
    assert found["headline"][0] in shown.replace("\n", " ")
    assert set(found["results"]["blend"][0]) == set(TABLE)
    best = min(found["validation"], key=found["validation"].get)
    assert best in (found["strongest"]["method"], found["strongest"]["baseline"])


def test_the_blend_learns_what_no_mean_knows(folder):
    found = json.loads((folder / "table.json").read_text())["results"]
    assert found["blend"][0]["logloss"] < found["item_mean"][0]["logloss"] < found["mean"][0]["logloss"]
    assert found["mean"][0]["auc"] == 0.5
    assert abs(found["blend"][0]["ratio"] - 1) < 0.15


def test_metrics_are_those_of_scikit_learn(folder, trained):
    from sklearn.metrics import log_loss, roc_auc_score

    test = trained.parts.test
    rates = expit(trained.methods["blend"][0].scores(test))
    found = json.loads((folder / "table.json").read_text())["results"]["blend"][0]
    assert found["logloss"] == pytest.approx(log_loss(test.labels, rates))
    assert found["auc"] == pytest.approx(roc_auc_score(test.labels, rates))
    own = [
        (roc_auc_score(test.labels[rows], rates[rows]), rows.sum())
        for user in np.unique(test.users)
        if len(set(test.labels[rows := test.users == user])) == 2
    ]
    assert found["gauc"] == pytest.approx(np.average(*np.array(own).T[:1], weights=np.array(own)[:, 1]))


def test_the_report_has_its_figures(folder):
    run = folder / "runs/default"
    page = (run / "report.html").read_text()
    for name in ("learning", "calibration", "by_user", "by_item"):
        assert f'id="{name}"' in page
        assert (run / f"figures/{name}.png").stat().st_size > 1000
    assert "Ten users" not in page


def test_what_is_served_is_what_the_run_predicts(folder, trained):
    served = tf.saved_model.load(str(folder / "serving/1")).signatures["predict"]
    scores = pq.read_table(folder / "scores").to_pydict()
    new = pq.read_table(folder / "new.parquet").to_pydict()
    tags = tf.ragged.constant(new["tags"], dtype=tf.int64).to_tensor(-1)
    found = served(
        user=tf.constant(new["user"]),
        item=tf.constant(new["item"], tf.int64),
        ts=tf.constant(new["ts"], tf.int64),
        tags=tags,
        price=tf.constant(new["price"], tf.float32),
    )["score"].numpy()
    np.testing.assert_allclose(found, scores["score"], rtol=2e-4)


def test_predictions_are_in_parts_in_the_order_of_the_file(folder):
    parts = sorted((folder / "scores").glob("*.parquet"))
    assert [pq.read_metadata(part).num_rows for part in parts] == [20, 20, 10]
    found = pq.read_table(folder / "scores").to_pydict()
    new = pq.read_table(folder / "new.parquet").to_pydict()
    assert found["row"] == list(range(50))
    assert found["item"] == new["item"]
    assert found["ts"] == new["ts"]
    assert np.std(found["score"]) > 0.05


def test_a_second_call_writes_the_missing_part_alone(folder, monkeypatch):
    monkeypatch.chdir(folder)
    parts = sorted((folder / "scores").glob("*.parquet"))
    before, stamp = pq.read_table(parts[1]), parts[0].stat().st_mtime_ns
    parts[1].unlink()
    again = gmeta("predict", "--data", "new.parquet", "--method", "blend", "--rows-per-part", 20)
    assert "20 rows, by blend of all: scores, 1 file, 2 were there before" in again.stdout
    assert parts[0].stat().st_mtime_ns == stamp
    assert pq.read_table(parts[1]).equals(before)


def test_another_request_is_refused_in_one_line(folder, monkeypatch):
    monkeypatch.chdir(folder)
    error = gmeta("predict", "--data", "new.parquet", "--method", "dcn", "--rows-per-part", 20, code=2).stderr
    assert "scores has parts of another request, with other method" in error
    assert error.count("\n") == 1


def test_a_missing_column_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    table = pq.read_table("new.parquet").drop_columns(["price"])
    pq.write_table(table, tmp_path / "less.parquet")
    error = gmeta("predict", "--data", tmp_path / "less.parquet", "--out", tmp_path / "out", code=2).stderr
    assert "lacks the column price, by which the run predicts; it has item, one, sku" in error


@pytest.mark.shown_by(case="linear-absent1")
@pytest.mark.parametrize(
    ("method", "absent"),
    [
        ("dcn", ["ts"]),
        ("linear", ["ts", "sku"]),
        ("item_mean", ["user", "ts", "tags", "price"]),
        ("mean", ["user"]),
    ],
)
def test_a_method_needs_its_own_columns_alone(folder, trained, tmp_path, method, absent):
    table = pq.read_table(folder / "new.parquet")
    run, out = RunFolder(folder / "runs/default"), tmp_path / "less"
    pq.write_table(table.drop_columns(absent), tmp_path / "less.parquet")
    written = predict_file(run, [str(tmp_path / "less.parquet")], out, method=method)
    predict_file(run, [str(folder / "new.parquet")], tmp_path / "whole", method=method)
    assert written.rows == 50
    found, whole = (pq.read_table(each).to_pydict() for each in (out, tmp_path / "whole"))
    assert found["score"] == whole["score"]
    assert not set(absent) & set(found)


@pytest.mark.parametrize(
    ("method", "absent"), [("drift", "ts"), ("blend", "ts"), ("dcn", "price"), ("item_mean", "item")]
)
def test_a_method_without_one_of_its_columns_is_refused(folder, tmp_path, method, absent):
    pq.write_table(pq.read_table(folder / "new.parquet").drop_columns([absent]), tmp_path / "less.parquet")
    with pytest.raises(ConfigError, match=f"lacks the column {absent}, by which"):
        predict_file(
            RunFolder(folder / "runs/default"),
            [str(tmp_path / "less.parquet")],
            tmp_path / "out",
            method=method,
        )


def test_a_served_baseline_takes_the_columns_that_it_reads(folder, trained, tmp_path):
    export_ranking(RunFolder(folder / "runs/default"), tmp_path, method="item_mean")
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["predict"]
    assert set(served.structured_input_signature[1]) == {"item"}
    items = trained.parts.encoding.ids["item"][:5]
    numbers = {"item": np.arange(1, 6)}
    want = trained.baselines["item_mean"].scores(replace(trained.parts.test.take(np.arange(5)), ids=numbers))
    np.testing.assert_allclose(served(item=tf.constant(items))["score"], expit(want), rtol=1e-5)


def test_a_bad_row_is_named_or_left_out(folder, tmp_path):
    new = pq.read_table(folder / "new.parquet").to_pydict()
    new["item"][4] = None
    pq.write_table(pa.table(new), tmp_path / "bad.parquet")
    run = RunFolder(folder / "runs/default")
    with pytest.raises(DataError, match="row 5"):
        predict_file(run, [str(tmp_path / "bad.parquet")], tmp_path / "strict")
    written = predict_file(run, [str(tmp_path / "bad.parquet")], tmp_path / "lax", on_bad="skip")
    assert (written.rows, written.left_out) == (49, {("bad.parquet", "null"): 1})
    assert 4 not in pq.read_table(tmp_path / "lax").to_pydict()["row"]


def test_training_again_changes_nothing(folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = (folder / "runs/default/chosen.json").read_bytes()
    gmeta("train", "--config", "small.toml")
    assert (folder / "runs/default/chosen.json").read_bytes() == before
    error = gmeta("train", "--config", "small.toml", "--set", "seeds=[1]", code=2).stderr
    assert "begun with other settings" in error


@pytest.mark.shown_by("test_what_is_served_is_what_the_run_predicts")
def test_a_run_for_cold_start_adapts_to_known_users_first(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    methods = (
        '{maml={label="MAML",description="two steps",epochs=1,inner={steps=1,order=1,learning_rate=0.3}},'
        'shared={label="shared",description="no step",epochs=1,inner={steps=0,learning_rate=0.3}}}'
    )
    run = tmp_path / "cold"
    gmeta(
        "train",
        "--data",
        "data",
        "--run",
        run,
        "--for",
        "cold-start",
        "--set",
        f"methods={methods}",
        "--set",
        "hidden=[4]",
    )
    pq.write_table(pq.read_table("new.parquet").drop_columns(["user"]), tmp_path / "users.parquet")
    with pytest.raises(ConfigError, match="lacks the column user, by which"):
        predict_file(RunFolder(run), [str(tmp_path / "users.parquet")], tmp_path / "none")
    for name, data in (("with", "new.parquet"), ("without", str(tmp_path / "users.parquet"))):
        predict_file(RunFolder(run), [data], tmp_path / name, method="shared")
    assert pq.read_table(tmp_path / "without")["score"] == pq.read_table(tmp_path / "with")["score"]
    written = predict_file(RunFolder(run), ["new.parquet"], tmp_path / "out")
    assert (written.rows, written.name) == (50, "MAML")
    found = pq.read_table(tmp_path / "out").to_pydict()
    _, _, model = choose_trained(RunFolder(run), None, None)
    config, _ = RunFolder(run).load()
    known = read_rows(folder / "data", ["user", "click", *config.columns])
    row = 7  # of a user with training rows
    rows = np.flatnonzero(known["user"] == found["user"][row])
    assert len(rows) > 3

    def samples(columns, chosen):
        taken = take({name: columns[name] for name in config.columns}, np.asarray(chosen))
        lists = {"tags": tf.RaggedTensor.from_row_splits(*taken["tags"])}
        return {**taken, **lists}

    new = pq.read_table("new.parquet").to_pydict()
    asked = {name: np.asarray(new[name]) for name in ("item", "price")}
    lengths = np.cumsum([0, *map(len, new["tags"])])
    asked["tags"] = np.concatenate(new["tags"]).astype(np.int64), lengths
    asked["sku"] = np.asarray([hash_text(each) for each in new["sku"]])
    adapted = model.adapt(samples(known, rows), known["click"][rows])
    want = model.adapter.predict(samples(asked, [row]), adapted)
    assert found["score"][row] == pytest.approx(expit(want[0]), rel=1e-5)
    before = model.adapter.predict(samples(asked, [row]), None)
    assert abs(expit(before[0]) - found["score"][row]) > 1e-4
    stranger = model.adapter.predict(samples(asked, [0]), None)  # "nobody"
    assert found["score"][0] == pytest.approx(expit(stranger[0]), rel=1e-5)


@pytest.mark.shown_by(
    "experiment/test_tune.py::test_a_search_begins_with_the_present_settings_and_goes_on_where_it_ended"
)
def test_a_trial_of_gmeta_tune_reports_its_epochs(folder):
    config, data = RunFolder(folder / "runs/default").load()
    searched = FAMILIES["ranking"].search(config, data, "raise")
    dcn, _ = searched.tunables
    reported = []
    found = dcn.evaluate(dcn.starts[0], lambda *each: reported.append(each), Interrupts())
    assert [epoch for epoch, _ in reported] == [1]
    assert 0.3 < found.value <= reported[0][1]
    assert (searched.measure, searched.maximize) == ("log loss", False)


def test_rows_without_users_are_for_ranking(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = {name: values for name, values in events(600).items() if name not in ("user", "ts", "tags")}
    log["price"] = [None if each % 9 == 0 else int(price) - 5 for each, price in enumerate(log["price"])]
    pq.write_table(pa.table(log), "log.parquet")
    gmeta("prepare", "--data", "log.parquet", "--label", "click")
    assert choose_families(None, {}, tmp_path / "data") == ("ranking",)
    planned = plan_ranking({"methods": {}}, tmp_path / "data")
    assert planned.config.user is None
    assert planned.config.features == ("item", "price")
    assert planned.config.numbers == ("price",)
    gmeta("train", "--set", "methods={}")
    results = evaluate_ranking(RunFolder(tmp_path / "runs/default"))
    assert set(results.metrics["blend"][0]) == {"logloss", "auc", "ece", "ratio"}
    assert [*results.trained.baselines] == ["mean", "linear"]


def test_rows_that_times_cannot_divide_are_drawn_at_random(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table(events(300) | {"ts": [1_600_000_000] * 300}), "log.parquet")
    gmeta("prepare", "--data", "log.parquet", "--task", "user", "--time", "ts", "--label", "click")
    planned = plan_ranking({"methods": {}}, tmp_path / "data")
    assert (planned.config.protocol, planned.config.time) == ("random", "ts")
    assert any("the rows can't be divided by their times" in note for note in planned.notes)
    with pytest.raises(DataError, match="protocol 'time' leaves 0 rows to train on"):
        plan_ranking({"methods": {}, "protocol": "time"}, tmp_path / "data")


def test_new_users_have_baselines_of_items_alone(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    run = tmp_path / "tasks"
    settings = ("--set", 'protocol="tasks"', "--set", "methods={}")
    gmeta("train", "--data", "data", "--run", run, "--for", "ranking", *settings)
    results = evaluate_ranking(RunFolder(run))
    parts = results.trained.parts
    assert "user" not in results.trained.config.features
    assert not set(parts.train.users) & set(parts.test.users)
    assert [*results.trained.baselines] == ["mean", "item_mean", "linear"]
    assert results.metrics["linear"][0]["auc"] > 0.53


@pytest.mark.shown_by("experiment/test_ranking_grm.py::test_numbers_as_labels_are_regressed")
def test_numbers_as_labels_are_regressed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = events(1500)
    log["click"] = np.asarray(log["click"]) * 40.0 + np.log(log["price"])
    pq.write_table(pa.table(log), "log.parquet")
    gmeta("prepare", "--data", "log.parquet", "--task", "user", "--label", "click")
    methods = '{dcn={label="DCN-v2",dim=2,hidden=[4],epochs=1}}'
    gmeta("train", "--for", "ranking", "--set", f"methods={methods}")
    results = evaluate_ranking(RunFolder(tmp_path / "runs/default"))
    found = {name: seeds[0] for name, seeds in results.metrics.items()}
    assert set(found["blend"]) == {"mae", "rmse"}
    assert found["blend"]["rmse"] < found["mean"]["rmse"]
    assert found["mean"]["rmse"] == pytest.approx(results.trained.parts.test.labels.std(), rel=0.01)


def test_labels_of_other_values_are_refused(folder, tmp_path):
    with pytest.raises(DataError, match="must be 0 or 1"):
        plan_ranking({"label": "price", "binary": True, "methods": {}}, folder / "data")
    with pytest.raises(ConfigError, match="features names 'ghost', which isn't there"):
        plan_ranking({"features": ["ghost"]}, folder / "data")
    with pytest.raises(ConfigError, match="names 'price', which holds floats"):
        plan_ranking({"features": ["price"]}, folder / "data")


@pytest.mark.shown_by("test_predictions_are_in_parts_in_the_order_of_the_file")
def test_elements_of_exploded_lists_name_their_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log, begin, lines = events(900), 0, ["user,shown"]
    rng = np.random.default_rng(0)
    while begin < 900:
        rows = range(begin, min(begin + int(rng.integers(1, 5)), 900))
        shown = " ".join(f"{log['item'][row]}-{log['click'][row]}" for row in rows)
        lines += [f"{log['user'][begin]},{shown}", f"{log['user'][begin]},"]  # a list, and none
        begin = rows.stop
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "new.csv").write_text("\n".join(lines[:42]) + "\n")
    gmeta(
        "prepare", "--data", "log.csv", "--task", "user", "--label", "click", "--explode", "shown: item-click"
    )
    gmeta("train", "--for", "ranking", "--set", "methods={}")
    gmeta("predict", "--data", "new.csv", "--method", "item_mean", "--rows-per-part", 10)
    lists = [line.partition(",")[2].split() for line in lines[1:42]]
    parts = [pq.read_table(part).to_pydict() for part in sorted((tmp_path / "scores").glob("*.parquet"))]
    assert len(parts) == 5  # of ten records of the file each, half of which have no row
    assert [set(np.array(part["row"]) // 10) for part in parts] == [{0}, {1}, {2}, {3}, {4}]
    found = {name: [value for part in parts for value in part[name]] for name in parts[0]}
    assert found["row"] == [row for row, each in enumerate(lists) for _ in each]
    assert found["element"] == [place for each in lists for place in range(len(each))]
    assert found["item"] == [int(pair.partition("-")[0]) for each in lists for pair in each]


def test_the_linear_baseline_is_scikit_learns_logistic_regression(trained):
    from sklearn.linear_model import LogisticRegression

    parts = trained.parts
    ours = LinearSettings(3.0).fit(parts.train, parts.encoding)
    x, _ = design(parts.train, parts.encoding)
    theirs = LogisticRegression(C=1 / 3.0, max_iter=2000, tol=1e-8).fit(x, parts.train.labels)
    asked, _ = design(parts.test, parts.encoding)
    np.testing.assert_allclose(ours.scores(parts.test), theirs.decision_function(asked), atol=0.02)


def test_bilinear_baselines_predict_as_those_of_cold_start(trained):
    """A user's rows of training are the support, and those of the test the query."""
    parts, config = trained.parts, trained.config
    factors = trained.baselines["factors"].scorers["factors"]
    user = np.asarray(parts.test.ids[config.user])[:5]
    item = np.asarray(parts.test.ids[config.item])[:5]
    want = factors.mean + factors.bias[item] + (factors.vectors[item] * factors.users[user]).sum(axis=1)
    assert factors.users[0].tolist() == [0.0] * factors.users.shape[1]
    scores = factors.scores(parts.test.take(np.arange(5)))
    np.testing.assert_allclose(expit(scores), np.clip(want, 0.01, 0.99))

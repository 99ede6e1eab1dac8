"""From a file of events to next items, by the commands: trained, measured, recommended, served, resumed."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.core.errors import DataError
from gmeta.experiment.next_item.histories import Histories
from gmeta.experiment.next_item.models import train
from gmeta.experiment.next_item.plan import plan_catalogue, read_cuts
from gmeta.experiment.next_item.recommendations import choose_method
from gmeta.experiment.next_item.runs import load_catalogue
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.experiment.runs.trainer import read_logged

USERS, ITEMS, EVENTS = 60, 25, 12
SMALL = """
for = "next-item"
ks = [3, 5]
[methods.hstu]
label = "HSTU"
model = "hstu"
dim = 8
epochs = 2
"""


def gmeta(*arguments, code=0):
    result = CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output + result.stderr
    return result


def write_events(path):
    """Walks along a ring of items, with some jumps: rules can learn them."""
    rng = np.random.default_rng(0)
    item = rng.integers(0, ITEMS, USERS)
    columns = {"user": [], "ts": [], "item": [], "place": []}
    for event in range(EVENTS):
        item = np.where(rng.random(USERS) < 0.2, rng.integers(0, ITEMS, USERS), (item + 1) % ITEMS)
        columns["user"].append(np.arange(USERS) + 1000)
        columns["ts"].append(1_600_000_000 + event * 60 + rng.integers(0, 9, USERS))
        columns["item"].append(item * 7 + 100)
        columns["place"].append(np.arange(USERS) % 3)
    pq.write_table(pa.table({name: np.concatenate(parts) for name, parts in columns.items()}), path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which all commands ran as printed."""
    folder = tmp_path_factory.mktemp("next")
    write_events(folder / "events.parquet")
    (folder / "small.toml").write_text(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        gmeta("prepare", "--data", "events.parquet", "--task", "user", "--time", "ts")
        (folder / "said.txt").write_text(gmeta("train", "--config", "small.toml").stderr)
        (folder / "shown.txt").write_text(gmeta("evaluate", "--json", "table.json").stdout)
        gmeta("recommend", "-k", 4, "--no-seen", "--method", "blend")
        gmeta("export", "-k", 4, "--no-seen", "--method", "blend")
    return folder


def test_training_prints_its_choices(folder):
    said = (folder / "said.txt").read_text()
    assert f"The next item for user: {USERS} users, {ITEMS} items" in said
    assert "HSTU, seed 0: " in said
    assert "sequential rules: NDCG@3" in said
    assert "blend, seed 0: " in said


def test_the_table_has_all_methods_and_rules_find_the_ring(folder):
    shown = (folder / "shown.txt").read_text()
    for label in ("blend of all", "HSTU", "sequential rules", "EASE", "popularity"):
        assert label in shown
    assert "the strongest baseline, without items seen: HR@3" in shown
    table = json.loads((folder / "table.json").read_text())
    found = table["results"]["seen items left out"]
    assert found["rules"][0]["hr@3"] > 0.6 > found["popularity"][0]["hr@3"]
    assert found["blend"][0]["hr@3"] > 0.6
    assert table["strongest"]["baseline"] == "rules"
    page = (folder / "runs" / "default" / "report.html").read_text()
    assert "Ten users" in page
    assert "<h2>Items seen are left out</h2>" in page
    assert table == json.loads((folder / "runs" / "default" / "evaluation.json").read_text())


def test_the_export_answers_what_recommend_writes(folder):
    top = pq.read_table(folder / "top.parquet").to_pydict()
    assert top["user"] == list(range(1000, 1000 + USERS))
    trained = load_catalogue(RunFolder(folder / "runs" / "default"))
    whole = trained.cuts.whole
    histories = [
        trained.cuts.ids[whole.items[a:b]]
        for a, b in zip(whole.row_splits, whole.row_splits[1:], strict=False)
    ]
    for items, scores, history in zip(top["items"], top["scores"], histories, strict=True):
        assert len(items) == len(set(items)) == 4
        assert not set(items) & set(history)
        assert scores == sorted(scores, reverse=True)
    served = tf.saved_model.load(str(folder / "serving" / "1")).signatures["recommend"]
    padded = tf.RaggedTensor.from_row_splits(trained.cuts.ids[whole.items], whole.row_splits).to_tensor(-1)
    times = tf.RaggedTensor.from_row_splits(whole.times, whole.row_splits).to_tensor(0)
    answer = served(item=padded, time=times)
    np.testing.assert_allclose(answer["scores"], top["scores"], rtol=1e-3, atol=1e-3)
    assert (answer["items"].numpy() == np.array(top["items"])).mean() > 0.99  # but for ties
    unknown = served(item=tf.constant([[-1, 3]], tf.int64), time=tf.zeros([1, 2], tf.int64))
    assert np.isfinite(unknown["scores"]).all()


@pytest.mark.parametrize(
    "method", ["popularity", "recent_popularity", "neighbours", "rules", "ease", "als", "hstu"]
)
def test_each_part_is_served_with_its_own_scores(folder, method):
    from gmeta.experiment.next_item.served import Padded, in_tensorflow

    trained = load_catalogue(RunFolder(folder / "runs" / "default"))
    asked = trained.cuts.test.histories
    numbers = tf.RaggedTensor.from_row_splits(asked.items, asked.row_splits).to_tensor(-1)
    times = tf.RaggedTensor.from_row_splits(asked.times, asked.row_splits).to_tensor(0)
    _, scorer = choose_method(trained, method, None)
    served = in_tensorflow(scorer, trained.cuts.items)(Padded(numbers, times))
    np.testing.assert_allclose(served, scorer.scores(asked), rtol=1e-3, atol=1e-3)


def test_users_of_a_file_come_in_its_order_and_strangers_get_what_is_popular(folder, tmp_path):
    (tmp_path / "users.txt").write_text("1007\n5\n1003\n")
    run = folder / "runs" / "default"
    gmeta(
        "recommend", "--run", run, "--users", tmp_path / "users.txt", "-k", 3, "--out", tmp_path / "a.parquet"
    )
    found = pq.read_table(tmp_path / "a.parquet").to_pydict()
    assert found["user"] == [1007, 5, 1003]
    assert all(len(items) == 3 for items in found["items"])
    trained = load_catalogue(RunFolder(run))
    assert choose_method(trained, None, None)[0] == trained.best == "rules"
    (tmp_path / "users.txt").write_text("anna\n")
    said = gmeta("recommend", "--run", run, "--users", tmp_path / "users.txt", code=2).stderr
    assert "users.txt" in said
    assert "no ids of users" in said


@pytest.mark.slow  # Quick: tests/experiment/test_trainer.py, of the same checkpoints
def test_a_resumed_run_is_the_uninterrupted_one(folder, tmp_path):
    given = {"ks": [3], "methods": {"sasrec": {"label": "SASRec", "dim": 8, "epochs": 3}}}
    config = plan_catalogue(given, folder / "data").config
    cuts = read_cuts(config, folder / "data")

    class Stop(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    train(config, "sasrec", 0, cuts=cuts, folder=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):  # the epoch that ends is neither saved nor its best kept
        train(config, "sasrec", 0, cuts=cuts, folder=tmp_path / "cut", callbacks=[Stop()])
    assert train(config, "sasrec", 0, cuts=cuts, folder=tmp_path / "cut") == 0
    whole, cut = (read_logged(tmp_path / name, "val_ndcg@3") for name in ("whole", "cut"))
    assert len(whole) == 3
    assert cut == whole


def test_other_families_options_and_runs_that_are_not_over_are_refused(folder, tmp_path):
    run = folder / "runs" / "default"
    assert (
        "--stale is for runs of cold-start"
        in gmeta("export", "--run", run, "--stale", "apply", code=2).stderr
    )
    said = gmeta(
        "train", "--for", "cold-start", "--config", folder / "small.toml", "--data", folder / "data", code=2
    )
    assert "the settings have for = 'next-item'" in said.stderr
    said = gmeta("train", "--data", folder / "data", "--set", 'item="place"', "--set", "bad=1", code=2).stderr
    assert "bad" in said
    gmeta("prepare", "--data", folder / "events.parquet", "--task", "user", "--out", tmp_path / "timeless")
    assert "without times" in gmeta("train", "--data", tmp_path / "timeless", code=2).stderr
    begun = RunFolder(tmp_path / "begun")
    begun.begin(plan_catalogue({}, folder / "data").config, folder / "data")
    with pytest.raises(DataError, match="gmeta train"):
        load_catalogue(begun)
    assert begun.family == "next-item"
    assert "isn't there" in gmeta("train", "--data", folder / "data", "--set", 'item="nope"', code=2).stderr
    assert isinstance(read_cuts(begun.load()[0], folder / "data").whole, Histories)

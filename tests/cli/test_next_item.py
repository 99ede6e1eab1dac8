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
from gmeta.core.settings import read_toml
from gmeta.experiment.next_item.histories import Histories
from gmeta.experiment.next_item.models import train
from gmeta.experiment.next_item.runs import load_catalogue, plan_catalogue, read_cuts
from gmeta.experiment.runs.run_folder import RunFolder, choose_families
from gmeta.experiment.runs.trainer import read_logged
from gmeta.preprocess.plan.column_values import hash_text
from support.next_item import ITEMS, USERS, write_events

SMALL = """
for = "next-item"
ks = [3, 5]
[methods.hstu]
label = "HSTU"
model = "hstu"
dim = 8
normalize = true
temperature = 0.5
epochs = 2
"""


def gmeta(*arguments, code=0):
    result = CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output + result.stderr
    return result


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
@pytest.mark.shown_by("test_the_export_answers_what_recommend_writes")
def test_each_part_is_served_with_its_own_scores(folder, method):
    from gmeta.experiment.next_item.served import Padded, in_tensorflow

    trained = load_catalogue(RunFolder(folder / "runs" / "default"))
    asked = trained.cuts.test.histories
    numbers = tf.RaggedTensor.from_row_splits(asked.items, asked.row_splits).to_tensor(-1)
    times = tf.RaggedTensor.from_row_splits(asked.times, asked.row_splits).to_tensor(0)
    _, scorer = trained.choose(method, None)
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
    assert trained.choose(None, None)[0] == trained.best == "rules"
    (tmp_path / "users.txt").write_text("anna\n")
    said = gmeta("recommend", "--run", run, "--users", tmp_path / "users.txt", code=2).stderr
    assert "users.txt" in said
    assert "no ids of users" in said


def test_people_read_titles_and_programs_send_texts(tmp_path, monkeypatch):
    """Users and items are text, and a side table has titles of all items but one."""
    monkeypatch.chdir(tmp_path)
    write_events(tmp_path / "numbers.parquet")
    events = pq.read_table("numbers.parquet").to_pydict()
    users, items = [f"ü {user}" for user in events["user"]], [f"B{item}" for item in events["item"]]
    pq.write_table(pa.table({"user": users, "ts": events["ts"], "item": items}), "events.parquet")
    titles = {item: f"Film <{item}>" for item in set(items) - {"B107"}}
    pq.write_table(pa.table({"item": [*titles], "title": [*titles.values()]}), "films.parquet")
    (tmp_path / "none.toml").write_text('for = "next-item"\nks = [3]\n[methods]\n')
    side = ["--join", "films.parquet", "--on", "item", "--default", "own"]
    gmeta("prepare", "--data", "events.parquet", "--task", "user", "--time", "ts", *side)
    gmeta("train", "--config", "none.toml")
    gmeta("evaluate")
    page = (tmp_path / "runs" / "default" / "report.html").read_text()
    assert "<tr><td>ü 10" in page
    assert "Film &lt;B1" in page
    assert "B107" in page
    whole = hash_text("ü 1003"), hash_text("ü 1004")
    (tmp_path / "users.txt").write_text(f"ü 1003\n{whole[1]}\n a stranger\n")
    pq.write_table(pa.table({"u": ["ü 1003", "ü 1004"]}), "users.parquet")
    found = {}
    for name in ("users.txt", "users.parquet"):
        gmeta("recommend", "-k", 3, "--method", "ease", "--users", name, "--seen")
        found[name] = pq.read_table("top.parquet").to_pydict()
    assert found["users.txt"]["user"] == [*whole, hash_text("a stranger")]
    assert found["users.txt"]["user_text"] == ["ü 1003", "ü 1004", None]
    top = found["users.parquet"]
    assert top["user"] == [*whole]
    assert top["items"] == found["users.txt"]["items"][:2]
    assert top["items"] == [[hash_text(text) for text in texts] for texts in top["texts"]]
    assert top["titles"] == [[titles.get(text) for text in texts] for texts in top["texts"]]
    gmeta("export", "-k", 25, "--method", "ease", "--seen")
    served = tf.saved_model.load(str(tmp_path / "serving" / "1")).signatures["recommend"]
    answer = served(item=tf.constant([["B100", "B107", ""], ["unknown", "", ""]]))
    texts = [[text.decode() for text in row] for row in answer["texts"].numpy()]
    assert sorted(texts[0]) == sorted(set(items))
    assert answer["items"].numpy().tolist() == [[hash_text(text) for text in row] for row in texts]
    assert answer["titles"].numpy().tolist() == [
        [titles.get(text, "").encode() for text in row] for row in texts
    ]
    trained = load_catalogue(RunFolder(tmp_path / "runs" / "default"))
    numbers = np.searchsorted(trained.cuts.ids, [hash_text("B100"), hash_text("B107")])
    scores = trained.baselines["ease"].scores(Histories(np.array([0]), np.array([0, 2]), numbers))
    np.testing.assert_allclose(answer["scores"][0], np.sort(scores[0])[::-1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # Quick: tests/experiment/test_trainer.py, of the same checkpoints
def test_a_resumed_run_is_the_uninterrupted_one(folder, tmp_path):
    given = {"ks": [3], "methods": {"sasrec": {"label": "SASRec", "dim": 8, "warm_up": 4, "epochs": 3}}}
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


@pytest.mark.shown_by(
    "experiment/test_tune.py::test_a_search_begins_with_the_present_settings_and_goes_on_where_it_ended"
)
def test_tuning_goes_on_from_the_run_and_writes_what_train_takes(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    done = gmeta("tune", "--trials", 1, "--out", tmp_path / "tuned.toml")
    assert "begins: 1800 s, 1800 s a method, are about 1 of HSTU (" in done.stderr
    assert "now `gmeta train --run runs/default-tuned --data " in done.stdout
    settings = read_toml(tmp_path / "tuned.toml")
    data = folder / "data"
    assert choose_families(None, settings, data) == ("next-item",)
    assert settings.keys() == {"item", "protocol", "core", "ks", "methods"}
    config, _ = RunFolder(folder / "runs" / "default").load()
    assert plan_catalogue(settings, data).config == config  # with one trial, settings are as before
    # The first trial is the run's own training.
    value = max(read_logged(folder / "runs" / "default" / "hstu" / "seed-0", "val_ndcg@3"))
    assert f"# NDCG@3 in validation: {value:.4f} before" in (tmp_path / "tuned.toml").read_text()
    again = gmeta("tune", "--budget", "0.01s", "--out", tmp_path / "tuned.toml")
    assert "goes on after 1 trials" in again.stderr
    assert "give a time above 0" in gmeta("tune", "--budget", "0", code=2).stderr


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
    said = gmeta("train", "--for", "next-item", "--data", tmp_path / "timeless", code=2).stderr
    assert "without times" in said
    assert "--for retrieval" in said
    begun = RunFolder(tmp_path / "begun")
    begun.begin(plan_catalogue({}, folder / "data").config, folder / "data")
    with pytest.raises(DataError, match="gmeta train"):
        load_catalogue(begun)
    assert begun.family == "next-item"
    assert "isn't there" in gmeta("train", "--data", folder / "data", "--set", 'item="nope"', code=2).stderr
    assert isinstance(read_cuts(begun.load()[0], folder / "data").whole, Histories)

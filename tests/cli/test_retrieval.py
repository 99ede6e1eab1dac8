"""From pairs without times to retrieved items, by the commands: trained, measured, recommended, served."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.experiment.next_item.models import train
from gmeta.experiment.next_item.runs import load_catalogue, plan_catalogue, read_cuts
from gmeta.experiment.plan.next_item_config import RetrievalConfig
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.experiment.runs.trainer import read_logged

USERS, ITEMS = 60, 30
SMALL = """
for = "retrieval"
ks = [3, 5]
[methods.two_tower]
label = "two-tower"
dim = 8
learning_rate = 0.02
epochs = 8
"""


def gmeta(*arguments, code=0):
    result = CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output + result.stderr
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which all commands ran as printed: a user's items are of one of three kinds, mostly."""
    folder = tmp_path_factory.mktemp("retrieval")
    rng = np.random.default_rng(0)
    pairs = [
        (1000 + user, 100 + 7 * item)
        for user in range(USERS)
        for item in rng.permutation(ITEMS)
        if rng.random() < (0.8 if item % 3 == user % 3 else 0.1)
    ]
    pairs += pairs[:50]  # a pair twice is one
    pq.write_table(
        pa.table(dict(zip(("user", "item"), zip(*pairs, strict=True), strict=True))), folder / "pairs.parquet"
    )
    (folder / "small.toml").write_text(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        gmeta("prepare", "--data", "pairs.parquet", "--task", "user")
        (folder / "said.txt").write_text(gmeta("train", "--config", "small.toml").stderr)
        (folder / "shown.txt").write_text(gmeta("evaluate", "--json", "table.json").stdout)
        gmeta("recommend", "-k", 4, "--method", "blend")
        gmeta("export", "-k", 4, "--method", "blend")
    return folder


@pytest.mark.shown_by("cli/test_next_item.py::test_training_prints_its_choices")
def test_training_and_its_table_name_retrieval_alone(folder):
    said = (folder / "said.txt").read_text()
    assert f"Retrieval of item for user: {USERS} users, {ITEMS} items" in said
    assert "two-tower, seed 0: 8 epochs" in said
    assert "RP3beta: NDCG@3" in said
    page = (folder / "runs" / "default" / "report.html").read_text()
    shown = (folder / "shown.txt").read_text()
    for text in (said, page, shown):
        assert "next item" not in text.lower()
        assert "followed" not in text
    assert "<h1>Retrieval of item</h1>" in page


@pytest.mark.shown_by("cli/test_next_item.py::test_the_table_has_all_methods_and_rules_find_the_ring")
def test_all_methods_find_kinds_where_popularity_does_not(folder):
    table = json.loads((folder / "table.json").read_text())
    assert table["format"] == "gmeta-retrieval-evaluation"
    found = table["results"]["seen items left out"]
    assert {*found} == {"two_tower", "blend", "popularity", "neighbours", "walks", "als", "ease"}
    popularity = found.pop("popularity")[0]["recall@3"]
    assert {
        name: results[0]["recall@3"] > popularity + 0.1 for name, results in found.items()
    } == dict.fromkeys(found, True)


@pytest.mark.shown_by("cli/test_next_item.py::test_the_export_answers_what_recommend_writes")
def test_the_export_answers_what_recommend_writes(folder):
    """The blend has all other methods in it."""
    written = pq.read_table(folder / "top.parquet").to_pydict()
    trained = load_catalogue(RunFolder(folder / "runs" / "default"))
    whole = trained.cuts.whole
    padded = tf.RaggedTensor.from_row_splits(trained.cuts.ids[whole.items], whole.row_splits).to_tensor(-1)
    serve = tf.saved_model.load(str(folder / "serving" / "1")).signatures["recommend"]
    answer = serve(item=padded, user=tf.constant(whole.users, tf.int64))
    np.testing.assert_allclose(answer["scores"], written["scores"], rtol=1e-3, atol=1e-3)
    assert (answer["items"].numpy() == np.array(written["items"])).mean() > 0.99  # but for ties
    histories = np.split(trained.cuts.ids[whole.items], whole.row_splits[1:-1])
    for items, history in zip(written["items"], histories, strict=True):
        assert not set(items) & set(history)


@pytest.mark.shown_by(
    "cli/test_next_item.py::test_users_of_a_file_come_in_its_order_and_strangers_get_what_is_popular"
)
def test_strangers_are_answered_and_times_are_asked_for_where_needed(folder, tmp_path):
    run = folder / "runs" / "default"
    (tmp_path / "users.txt").write_text("1007\n5\n")
    gmeta(
        "recommend", "--run", run, "--users", tmp_path / "users.txt", "-k", 3, "--out", tmp_path / "a.parquet"
    )
    assert [len(items) for items in pq.read_table(tmp_path / "a.parquet").to_pydict()["items"]] == [3, 3]
    assert load_catalogue(RunFolder(run)).choose(None, None)[0] != "popularity"
    data = ("--data", folder / "data")
    said = gmeta("train", *data, "--for", "retrieval", "--set", 'protocol="time"', code=2).stderr
    assert "without times" in said
    said = gmeta("train", *data, "--for", "next-item", "--set", 'protocol="random"', code=2).stderr
    assert "protocol must be one of" in said
    for setting, told in (
        ("seen=true", "nothing that the user has is asked for"),
        ('methods.a={label="a",laws="b"}', "unknown keys: laws"),
        ('methods.a={label="a",user_id=false,history=false}', "columns names none of users"),
        ('methods.a={label="a",columns=["age"]}', "columns names age, which aren't the same in all rows"),
    ):
        assert told in gmeta("train", *data, "--set", setting, code=2).stderr  # without times: retrieval


@pytest.mark.slow  # Quick: tests/experiment/test_trainer.py, of the same checkpoints
def test_a_resumed_run_is_the_uninterrupted_one(folder, tmp_path):
    given = {"ks": [3], "methods": {"two": {"label": "two", "dim": 8, "epochs": 3, "learning_rate": 0.02}}}
    config = plan_catalogue(given, folder / "data", kind=RetrievalConfig).config
    cuts = read_cuts(config, folder / "data")

    class Stop(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    train(config, "two", 0, cuts=cuts, folder=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):  # the epoch that ends is neither saved nor its best kept
        train(config, "two", 0, cuts=cuts, folder=tmp_path / "cut", callbacks=[Stop()])
    assert train(config, "two", 0, cuts=cuts, folder=tmp_path / "cut") == 1
    for name in ("loss", "val_ndcg@3"):
        whole, cut = (read_logged(tmp_path / folder_of, name) for folder_of in ("whole", "cut"))
        assert len(whole) == 3
        assert cut == whole

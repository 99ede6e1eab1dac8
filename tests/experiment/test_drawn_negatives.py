"""Negatives of data of positive rows alone: which they are, and a run for ranking that is trained on them."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gmeta.cli import main
from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError
from gmeta.experiment.plan.experiment_config import NEGATIVES_ADVICE, DrawnNegatives
from gmeta.experiment.plan.ranking_config import RankingConfig
from gmeta.experiment.ranking.drawn_data import add_negatives, read_rows, with_negatives
from gmeta.experiment.ranking.plan import plan_ranking
from gmeta.experiment.ranking.runs import load_ranking
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.preprocess.source import row_count

USERS, ITEMS = 40, 24


def gmeta(*arguments, code=0):
    result = CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output + result.stderr
    return result


def taken(seed=0, rows=900):
    """Pairs of users and items of the same kind, mostly, with what describes them."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, USERS, rows), rng.integers(0, ITEMS, rows)
    kept = (item % 3 == user % 3) | (rng.random(rows) < 0.1)
    user, item = user[kept], item[kept]
    return {
        "user": user + 1000,
        "item": item * 7 + 100,
        "kind": item % 3,
        "price": (item * 1.5).astype(np.float32),
        "city": user % 4,
        "hour": rng.integers(0, 24, len(user)),
        "ts": 1_600_000_000 + rng.permutation(len(user)),
    }


def draw(columns, parts, **settings):
    columns = {**columns, "click": np.ones(len(columns["user"]), np.float32)}
    names = {"user": "user", "item": "item", "label": "click"}
    return add_negatives(columns, parts, DrawnNegatives(**settings), **names)


def cut_evenly(columns):
    return np.split(np.arange(len(columns["user"])), [500 * len(columns["user"]) // 600])


@given(seed=st.integers(0, 20), count=st.integers(1, 5), law=st.sampled_from(["uniform", "popularity"]))
def test_negatives_are_rows_like_positives_with_other_items(seed, count, law):
    columns = taken(seed)
    parts = cut_evenly(columns)
    found, rows = draw(columns, parts, count=count, law=law, seed=seed)
    size = len(columns["user"])
    assert row_count(found) == size * (1 + count)
    assert (found["click"][:size] == 1).all()
    assert (found["click"][size:] == 0).all()
    assert all((found[name][:size] == columns[name]).all() for name in columns)
    assert sorted(np.concatenate(rows)) == list(range(row_count(found)))
    for number, part in enumerate(rows):
        own, seen = part[part >= size], np.concatenate(parts[: number + 1])
        source = np.repeat(parts[number], count)
        for name in ("user", "city", "hour", "ts"):  # of the positive row
            assert (found[name][own] == columns[name][source]).all()
        numbers = (found["item"][own] - 100) // 7
        assert (found["kind"][own] == numbers % 3).all()  # of the negative's own item
        np.testing.assert_allclose(found["price"][own], numbers * 1.5)
        held = {*zip(columns["user"][seen], columns["item"][seen], strict=True)}
        assert not held & {*zip(found["user"][own], found["item"][own], strict=True)}
        assert set(found["item"][own]) <= set(columns["item"][seen])


def test_training_knows_nothing_of_later_rows():
    columns = taken()
    parts = cut_evenly(columns)
    whole, rows = draw(columns, parts)
    early, (alone,) = draw({name: values[parts[0]] for name, values in columns.items()}, parts[:1])
    for name in early:
        np.testing.assert_array_equal(whole[name][rows[0]], early[name][alone])


def test_items_are_drawn_by_the_law():
    """Of 3,000 users with one item each, 2,000 have the same one."""
    item = np.where(np.arange(3000) % 3 < 2, 5, 10 + np.arange(3000) % 7)
    columns = {"user": np.arange(3000), "item": item}
    for law, share in (("uniform", 1 / 7), ("popularity", 0.7)):
        found, _ = draw(columns, [np.arange(3000)], law=law, count=4)
        drawn, own = found["item"][3000:], item[found["user"][3000:]]
        assert abs((drawn[own != 5] == 5).mean() - share) < 0.04
        assert not (drawn == own).any()


def test_a_user_who_has_every_item_gets_none():
    columns = {"user": np.array([1, 1, 2]), "item": np.array([5, 6, 5])}
    found, (rows,) = draw(columns, [np.arange(3)], count=3)
    assert found["user"].tolist() == [1, 1, 2, 2, 2, 2]
    assert found["item"].tolist()[3:] == [6, 6, 6]
    assert len(rows) == 6


# Quick: without labels.
@pytest.mark.parametrize("labelled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_on_positive_rows_learns_from_drawn_ones(tmp_path, monkeypatch, labelled):
    monkeypatch.chdir(tmp_path)
    ones = {"click": np.ones(len(taken()["user"]), np.int64)} if labelled else {}
    pq.write_table(pa.table(taken() | ones), "log.parquet")
    label = ["--label", "click"] if labelled else []
    gmeta("prepare", "--data", "log.parquet", "--task", "user", "--time", "ts", *label)
    words = ["train", "--for", "ranking", "--set", "methods={}"]
    said = gmeta(*words, "--set", 'protocol="random"', code=2).stderr
    assert NEGATIVES_ADVICE in said
    words += ["--set", 'protocol="random"', "--set", 'negatives={law="uniform",count=3}']
    said = gmeta(*words).stderr
    assert (
        "Each positive row has up to 3 negatives, of items that the user doesn't have, drawn evenly: once"
        in said
    )
    shown = gmeta("evaluate", "--json", "table.json").stdout
    table = json.loads((tmp_path / "table.json").read_text())
    assert "Each positive row has up to 3 negatives" in shown.replace("\n", " ")
    assert "Each positive row has up to 3 negatives" in (tmp_path / "runs/default/report.html").read_text()
    assert table["experiment"]["negatives"] == {"law": "uniform", "count": 3, "seed": 0}
    trained = load_ranking(RunFolder(tmp_path / "runs/default"))
    for part in (trained.parts.train, trained.parts.validation, trained.parts.test):
        assert part.labels.mean() == pytest.approx(1 / 4, abs=0.01)
    found = {name: seeds[0]["auc"] for name, seeds in table["results"].items()}
    assert min(found["factors"], found["blend"]) > 0.8 > 0.6 > found["item_mean"]
    config, data = RunFolder(tmp_path / "runs/default").load()
    read = {name: getattr(config, name) for name in ("label", "item", "user", "time", "protocol")}
    again = plan_ranking({**read, "negatives": {"law": "uniform", "count": 3}, "methods": {}}, data)
    assert again.config.label == ("click" if labelled else "interaction")  # as `gmeta tune` plans it
    assert len(again.parts.train) == len(trained.parts.train)
    new = {name: values[:10] for name, values in taken(1).items()}
    pq.write_table(pa.table(new), "new.parquet")
    gmeta("predict", "--data", "new.parquet", "--method", "factors")
    scores = pq.read_table("scores").to_pydict()["score"]
    assert np.mean(scores) > 0.4


def test_negatives_need_users_items_and_labels(tmp_path):
    with pytest.raises(ConfigError, match="law must be uniform or popularity, got 'even'"):
        DrawnNegatives("even")
    with pytest.raises(ConfigError, match="count must be at least 1"):
        DrawnNegatives(count=0)
    with pytest.raises(ConfigError, match="they need columns of users and items"):
        RankingConfig("y", ("item",), item="item", negatives=DrawnNegatives())
    pq.write_table(
        pa.table({"item": np.arange(90) % 9, "click": np.ones(90, np.int64)}), tmp_path / "t.parquet"
    )
    gmeta("prepare", "--data", tmp_path / "t.parquet", "--label", "click", "--out", tmp_path / "data")
    with pytest.raises(DataError, match="draw negatives"):
        plan_ranking({"methods": {}}, tmp_path / "data")


@pytest.mark.shown_by("test_a_run_on_positive_rows_learns_from_drawn_ones")
def test_a_run_for_cold_start_reads_a_data_set_with_negatives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = taken(rows=2000)
    log["item"] = [f"item {each}" for each in log["item"]]
    log["click"] = np.ones(len(log["user"]), np.int64)
    pq.write_table(pa.table(log), "log.parquet")
    most = np.unique(log["user"], return_counts=True)[1].max()  # of a task before it gets negatives
    columns = ("--task", "user", "--time", "ts", "--label", "click")
    gmeta("prepare", "--data", "log.parquet", *columns, "--max-rows", most)
    methods = 'methods={maml={label="MAML",description="x",epochs=1,inner={steps=1,learning_rate=0.1}}}'
    words = ["train", "--set", methods, "--set", "hidden=[4]", "--set", "evaluation_steps=[0]"]
    assert NEGATIVES_ADVICE in gmeta(*words, code=2).stderr
    words += ["--set", "negatives={count=2}"]
    gmeta(*words)
    config, data = RunFolder(tmp_path / "runs/default").load()
    assert config.negatives == DrawnNegatives(count=2)
    rows, before = (
        read_rows(data, ["user", "item", "click", "ts"]),
        read_rows(tmp_path / "data", ["user", "ts"]),
    )
    assert len(rows["user"]) > 2.9 * len(before["user"])
    assert rows["click"].mean() == pytest.approx(1 / 3, abs=0.01)
    assert set(rows["ts"]) == set(before["ts"])
    held = {*zip(rows["user"][rows["click"] > 0], rows["item"][rows["click"] > 0], strict=True)}
    drawn = {*zip(rows["user"][rows["click"] == 0], rows["item"][rows["click"] == 0], strict=True)}
    assert not held & drawn
    assert Manifest.load(data).roles == Manifest.load(tmp_path / "data").roles
    assert "all 1 epochs were done before" in gmeta(*words).stderr  # the same data again
    run, drawn = RunFolder(tmp_path / "other"), {"negatives": {"count": 2}}
    assert with_negatives(drawn, data, run, "config") == data  # which has them
    with pytest.raises(ConfigError, match="has negatives already, by DrawnNegatives"):
        with_negatives({"negatives": {"count": 3}}, data, run, "config")
    for count in (3, 4):  # a run that isn't begun may change its mind
        assert with_negatives({"negatives": {"count": count}}, tmp_path / "data", run, "config").exists()
    with pytest.raises(
        ConfigError, match="data: no column ghost of ids to draw items from; name one of item, kind, city"
    ):
        with_negatives({**drawn, "item": "ghost"}, tmp_path / "data", run, "config")
    gmeta("evaluate", "--json", "table.json")
    notes = json.loads((tmp_path / "table.json").read_text())["notes"]
    assert any(note.startswith("Each positive row has up to 2 negatives") for note in notes)
    gmeta("export")
    new = {name: values[:10] for name, values in log.items() if name != "click"}
    pq.write_table(pa.table(new), "new.parquet")
    gmeta("predict", "--data", "new.parquet")
    assert len(pq.read_table("scores")) == 10

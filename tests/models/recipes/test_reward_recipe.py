"""The recipe of rewards after imitation: what it learns on, and from a run of gmeta train to a picture."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.core.errors import ConfigError, DataError
from support.next_item import write_events

RECIPE = Path(__file__).resolve().parents[3] / "models" / "generative"


@pytest.fixture
def recipe(monkeypatch):
    """Import a module of the recipe's folder, which is no package."""
    monkeypatch.syspath_prepend(RECIPE)
    yield importlib.import_module
    for path in RECIPE.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_rewarded_items_are_the_last_of_training_histories(recipe):
    train = {"item": tf.ragged.constant([[5, 6, 7], [8], [9, 3]], dtype=tf.int64)}
    train["time"] = train["item"] * 10
    found = recipe("rl").next_items(train, 2)
    assert found["item"].to_list() == [[5, 6], [9], [5]]
    assert found["time"].to_list() == [[50, 60], [90], [50]]
    assert found["next"].numpy().tolist() == [7, 3, 6]
    assert found["user"].numpy().tolist() == [0, 2, 0]


def test_unknown_names_are_refused(recipe):
    settings = recipe("rl").RewardSettings
    with pytest.raises(ConfigError, match="reward must be hit or rank, got 'click'"):
        settings(reward="click")
    with pytest.raises(ConfigError, match="objective must be ecpo or grpo, got 'ppo'"):
        settings(objective="ppo")


METHOD = {"model": "generative", "codes": 5, "levels": 1, "id_dim": 4, "dim": 8, "width": 8, "beam": 6}


@pytest.mark.slow
def test_it_goes_on_from_the_best_epoch_by_rewards_and_by_imitation(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_events(Path("events.parquet"))
    settings = [f"methods.own.{name}={json.dumps(value)}" for name, value in METHOD.items()]
    words = [word for line in ("ks=[3]", "blend=false", *settings) for word in ("--set", line)]
    words += ["--set", 'methods.own={label="own",epochs=2,max_length=10}']
    tf.config.run_functions_eagerly(True)  # tracing takes longer than these few steps
    try:
        for command in (
            ["prepare", "--data", "events.parquet", "--task", "user", "--time", "ts"],
            ["train", "--for", "next-item", "--run", "run", *words],
            ["evaluate", "--run", "run", "--json", "table.json"],
        ):
            done = CliRunner().invoke(main, command, catch_exceptions=False)
            assert done.exit_code == 0, done.output
        options = ["--run", "run", "--minutes", "0.001", "--set", "group=4", "--set", "every=2"]
        done = CliRunner().invoke(recipe("rl").main, options, catch_exceptions=False)
    finally:
        tf.config.run_functions_eagerly(False)
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in next(Path("run/rewards").glob("*.jsonl")).open()]
    starts = [line for line in lines if line["epoch"] == 0]
    assert [line["part"] for line in starts] == ["more-sft", "rewards"]
    measured = json.loads(Path("table.json").read_text())["results"]["seen items ranked"]["own"][0]
    for line in starts:
        assert line["test"]["ndcg@3"] == pytest.approx(measured["ndcg@3"])
    rewarded = [line for line in lines if line["part"] == "rewards" and line["epoch"]]
    assert all(0 < line["reward"] < 1 for line in rewarded)
    assert rewarded
    assert "seed 0: test NDCG@3 sft 0." in done.output
    assert Path("run/rewards/rewards.png").stat().st_size > 10_000
    for given, text in (("--method=sasrec", "no generative method sasrec"), ("--seed=7", "has no seed 7")):
        done = CliRunner().invoke(recipe("rl").main, [*options, given])
        assert text in done.output


def test_a_part_that_lacks_is_named(recipe, tmp_path):
    line = {"part": "rewards", "seed": 0, "epoch": 0, "k": 10, "validation": {"ndcg@10": 0.1}}
    (tmp_path / "some.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(DataError, match="the seeds of more-sft are none, and those of rewards 0"):
        recipe("reward_report").write_report([tmp_path / "some.jsonl"], tmp_path)

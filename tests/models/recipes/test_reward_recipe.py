"""The recipe of rewards after imitation: what it learns on, and a run from a text file to a picture."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError, DataError
from support import warm

RECIPES = Path(__file__).resolve().parents[3] / "models"
SMALL = ["--levels", "1", "--codes", "3", "--vectors", "4", "--no-balanced", "--dim", "8", "--width", "8"]
SMALL += ["--batch", "16", "--negatives", "8"]


def run(name, *words, cwd):
    done = warm.run([sys.executable, RECIPES / "generative" / name, *map(str, words)], cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rewarded_items_are_the_last_of_training_histories(recipe):
    train = {"item": tf.ragged.constant([[5, 6, 7], [8], [9, 3]], dtype=tf.int64)}
    found = recipe("reward_settings").next_items(train, 2)
    assert found["item"].to_list() == [[5, 6], [9], [5]]
    assert found["next"].numpy().tolist() == [7, 3, 6]
    assert found["user"].numpy().tolist() == [0, 2, 0]


def test_unknown_names_are_refused(recipe):
    settings, make = recipe("reward_settings").RewardSettings, recipe("reward_settings").make_training
    with pytest.raises(ConfigError, match="reward must be hit or rank, got 'click'"):
        make(None, settings(reward="click"), 0)
    with pytest.raises(ConfigError, match="objective must be ecpo or grpo, got 'ppo'"):
        make(None, settings(objective="ppo"), 0)


@pytest.mark.slow
def test_it_imitates_then_learns_by_rewards_and_draws(recipe, file, tmp_path):
    run("item_codes.py", file, tmp_path / "ids", *SMALL, cwd=tmp_path)
    words = [*SMALL, "--epochs", "2", "--reward-minutes", "0.001", "--group", "4", "--reward-every", "2"]
    told = run("rl.py", file, "--ids", tmp_path / "ids", *words, "--json", "one.jsonl", cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert [line["model"] for line in lines[:2]] == ["sft", "sft"]
    kept = {line["model"]: line for line in lines if line["epoch"] == 0}
    best = max(lines[:2], key=lambda line: line["validation"]["ndcg@10"])
    for line in kept.values():  # both go on from the weights of the best epoch
        assert line["validation"] == pytest.approx(best["validation"])
        assert line["test"] == pytest.approx(best["test"])
        assert line["began"] == best["seconds"]
    rewarded = [line for line in lines if line["model"] == "rewards"]
    assert all(0 < line["reward"] < 1 and 0 < line["tied"] < 1 for line in rewarded[1:])
    assert {line["model"] for line in lines if line["epoch"] >= 1} == {"sft", "more-sft", "rewards"}
    assert "seed 0: test NDCG@10 sft 0." in told
    assert (tmp_path / "runs" / "rl" / "beauty" / "rewards.png").stat().st_size > 10_000

    rl, data = recipe("rl"), recipe("sequences").read_sequences(file)
    settings = rl.RetrieverSettings(**lines[0]["settings"])
    ids, folder = rl.make_ids(data, file, settings, 0), tmp_path / "runs" / "rl" / "beauty" / "sft" / "0"
    again = list(rl.imitate(data, ids, settings, 0, folder, test=True, minutes=1.0))
    assert again == [line for line in lines if line["model"] == "sft"]  # what is kept isn't trained again
    other = replace(settings, batch=8)
    with pytest.raises(DataError, match="was trained with other data, ids or settings; name another folder"):
        list(rl.imitate(data, ids, other, 0, folder, test=True, minutes=1.0))


def test_a_part_that_lacks_is_named(recipe, tmp_path):
    line = {"data": "beauty", "model": "sft", "seed": 0, "epoch": 1, "settings": {}}
    (tmp_path / "some.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(DataError, match="not as many seeds of more-sft and rewards as of sft"):
        recipe("reward_report").write_report([tmp_path / "some.jsonl"], tmp_path)

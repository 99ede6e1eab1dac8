"""From a Parquet log of strings to predictions of an exported model in stock TensorFlow, by the commands."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.core.errors import DataError
from gmeta.experiment.plan import own_plan
from gmeta.experiment.plan.ranking_config import RankingConfig, RankingMethod
from gmeta.experiment.ranking import plan
from gmeta.experiment.results import evaluation_json
from gmeta.experiment.runs.run_folder import RunFolder, choose_families
from support import warm
from support.data_files import TAGS, write_click_log
from support.process_ranks import own_lines
from support.serving import ask_all

SMALL = """
tasks_per_batch = 8
embedding_dim = 4
hidden = [8]
evaluation_steps = [0, 2]
[methods.maml]
label = "MAML"
description = "Adapts."
inner = { steps = 1, learning_rate = 0.1 }
learning_rate = 1e-2
epochs = 3
[methods.joint]
label = "joint training"
description = "Its steps are fine-tuning."
inner = { steps = 0, learning_rate = 0.1 }
outer_samples = "all"
learning_rate = 1e-2
epochs = 2
"""


def gmeta(*arguments):
    result = CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output + result.stderr
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An empty folder but for the log and a file of settings, in which all commands ran as printed."""
    folder = tmp_path_factory.mktemp("own")
    write_click_log(folder / "clicks", users=50, rows=16)
    (folder / "small.toml").write_text(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        task = ["--task", "user_id", "--time", "ts", "--label", "click"]
        gmeta("prepare", "--data", "clicks/*.parquet", *task)
        said = gmeta("train", "--config", "small.toml").stderr
        (folder / "said.txt").write_text(said)
        (folder / "shown.txt").write_text(gmeta("evaluate", "--json", "evaluation.json").stdout)
        gmeta("export")
    return folder


def test_training_says_what_it_has_decided(folder):
    said = (folder / "said.txt").read_text()
    assert "predicts whether click, 0 or 1, by the cross-entropy" in said
    assert "features: item_id, city, tags (sqrtn)" in said
    assert "numbers: price" in said


def test_the_report_has_baselines_and_says_first_who_wins(folder):
    evaluation = evaluation_json.load(folder / "evaluation.json")
    assert list(evaluation.methods) == [
        *("maml", "joint", "item_mean", "biases", "neighbours", "kriging", "factors", "attributes")
    ]
    assert evaluation.metrics == ["logloss", "auc", "gauc"]
    assert all(
        np.isfinite(evaluation.spread(name, steps, "logloss").mean)
        for name, method in evaluation.methods.items()
        for steps in method.results
    )
    config = evaluation.config["experiment"]
    assert (config["label"], config["item"]) == ("click", "item_id")
    assert evaluation.data.warm_tasks + evaluation.data.cold_tasks == 50
    page = (folder / "runs/default/report.html").read_text()
    assert "on held-out tasks" in page
    assert "log loss" in (folder / "shown.txt").read_text()


def test_stock_tensorflow_adapts_to_a_new_user_from_strings(folder):
    served = folder / "serving" / "1"
    new = {
        "item_id": np.array(["item-3", "item-4", "never seen"], object),
        "city": np.array(["city 1"] * 3, object),
        "tags": np.array([[TAGS[0], TAGS[1]], [TAGS[2], ""], ["", ""]], object),
        "price": np.array([3.0, 20.0, 1e9], np.float32),
    }
    before, learned = ask_all(
        [(served, "predict", new), (served, "adapt", {**new, "label": np.array([1, 1, 1], np.float32)})]
    )
    assert before["click"].shape == (3,)
    np.testing.assert_allclose(before["click"], 1 / (1 + np.exp(-before["click_logit"])), rtol=1e-5)
    [after] = ask_all([(served, "predict_with", {**new, "weights_bytes": learned["weights_bytes"]})])
    assert (after["click"] > before["click"]).all()  # all that it was shown was clicked


def test_a_second_call_has_nothing_left_to_do(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert "all 3 epochs were done before" in gmeta("train", "--config", "small.toml").stderr


def test_a_run_without_a_data_set_says_which_command_makes_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["train"])
    assert result.exit_code == 2
    assert "no prepared data set, neither here nor in data; run `gmeta prepare` first" in result.stderr


@pytest.mark.shown_by("test_a_setting_of_either_family_trains_that_alone")
def test_cold_start_and_ranking_train_side_by_side(folder, monkeypatch):
    monkeypatch.chdir(folder)
    small = RunFolder(folder / "runs/default").load()[0].methods["joint"]
    monkeypatch.setattr(own_plan, "own_methods", lambda steps: {"joint": small})
    short = {"rows_per_batch": 512, "epochs": 1}
    monkeypatch.setattr(RankingMethod, "complete", lambda method, rows: replace(method, **short))
    words = ["train", "--run", "both", "--budget", "0", "--set", "seeds=[3]"]
    gmeta(*words)
    run = RunFolder(folder / "both")
    assert (run.family, run.beside.family) == ("cold-start", "ranking")
    config, data = run.beside.load()
    assert (config.label, config.seeds, data) == ("click", (3,), (folder / "data").resolve())
    shown = gmeta("evaluate", "--run", "both").stdout
    ranking = json.loads((folder / "both/ranking/evaluation.json").read_text())["headline"][0]
    assert ranking in shown.replace("\n", " ")
    page = (folder / "both/report.html").read_text()
    assert "on held-out tasks" in page
    assert ranking in page
    assert 'href="ranking/report.html"' in page

    planned = plan.plan_ranking

    def too_few(*_):
        raise DataError("too few rows")

    monkeypatch.setattr(plan, "plan_ranking", too_few)
    assert "ranking is left out: too few rows" in gmeta(*words).stderr  # and cold start was trained before
    monkeypatch.setattr(plan, "plan_ranking", planned)
    (folder / "both/ranking/config.json").rename(folder / "config.json")
    (folder / "both/ranking/config.json").write_text("{")
    for command in (words, ["evaluate", "--run", "both"]):
        assert "ranking is left out: both/ranking/config.json: not JSON" in gmeta(*command).stderr
    (folder / "config.json").replace(folder / "both/ranking/config.json")
    (folder / "both/ranking/chosen.json").unlink()
    assert "ranking is left out" in gmeta("evaluate", "--run", "both").stderr


def test_a_run_beside_one_for_cold_start_has_its_label_and_data(folder, tmp_path):
    def begin(run, config, data=folder / "data"):
        (run.path / "config.json").unlink(missing_ok=True)
        run.path.mkdir(exist_ok=True)
        run.begin(config, data)

    cold = RunFolder(folder / "runs/default").load()[0]
    run, ranking = RunFolder(tmp_path / "run"), RankingConfig("click", ("item_id",))
    begin(run, cold)
    begin(run.beside, ranking)
    run.check_beside()
    begin(run.beside, replace(ranking, label="price"))
    with pytest.raises(DataError, match="the run predicts price, not click"):
        run.check_beside()
    begin(run.beside, cold)
    with pytest.raises(DataError, match="isn't for ranking; evaluate it alone, or delete it and run `gmeta"):
        run.check_beside()
    other = tmp_path / "other"
    gmeta("prepare", "--data", folder / "clicks", "--task", "user_id", "--label", "click", "--out", other)
    begin(run.beside, ranking, other)
    with pytest.raises(DataError, match=f"was trained on {other}, not "):
        run.check_beside()


def test_a_setting_of_either_family_trains_that_alone(folder):
    for settings in ({"held_out": 4}, {"features": ["item_id"]}, {"held_out": 4, "protocol": "random"}):
        assert choose_families(None, settings, folder / "data") == ("cold-start",)
    assert choose_families(None, {"protocol": "random", "seeds": [1]}, folder / "data") == ("ranking",)
    assert choose_families(None, {"seeds": [1], "budget": "0"}, folder / "data") == ("cold-start", "ranking")


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_train_on_own_data(folder):
    said = warm.run(
        [sys.executable, "-m", "gmeta", "train", "--np", "2", "--run", "two", "--config", "small.toml"],
        cwd=folder,
    )
    assert said.returncode == 0, said.stderr
    assert said.stderr.count("predicts whether click") == 1
    course = json.loads((folder / "two/maml/seed-0/history.json").read_text())
    assert len(course) == 3
    assert all(np.isfinite(epoch["loss"]) for epoch in course)


# Quick: test_stock_tensorflow_adapts_to_a_new_user_from_strings.
@pytest.mark.slow
def test_the_demo_goes_from_its_log_to_a_client(folder, tmp_path):
    tools = Path(__file__).resolve().parents[2] / "tools" / "dev"
    made = warm.run([sys.executable, tools / "demo_clicks.py", tmp_path])
    assert made.returncode == 0, made.stderr
    said = subprocess.run(
        [sys.executable, tools / "demo_client.py", folder / "serving", tmp_path / "new_user.json"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert own_lines(said.stderr) == ""
    assert "clicked" in said.stdout

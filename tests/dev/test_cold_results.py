"""The tool that writes evaluations into docs/results."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from gmeta.experiment.results.evaluation import DataDescription, Evaluation, MethodResult, SplitResult
from gmeta.experiment.results.evaluation_json import save
from gmeta.experiment.results.metrics import compare
from support import warm

TOOL = Path(__file__).resolve().parents[2] / "tools" / "dev" / "cold_results.py"


def evaluation():
    errors = {"mae": np.array([[1.0, 1.0, 2.0], [1.0, 1.0, 2.0]])}, {"mae": np.array([[2.0, 3.0, 3.0]])}
    found = compare({("ours", 1): errors[0]}, {"item_mean": errors[1]}, np.array([2, 2, 2]))
    ours = {0: {"mae": [0.9, 0.9], "auc": [0.5, 0.5]}, 1: {"mae": [0.7, 0.8], "auc": [0.7, 0.7]}}
    mean = {0: {"mae": [1.0], "auc": [0.5]}}
    return Evaluation(
        "Cold start",
        DataDescription("ml", warm_tasks=3, cold_tasks=3, rows=9, split="user_cold"),
        config={},
        seeds=[0, 1],
        methods={
            "ours": MethodResult("ours", "Ours.", ours),
            "item_mean": MethodResult("mean", "Mean.", mean),
        },
        splits={"item_cold": SplitResult(3, {"ours": ours, "item_mean": mean})},
        bootstrap=found,
    )


def test_figures_are_those_after_the_last_step_with_spread_and_interval(tmp_path):
    file = save(evaluation(), tmp_path / "evaluation.json")
    run = warm.run([sys.executable, TOOL, f"ml-1m={file}", "--json", tmp_path / "out.json"])
    assert run.returncode == 0, run.stderr
    about, *figures = json.loads((tmp_path / "out.json").read_text())
    assert {"date", "command", "cpu", "cores"} <= about.keys()
    found = {each.pop("name"): each for each in figures}
    first = "results/cold/ml-1m/user_cold"
    assert found[f"{first}/ours/mae"] == {"value": 0.75, "spread": 0.07071}
    assert found[f"{first}/item_mean/auc"] == {"value": 0.5}
    assert found[f"{first}/ours-item_mean/mae"]["value"] == pytest.approx(-2 / 3, abs=1e-5)
    assert found[f"{first}/ours-item_mean/mae"]["interval"][1] < 0
    assert found["results/cold/ml-1m/item_cold/ours/auc"] == {"value": 0.7, "spread": 0.0}


def test_a_file_that_is_not_there_and_a_name_that_is_missing_are_one_line(tmp_path):
    for given, says in (("ml-1m=none.json", "can't be read"), ("none.json", "give DATA=FILE")):
        run = warm.run([sys.executable, TOOL, given, "--json", tmp_path / "out.json"])
        assert run.returncode == 1
        assert says in run.stderr.splitlines()[-1]
        assert not (tmp_path / "out.json").exists()

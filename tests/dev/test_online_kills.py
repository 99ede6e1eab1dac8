"""Training on a stream whose processes are killed ends as if they had not been."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "dev"


@pytest.fixture
def kills(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    yield importlib.import_module("online_kills")
    sys.modules.pop("online_kills", None)


@pytest.mark.slow
def test_three_kills_leave_no_trace(tmp_path):
    words = [sys.executable, TOOLS / "online_kills.py", "--kills", "3", "--seed", "1", "--mean", "3"]
    run = subprocess.run(
        [*words, "--folder", tmp_path / "work", "--json", tmp_path / "kills.json"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    _, result = json.loads((tmp_path / "kills.json").read_text())
    assert result["wrong"] == []
    assert sum(result["kills"].values()) >= 1


def test_every_difference_is_named(kills):
    one = {"step": np.array(3), "rows": np.array([1.0, -0.0], np.float32)}
    assert kills.differences(one, dict(one)) == []
    assert kills.differences({**one, "rows": np.array([1.0, 0.0], np.float32)}, one) == ["rows differs"]
    assert kills.differences({"step": one["step"]}, one) == ["rows is missing"]
    assert kills.differences({**one, "step": np.array(3, np.int32)}, one) == ["step differs"]


def test_a_log_is_the_same_however_often_it_is_begun(kills, tmp_path):
    for folder, parts in (("whole", [3]), ("parts", [1, 2, 3])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "000001.jsonl.tmp").write_text("half")
        for files in parts:
            kills.write_log(str(tmp_path / folder), 5, 0.0, files)
    for number in range(3):
        name = f"{number:06d}.jsonl"
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    counted = kills.counted(5, 3)
    assert set(counted) == {"user", "item"}
    for ids in counted.values():
        assert 0.9 * 3 * kills.ROWS < sum(ids.values()) < 3 * kills.ROWS  # a batch counts an id once

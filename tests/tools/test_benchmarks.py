"""Every benchmark runs at small sizes and writes JSON of the stated form; nothing here is timed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import warm

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "bench"
SUBJECTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "harness")


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_smoke_run(subject, tmp_path):
    file = tmp_path / "results.json"
    words = [sys.executable, FOLDER / f"{subject}.py", "--smoke", "--rounds", "1", "--json", str(file)]
    run = warm.run(words, cwd=FOLDER.parents[1])
    assert run.returncode == 0, run.stderr
    about, *results = json.loads(file.read_text())
    assert {"date", "command", "cpu", "cores"} <= about.keys()
    assert results
    for result in results:
        known = (
            f"{subject}/",
            f"{subject.replace('_', '/')}/",
            f"{subject.removeprefix('gpu_')}/",
            "pipeline/",  # the parts that steps consist of
            "io/",  # the readers
        )
        assert result["name"].startswith(known)
        assert result["name"] in run.stdout
        assert isinstance(result["value"], float | int)
        assert result["unit"]
        if result.get("peer_value"):
            better = result["value"] / result["peer_value"]
            assert result["ratio"] == pytest.approx(better if result["unit"].endswith("/s") else 1 / better)


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_benchmark_lists_its_options(subject):
    run = warm.run([sys.executable, FOLDER / f"{subject}.py", "--help"])
    assert run.returncode == 0, run.stderr
    assert "--rounds ROUNDS" in run.stdout


def test_a_wrong_option_ends_it():
    words = [sys.executable, FOLDER / "prepare.py", "--rounds", "many"]
    run = subprocess.run(words, capture_output=True, text=True, timeout=900, cwd=FOLDER.parents[1])
    assert run.returncode == 2
    assert "argument --rounds: invalid int value: 'many'" in run.stderr


@pytest.mark.parametrize("subject", ["", "tabel"])
def test_make_names_the_subjects(subject):
    words = ["make", "-s", "bench", f"SUBJECT={subject}"]
    run = subprocess.run(words, capture_output=True, text=True, cwd=FOLDER.parents[1])
    assert run.returncode != 0
    assert f"no benchmark '{subject}'; there are {' '.join(SUBJECTS)}" in run.stderr

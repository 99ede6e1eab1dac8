"""Every benchmark runs at small sizes and writes JSON of the stated form; nothing here is timed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gmeta.cli import main

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "bench"
SUBJECTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "harness")
SMOKE = ("--smoke", "--rounds", "1", "--json")

# Each benchmark in a process of its own, as `gmeta bench` runs it, but one that comes with TensorFlow loaded:
# nothing of it has run before the fork.
FORKS = """
import os, runpy, sys
from pathlib import Path
import gmeta
import tensorflow, gmeta.models

bench, out = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, str(bench))
for subject in sys.argv[3:]:
    child = os.fork()
    if child == 0:
        json = str(out / f"{subject}.json")
        for stream, end in ((1, "out"), (2, "err")):
            os.dup2(os.open(out / f"{subject}.{end}", os.O_CREAT | os.O_WRONLY), stream)
        sys.argv = [str(bench / f"{subject}.py"), "--smoke", "--rounds", "1", "--json", json]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit(0)
    (out / f"{subject}.code").write_text(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    words = [sys.executable, "-c", FORKS, FOLDER, folder, *SUBJECTS]
    run = subprocess.run(words, capture_output=True, text=True, timeout=600, cwd=FOLDER.parents[1])
    assert run.returncode == 0, run.stderr
    return folder


def assert_states(subject, folder):
    about, *results = json.loads((folder / f"{subject}.json").read_text())
    said = (folder / f"{subject}.out").read_text()
    assert {"date", "command", "cpu", "cores"} <= about.keys()
    assert results
    for result in results:
        assert result["name"].startswith(f"{subject}/")
        assert result["name"] in said
        assert isinstance(result["value"], float | int)
        assert result["unit"]
        if result.get("peer_value"):
            better = result["value"] / result["peer_value"]
            assert result["ratio"] == pytest.approx(better if result["unit"].endswith("/s") else 1 / better)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_smoke_run(subject, runs):
    assert (runs / f"{subject}.code").read_text() == "0", (runs / f"{subject}.err").read_text()
    assert_states(subject, runs)


def test_the_command_runs_it(tmp_path):
    words = [sys.executable, "-m", "gmeta", "bench", "prepare", *SMOKE, str(tmp_path / "prepare.json")]
    run = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=FOLDER.parents[1])
    assert run.returncode == 0, run.stderr
    (tmp_path / "prepare.out").write_text(run.stdout)
    assert_states("prepare", tmp_path)


def test_the_command_ends_as_the_benchmark_does(tmp_path):
    words = [sys.executable, "-m", "gmeta", "bench", "prepare", "--rounds", "many"]
    run = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=FOLDER.parents[1])
    assert run.returncode == 2
    assert "argument --rounds: invalid int value: 'many'" in run.stderr


def test_without_a_subject_it_names_them():
    done = CliRunner().invoke(main, ["bench"])
    assert done.exit_code == 0
    assert done.output.splitlines()[-1] == f"Subjects: {', '.join(SUBJECTS)}"


def test_an_unknown_subject_is_refused():
    done = CliRunner().invoke(main, ["bench", "tabel"])
    assert done.exit_code == 2
    assert "no benchmark 'tabel'; there are " in done.output

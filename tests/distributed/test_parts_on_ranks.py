"""`gmeta predict --np` and `gmeta recommend --np`: the bytes of one process, also after ranks were killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.core.errors import DataError
from gmeta.experiment.next_item.recommendations import join_recommendations
from gmeta.experiment.runs.parts import Parts
from support import warm
from support.data_files import write_click_log
from support.next_item import write_events

pytestmark = pytest.mark.ranks

KILLED = """
import os, signal, sys
from contextlib import contextmanager
from gmeta.experiment.runs.parts import Parts

@contextmanager
def write(self, number, schema):
    if number > int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    with usual(self, number, schema) as writer:
        yield writer

usual, Parts.write = Parts.write, write
from gmeta.cli import main
main(sys.argv[2:])
"""
METHODS = {
    "ranking": '{dcn={label="DCN-v2",dim=2,hidden=[4],epochs=1}}',
    "cold-start": '{maml={label="MAML",description="x",epochs=1,inner={steps=1,learning_rate=0.1}}}',
    "next-item": '{sasrec={label="SASRec",dim=4,epochs=1}}',
}


def gmeta(*words: object) -> None:
    done = CliRunner().invoke(main, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output + done.stderr


def on_ranks(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, "-m", "gmeta", *words], cwd=folder)


def killed(folder: Path, last: int, *words: object) -> None:
    """Run a command in one process that is killed before the part after number ``last``."""
    (folder / "killed.py").write_text(KILLED)
    done = warm.run([sys.executable, "killed.py", last, *words], cwd=folder)
    assert done.returncode < 0, done.stdout + done.stderr


def files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.parquet")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each family that predicts or recommends."""
    folder = tmp_path_factory.mktemp("ranks")
    write_click_log(folder / "clicks", users=30, rows=12)
    write_events(folder / "events.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        task = ["--task", "user_id", "--time", "ts", "--label", "click"]
        gmeta("prepare", "--data", "clicks/*.parquet", *task, "--out", "rows")
        gmeta("prepare", "--data", "events.parquet", "--task", "user", "--time", "ts", "--out", "events")
        for family, methods in METHODS.items():
            data = "events" if family == "next-item" else "rows"
            sizes = ["--set", "hidden=[4]", "--budget", "0"] if family == "cold-start" else []
            given = ["--data", data, "--run", family, "--set", f"methods={methods}", *sizes]
            gmeta("train", "--for", family, *given)
    new = pa.concat_tables(map(pq.read_table, sorted((folder / "clicks").glob("*.parquet"))))
    pq.write_table(new.slice(0, 50), folder / "new.parquet")
    return folder


# Quick: of ranking.
@pytest.mark.parametrize(
    ("family", "method"),
    [("ranking", "blend"), pytest.param("cold-start", "maml", marks=pytest.mark.slow)],
)
@pytest.mark.shown_by(
    "distributed/test_predictions_on_ranks.py::test_ranks_that_are_killed_are_followed_by_others"
)
def test_predictions_of_two_ranks_are_those_of_one_process(folder: Path, family: str, method: str) -> None:
    words = ["predict", "--run", family, "--method", method, "--data", "new.parquet", "--rows-per-part", 12]
    alone = on_ranks(folder, *words, "--out", f"{family}-one")
    assert "50 rows" in alone.stdout, alone.stderr
    said = on_ranks(folder, *words, "--out", f"{family}-two", "--np", 2)
    assert said.returncode == 0, said.stderr
    assert "[0] 26 rows" in said.stdout  # the parts 0, 2 and 4
    assert "[1] 24 rows" in said.stdout
    assert len(files(folder / f"{family}-one")) == 5
    assert files(folder / f"{family}-two") == files(folder / f"{family}-one")
    killed(folder, 0, *words, "--out", f"{family}-cut")
    assert [*files(folder / f"{family}-cut")] == ["part-00000.parquet"]
    said = on_ranks(folder, *words, "--out", f"{family}-cut", "--np", 2)
    assert said.returncode == 0, said.stderr
    assert "1 was there before" in said.stdout
    assert files(folder / f"{family}-cut") == files(folder / f"{family}-one")


@pytest.mark.shown_by(
    "distributed/test_predictions_on_ranks.py::test_ranks_that_are_killed_are_followed_by_others"
)
def test_recommendations_of_two_ranks_are_those_of_one_process(folder: Path) -> None:
    words = ["recommend", "--run", "next-item", "--method", "blend", "-k", 4, "--users-per-part", 13]
    alone = on_ranks(folder, *words, "--out", "one.parquet")
    assert "60 users, by blend of all: one.parquet" in alone.stdout, alone.stderr
    said = on_ranks(folder, *words, "--out", "two.parquet", "--np", 2)
    assert "60 users: two.parquet" in said.stdout, said.stderr
    assert (folder / "two.parquet").read_bytes() == (folder / "one.parquet").read_bytes()
    killed(folder, 0, *words, "--out", "cut.parquet")
    assert [*files(folder / "cut.parquet.parts")] == ["part-00000.parquet"]
    assert not (folder / "cut.parquet").exists()
    with pytest.raises(DataError, match="4 of 5 parts are missing"):
        join_recommendations(folder / "cut.parquet")
    other = on_ranks(folder, *words, "--out", "cut.parquet", "-k", 5)
    assert "cut.parquet.parts has parts of another request, with other k: name" in other.stderr
    again = on_ranks(folder, *words, "--out", "cut.parquet")
    assert "60 users, by blend of all: cut.parquet" in again.stdout, again.stderr
    assert (folder / "cut.parquet").read_bytes() == (folder / "one.parquet").read_bytes()
    assert not any(folder.glob("*.parts"))


@pytest.mark.shown_by(
    "distributed/test_train_command.py::test_what_ranks_refuse_alike_is_said_once_with_the_reason"
)
def test_an_error_of_one_rank_ends_all_with_its_message(folder: Path) -> None:
    words = ["recommend", "--run", "next-item", "--method", "ease", "--users-per-part", 20, "--np", 2]
    blocked = Parts(folder / "bad.parquet.parts", "_recommend.json", 3).path(1)
    blocked.parent.mkdir()
    blocked.with_name(f".{blocked.name}.unfinished").mkdir()  # no file can be written there
    said = on_ranks(folder, *words, "--out", "bad.parquet")
    assert said.returncode == 2
    last = next(line for line in said.stderr.splitlines() if line.startswith("gmeta: error: "))
    assert "the job was ended: rank 1 of 2 ended with exit code 2" in last
    assert "can't write" in last
    assert not (folder / "bad.parquet").exists()


@pytest.mark.shown_by(
    "distributed/test_predictions_on_ranks.py::test_ranks_that_are_killed_are_followed_by_others"
)
def test_ranks_of_another_launcher_leave_the_joining_to_one_process(folder: Path) -> None:
    words = ["recommend", "--run", "next-item", "--method", "ease", "--users-per-part", 20]
    command = [*words, "--out", "parts.parquet"]
    said = on_ranks(folder, "launch", "--np", 2, "--", sys.executable, "-m", "gmeta", *command)
    assert said.returncode == 0, said.stderr
    assert "the same command in one process writes parts.parquet" in said.stdout
    assert on_ranks(folder, *command).returncode == 0
    found = pq.read_table(folder / "parts.parquet").to_pydict()
    assert len(found["user"]) == 60
    assert all(np.diff(scores).max() <= 0 for scores in found["scores"])
    assert "GMETA_SIZE" not in os.environ

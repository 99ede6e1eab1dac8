"""`gmeta train --np`: the command starts itself as ranks, which must agree on the settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gmeta.core.settings import load_toml
from gmeta.core.shares import SHARES
from gmeta.experiment.next_item import models
from gmeta.experiment.next_item.runs import load_catalogue
from gmeta.experiment.plan.experiment_config import ExperimentConfig
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.experiment.runs.trainer import read_logged, restore
from gmeta.models import MetaModel
from gmeta.preprocess import TableSpec, prepare
from gmeta.testing import small_data, small_toml
from support import warm
from support.next_item import write_events
from support.tables import sorted_records

pytestmark = pytest.mark.ranks


def train(*args: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return gmeta_command("train", *args, **environment)


def gmeta_command(
    *args: str | Path | int, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, "-m", "gmeta", *args], cwd=folder, env={**os.environ, **environment})


def test_what_ranks_refuse_alike_is_said_once_with_the_reason(tmp_path: Path) -> None:
    said = train("--np", "2", "--run", tmp_path, "--config", tmp_path / "absent.toml")
    assert said.returncode == 2
    last = next(line for line in said.stderr.splitlines() if line.startswith("gmeta: error: "))
    assert last.startswith("gmeta: error: the job was ended: all 2 ranks alike: rank ")
    assert "absent.toml" in last


def test_ranks_with_other_settings_are_named(tmp_path: Path) -> None:
    # Each rank reads the settings of its own machine.
    for rank in (0, 1):
        (tmp_path / f"{rank}.toml").write_text(f"embedding_dim = {8 + rank}\n")
    start = tmp_path / "start.py"
    start.write_text(
        "import os, sys\nfrom gmeta.cli import main\n"
        "rank = os.environ.get('GMETA_RANK') or os.environ['HOROVOD_RANK']\n"
        "main(['train', '--run', 'run', '--config', rank + '.toml'])\n"
    )
    code = (
        "from gmeta.core.launcher.local_ranks import launch; import sys; "
        f"launch([sys.executable, {str(start)!r}], 2)"
    )
    said = warm.run([sys.executable, "-c", code], cwd=tmp_path)
    assert "ranks disagree on embedding_dim: 9 on rank 1, 8 on rank 0" in said.stderr


def test_another_number_of_ranks_than_the_launcher_started_is_refused(tmp_path: Path) -> None:
    said = train("--np", "2", "--run", tmp_path, HOROVOD_SIZE="3", HOROVOD_RANK="0")
    assert said.returncode == 2
    assert "--np 2, but the launcher started 3 ranks; leave --np out" in said.stderr


KILLED_ONCE = """
import os, signal, sys
from pathlib import Path
import gmeta
import tensorflow as tf
from gmeta.experiment.runs.trainer import EpochCheckpoints

def on_train_batch_end(self, batch, logs=None):
    usual(self, batch, logs)
    rank = os.environ.get("GMETA_RANK") or os.environ["HOROVOD_RANK"]
    slots, at = Path("slots"), (self._epochs, batch, rank)
    if at == (2, 2, "1") and slots.read_text() == "localhost:2":
        slots.write_text("localhost:1")
        os.kill(os.getpid(), signal.SIGKILL)

usual = EpochCheckpoints.on_train_batch_end
EpochCheckpoints.on_train_batch_end = on_train_batch_end
from gmeta.cli import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data, settings for one rank and for two, and a run of one rank over the ranges of two."""
    folder = tmp_path_factory.mktemp("runs")
    small_data(folder)
    for ranks in (1, 2):
        for epochs in (2, 4):
            (folder / f"{ranks}-{epochs}.toml").write_text(small_toml(tasks=8 // ranks, epochs=epochs))
    # What the others are compared with: one rank, never interrupted.
    alone = train(*words(folder, "alone", "2-4"), **{SHARES: "2"})
    assert alone.returncode == 0, alone.stderr
    return folder


def words(runs: Path, name: str, config: str) -> list[str | Path]:
    return ["--run", runs / name, "--data", runs / "data", "--config", runs / f"{config}.toml"]


def curves(runs: Path, name: str) -> dict[str, list[float]]:
    history = json.loads((runs / name / "maml/seed-0/history.json").read_text())
    return {key: [epoch[key] for epoch in history] for key in history[0]}


def assert_same_curves(runs: Path, a: str, b: str) -> None:
    mine, other = curves(runs, a), curves(runs, b)
    assert mine.keys() == other.keys() == {"loss", "mae", "val_loss", "val_mae"}
    for key, values in mine.items():
        np.testing.assert_allclose(values, other[key], rtol=1e-4, err_msg=key)


# Quick: test_ranks_with_other_settings_are_named for the command, test_same_as_one_rank.py for its
# numbers, and test_elastic.py for a killed rank.
@pytest.mark.slow
def test_a_run_of_two_ranks_is_one_ranks_and_goes_on_without_a_killed_one(runs: Path) -> None:
    # Rank 1 is killed in the middle of the third epoch, and its place is gone: the other takes its tasks too.
    (runs / "start.py").write_text(KILLED_ONCE)
    (runs / "slots").write_text("localhost:2")
    job = gmeta_command(
        *("launch", "--np", 2, "--elastic", "--host-discovery-script", f"cat {runs}/slots", "--"),
        *(
            sys.executable,
            "start.py",
            "train",
            "--np",
            2,
            "--checkpoint-every",
            2,
            *words(runs, "both", "2-4"),
        ),
        folder=runs,
    )
    assert job.returncode == 0, job.stderr
    (told,) = [line for line in job.stderr.splitlines() if line.startswith("gmeta: ")]
    assert told.startswith("gmeta: rank 1 of 2 was killed by SIGKILL")
    assert told.endswith("; the job goes on with 1 of 2 from the last checkpoint")
    assert "[0] MAML, seed 0: resumed after step 2 of epoch 3\n" in job.stderr
    assert job.stdout.count("trained: ") == 1
    assert_same_curves(runs, "both", "alone")
    config = load_toml(ExperimentConfig, runs / "1-4.toml")
    folders = [runs / name / "maml/seed-0" for name in ("both", "alone")]
    models = [restore(config, "maml", 0, folder=folder)[0] for folder in folders]
    for mine, other in zip(*map(state, models), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())
    last = [max(path.name for path in folder.glob("step-*")) for folder in folders]
    assert last[0] == last[1]

    tables = []
    for size in (1, 2):  # the last of three batches is one rank's alone
        said = gmeta_command("evaluate", "--np", size, "--run", runs / "both", "--json", runs / "table.json")
        assert said.returncode == 0, said.stderr
        assert said.stdout.count("item mean") == 1
        table = json.loads((runs / "table.json").read_text())
        tables.append((table["methods"], table["support_curve"]))
    assert_close(*tables)


def state(model: MetaModel) -> list[Any]:
    """Everything that training changes, tables in the order of their keys."""
    records = sorted_records(model.collection.tables[0])
    return [*records.values(), *model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]


def assert_close(a: Any, b: Any) -> None:
    """The same structure, and the same numbers but for rounding."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        a, b = list(a.values()), list(b.values())
    if isinstance(a, (list, tuple)):
        for mine, other in zip(a, b, strict=True):
            assert_close(mine, other)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-6)
    else:
        assert a == b


@pytest.mark.slow
def test_one_rank_goes_on_with_a_run_of_two(runs: Path) -> None:
    for name, words_of_two, environment in (("fewer", ["--np", "2"], {}), ("expected", [], {SHARES: "2"})):
        trained = train(*words_of_two, *words(runs, name, "2-2"), **environment)
        assert trained.returncode == 0, trained.stderr
        file = runs / name / "config.json"
        settings = json.loads(file.read_text())
        settings["experiment"]["methods"]["maml"]["epochs"] = 4
        settings["experiment"]["tasks_per_batch"] = 8
        file.write_text(json.dumps(settings))
        went_on = train(*words(runs, name, "1-4"))
        assert went_on.returncode == 0, went_on.stderr
        assert "resumed after epoch 2, which had 2 ranks; on 1 a step has 1/2 times as many" in went_on.stderr
    assert_same_curves(runs, "fewer", "expected")


NEXT_ITEM = """
for = "next-item"
ks = [3]
[methods.sasrec]
label = "SASRec"
dim = 8
epochs = 2
dropout = 0.0
users_per_batch = 25
"""


@pytest.mark.shown_by(
    "distributed/test_next_item_on_ranks.py::test_two_ranks_train_and_measure_the_model_of_one"
)
def test_two_ranks_train_for_the_next_item_what_one_does(tmp_path: Path) -> None:
    # Steps of 25 users, the last of 10: the ranks have 13 and 12 of them.
    write_events(tmp_path / "events.parquet")
    data = tmp_path / "data"
    prepare(tmp_path / "events.parquet", data, spec=TableSpec(task="user", time="ts"))
    (tmp_path / "small.toml").write_text(NEXT_ITEM)
    words = ("--run", tmp_path / "run", "--data", data, "--config", tmp_path / "small.toml")
    said = train("--np", "2", *words)
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("trained: ") == 1
    assert said.stderr.count("The next item for user") == 1
    run = RunFolder(tmp_path / "run")
    trained = load_catalogue(run)  # the process that has started the ranks has fitted the blend
    assert "blend" in trained.validation
    # One process goes on where two ranks ended, as one that has trained from the start.
    method = replace(trained.config.methods["sasrec"], epochs=4)
    config = replace(trained.config, methods={"sasrec": method})
    folders = (run.training("sasrec", 0), tmp_path / "alone")
    before = [models.train(config, "sasrec", 0, cuts=trained.cuts, folder=folder) for folder in folders]
    assert before == [2, 0]
    for name in ("loss", "val_ndcg@3"):
        mine, alone = (read_logged(folder, name) for folder in folders)
        assert len(mine) == 4
        np.testing.assert_allclose(mine, alone, rtol=1e-3)

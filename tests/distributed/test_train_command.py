"""`gmeta train --np`: the command starts itself as ranks, which must agree on the settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gmeta.core.errors import RanksError
from gmeta.testing.ranks import run_ranks
from gmeta.testing.small_experiment import small_data

pytestmark = pytest.mark.ranks


def train(*args: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return gmeta_command("train", *args, **environment)


def gmeta_command(*args: str | Path | int, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gmeta", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


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
        "main(['train', '--run', 'run', '--config', os.environ['HOROVOD_RANK'] + '.toml'])\n"
    )
    code = (
        "from gmeta.core.collectives.launch import launch; import sys; "
        f"launch([sys.executable, {str(start)!r}], 2)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert "ranks disagree on embedding_dim: 9 on rank 1, 8 on rank 0" in said.stderr


def test_another_number_of_ranks_than_the_launcher_started_is_refused(tmp_path: Path) -> None:
    said = train("--np", "2", "--run", tmp_path, HOROVOD_SIZE="3", HOROVOD_RANK="0")
    assert said.returncode == 2
    assert "--np 2, but the launcher started 3 ranks; leave --np out" in said.stderr


TOML = """
seeds = [0]
tasks_per_batch = {tasks}
query = 4
embedding_dim = 4
hidden = [8]
support_sizes = [1, 4]
support_steps = 1
[methods.maml]
label = "MAML"
description = "Adapts."
inner = {{ steps = 1 }}
learning_rate = 1e-2
epochs = {epochs}
"""

ENDS_IN_EPOCH_3 = """
import os, signal, sys
import gmeta
import tensorflow as tf
from gmeta.training.checkpointing import EpochCheckpoints

def on_train_batch_end(self, batch, logs=None):
    usual(self, batch, logs)
    if self._epochs == 2 and batch == 1 and os.environ["HOROVOD_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

usual = EpochCheckpoints.on_train_batch_end
EpochCheckpoints.on_train_batch_end = on_train_batch_end
from gmeta.cli import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data, settings for one rank and for two with the same steps, and a run of one rank."""
    folder = tmp_path_factory.mktemp("runs")
    small_data(folder)
    for ranks in (1, 2):
        for epochs in (2, 4):
            (folder / f"{ranks}-{epochs}.toml").write_text(TOML.format(tasks=8 // ranks, epochs=epochs))
    # What the others are compared with: one rank, never interrupted.
    alone = train(*words(folder, "alone", "1-4"))
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


def test_a_run_of_two_ranks_is_one_ranks_and_outlives_a_killed_rank(runs: Path) -> None:
    # Killed in the middle of the third epoch: the launcher's command is the test's, with the same arguments.
    start = runs / "start.py"
    start.write_text(ENDS_IN_EPOCH_3)
    with pytest.raises(RanksError, match=r"^the job was ended: rank 1 of 2 was killed by SIGKILL"):
        run_ranks(start, 2, "train", *words(runs, "both", "2-4"))
    assert len(curves(runs, "both")["loss"]) == 2

    went_on = train("--np", "2", *words(runs, "both", "2-4"))
    assert went_on.returncode == 0, went_on.stderr
    assert "[0] MAML, seed 0: resumed after epoch 2" in went_on.stderr
    assert "[1]" not in went_on.stdout + went_on.stderr
    assert went_on.stdout.count("trained: ") == 1
    assert_same_curves(runs, "both", "alone")
    steps = [path.name for path in sorted((runs / "both/maml/seed-0").glob("step-*"))]
    assert steps == [path.name for path in sorted((runs / "alone/maml/seed-0").glob("step-*"))]
    assert len(steps) == 2

    tables = []
    for size in (1, 2):  # the last of three batches is one rank's alone
        said = gmeta_command("evaluate", "--np", size, "--run", runs / "both", "--json", runs / "table.json")
        assert said.returncode == 0, said.stderr
        assert said.stdout.count("item mean") == 1
        table = json.loads((runs / "table.json").read_text())
        tables.append((table["methods"], table["support_curve"]))
    assert_close(*tables)


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


def test_one_rank_goes_on_with_a_run_of_two(runs: Path) -> None:
    trained = train("--np", "2", *words(runs, "fewer", "2-2"))
    assert trained.returncode == 0, trained.stderr
    file = runs / "fewer/config.json"
    settings = json.loads(file.read_text())
    settings["experiment"]["methods"]["maml"]["epochs"] = 4
    settings["experiment"]["tasks_per_batch"] = 8
    file.write_text(json.dumps(settings))
    went_on = train(*words(runs, "fewer", "1-4"))
    assert went_on.returncode == 0, went_on.stderr
    assert "resumed after epoch 2, which had 2 ranks; on 1 a step has 1/2 times as many" in went_on.stderr
    assert_same_curves(runs, "fewer", "alone")

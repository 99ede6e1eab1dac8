"""`gmeta train --np`: the command starts itself as ranks, which must agree on the settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks


def train(*args: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gmeta", "train", *map(str, args)],
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

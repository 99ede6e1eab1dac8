"""The requirements of an environment: the pinned TensorFlow's, or another one's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

PROGRAM = Path(__file__).resolve().parents[2] / "tools" / "dev" / "requirements.py"


def wanted(folder: Path, *words: str) -> list[Requirement]:
    file = folder / "requirements.txt"
    subprocess.run([sys.executable, PROGRAM, file, *words], check=True)
    return [Requirement(line.partition(" #")[0]) for line in file.read_text().splitlines()]


def test_another_tensorflow_takes_the_place_of_the_pinned_one(tmp_path: Path) -> None:
    pinned = wanted(tmp_path, "build", "dev")
    other = wanted(tmp_path, "build", "dev", "--tensorflow", "2.21.0")
    ours = {"tensorflow", "tf-keras", "numpy"}
    assert {line.name for line in pinned} >= ours
    assert [str(line) for line in other if line.name in ours] == ["tensorflow==2.21.0", "tf-keras==2.21.*"]
    assert [line for line in other if line.name not in ours] == [
        line for line in pinned if line.name not in ours
    ]

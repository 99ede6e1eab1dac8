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


def versions(lines: list[Requirement], operator: str) -> set[tuple[str, str, str]]:
    """The name, the version and the marker of each requirement that compares a version so."""
    every = [(line, each) for line in lines for each in line.specifier]
    return {(line.name, each.version, str(line.marker)) for line, each in every if each.operator == operator}


def test_another_tensorflow_takes_the_place_of_the_pinned_one(tmp_path: Path) -> None:
    pinned = wanted(tmp_path, "build", "dev")
    other = wanted(tmp_path, "build", "dev", "--tensorflow", "2.21.0")
    ours = {"tensorflow", "tf-keras", "numpy"}
    assert {line.name for line in pinned} >= ours
    assert [str(line) for line in other if line.name in ours] == ["tensorflow==2.21.0", "tf-keras==2.21.*"]
    assert [line for line in other if line.name not in ours] == [
        line for line in pinned if line.name not in ours
    ]


def test_the_lowest_version_of_each_package_is_the_bound_that_the_project_gives(tmp_path: Path) -> None:
    groups = ("build", "dev", "stores", "wheels", "spark")
    given = wanted(tmp_path, *groups)
    lowest = wanted(tmp_path, *groups, "--tensorflow", "lowest")
    bounds, exact = versions(given, ">="), versions(lowest, "==")
    assert ("tensorflow", "2.16.2", "None") in bounds
    assert bounds | {("wrapt", "1.16.0", "None")} <= exact
    assert [line.name for line in lowest if ">" in str(line.specifier)] == []
    assert len(lowest) == len(given) + 1

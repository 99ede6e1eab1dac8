"""Writes pyproject.toml's requirements to a file: `requirements.py FILE [build] [EXTRA...]`.

`build` stands for [build-system].requires, `reference` for the dependency group with the TensorFlow that
`make setup` installs, another word for the extra of that name; the run-time dependencies are always included.
pip can't list a project's dependencies without building the project, and ours can only be built where they
are installed.

`--tensorflow VERSION` replaces the range by that TensorFlow and its tf-keras, and leaves NumPy to this
TensorFlow's requirements. `--tensorflow lowest` requires the lowest version of everything.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
LOWEST = "lowest"
# Requirements of TensorFlow alone whose old versions behave differently: pip keeps installed versions.
OLD_BESIDE = ("wrapt==1.16.0",)  # the first with wheels for Python 3.12; TensorFlow itself accepts 1.11


def groups() -> dict[str, list[str]]:
    """Group -> its requirements, in the file's order: "" (run time), "build", the extras, "reference"."""
    value = tomllib.loads(PYPROJECT.read_text())
    project = value["project"]
    extras = project["optional-dependencies"]
    extras["all"] = [line for own in re.findall(r"\w+", extras["all"][0])[1:] for line in extras[own]]
    return {
        "": project["dependencies"],
        "build": value["build-system"]["requires"],
        **extras,
        **value["dependency-groups"],
    }


def with_tensorflow(lines: list[str], version: str) -> list[str]:
    """Return the requirements with another TensorFlow instead of the range."""
    minor = version.rpartition(".")[0]
    given = (f"tensorflow=={version}", f"tf-keras=={minor}.*")
    pinned = re.compile(r"(tensorflow|tf-keras|numpy)\b(?!-)")
    return [*given, *(line for line in lines if not pinned.match(line))]


def at_lowest(lines: list[str]) -> list[str]:
    """Return the requirements pinned to the lower bound of each."""
    return [*(re.sub(r">=\s*([\w.]+)[^;]*", r"==\1", line) for line in lines), *OLD_BESIDE]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("groups", nargs="*")
    parser.add_argument("--tensorflow")
    asked = parser.parse_intermixed_args()
    every = groups()
    lines = [line for name in ("", *asked.groups) for line in every[name]]
    if asked.tensorflow == LOWEST:
        lines = at_lowest(lines)
    elif asked.tensorflow:
        lines = with_tensorflow(lines, asked.tensorflow)
    asked.file.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

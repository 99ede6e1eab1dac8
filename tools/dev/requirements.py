"""Writes what pyproject.toml asks for as a requirements file: `requirements.py FILE [build] [EXTRA...]`.

`build` stands for [build-system].requires, another word for the extra of that name; the run-time dependencies
come always. pip can't be asked for a project's dependencies without building the project, and ours can only
be built where they are installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def groups() -> dict[str, list[str]]:
    """Group -> its requirements, in the file's order: "" (run time), "build", and the extras."""
    value = tomllib.loads(PYPROJECT.read_text())
    project = value["project"]
    return {
        "": project["dependencies"],
        "build": value["build-system"]["requires"],
        **project["optional-dependencies"],
    }


if __name__ == "__main__":
    output, *names = sys.argv[1:]
    every = groups()
    Path(output).write_text("\n".join(line for name in ("", *names) for line in every[name]) + "\n")

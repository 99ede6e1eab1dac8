"""Resolves constraints.txt anew: the versions that pip chooses for pyproject.toml on each supported Python.

    make pins
    python tools/dev/pin.py --python python3.10 --python python3.11 --python python3.12

Nothing is installed. A package that dropped an old Python has a line for each version, with its marker.
Review the difference like code: a pin states that the tests ran with it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from requirements import groups

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED = ("3.10", "3.11", "3.12")
HEADER = """\
# Every package that gmeta was tested with, direct and transitive. Written by `make pins`; pip takes it with
# `-c constraints.txt`. What is asked for, and why, is in pyproject.toml.
"""
Pins = dict[str, str]


def resolve(python: str) -> Pins:
    """Package -> version, as pip resolves everything that pyproject.toml names under this interpreter."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write("\n".join(line for lines in groups().values() for line in lines))
        wanted.flush()
        # This environment's pip resolves for the other interpreter, whose own may be years older.
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
        command = [
            *pip,
            "install",
            "-qq",
            "--dry-run",
            "--ignore-installed",
            "--report",
            "-",
            "-r",
            wanted.name,
        ]
        report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return {
        re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower(): item["metadata"]["version"]
        for item in report["install"]
    }


def marker(pythons: list[str]) -> str:
    """The environment marker that is true on exactly these of the supported Pythons."""
    if pythons == list(SUPPORTED[: len(pythons)]):
        return f'python_version <= "{pythons[-1]}"'
    if pythons == list(SUPPORTED[-len(pythons) :]):
        return f'python_version >= "{pythons[0]}"'
    return " or ".join(f'python_version == "{python}"' for python in pythons)


def merge(resolved: dict[str, Pins]) -> list[str]:
    """One line per package if all Pythons that need it agree, else one per version."""
    lines = []
    for name in sorted({name for pins in resolved.values() for name in pins}):
        versions: dict[str, list[str]] = {}
        for python, pins in resolved.items():
            if name in pins:
                versions.setdefault(pins[name], []).append(python)
        if len(versions) == 1:
            lines.append(f"{name}=={next(iter(versions))}")
        else:
            lines += [f"{name}=={version} ; {marker(pythons)}" for version, pythons in versions.items()]
    return lines


def main() -> None:
    """Resolve for every named interpreter, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", help="an interpreter; repeat it for each version")
    named = parser.parse_args().python or [f"python{version}" for version in SUPPORTED]
    resolved = {}
    for python in named:
        ask = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        version = subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        print(f"resolving for Python {version}", flush=True)
        resolved[version] = resolve(python)
    missing = [version for version in SUPPORTED if version not in resolved]
    if missing:
        sys.exit(f"no interpreter for Python {', '.join(missing)}: the pins must hold on all of them")
    lines = merge({version: resolved[version] for version in SUPPORTED})
    (ROOT / "constraints.txt").write_text(HEADER + "\n".join(lines) + "\n")
    print(f"constraints.txt: {len(lines)} pins")


if __name__ == "__main__":
    main()

"""Set-up's words where a machine lacks something: one line that says what, and how to get it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REAL_PYTHON = str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")
TENSORFLOW = "2.21.0" if sys.version_info >= (3, 13) else ""
"""What set-up is asked for under it: the pinned TensorFlow has no wheels for Python 3.13."""


class Machine:
    """A checkout with set-up's scripts, and a PATH with nothing but what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.bin = folder / "checkout", folder / "bin"
        self.path = str(self.bin)
        self.bin.mkdir()
        # What Python compiles may come and go meanwhile, in another worker.
        compiled = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "tools" / "dev", self.checkout / "tools" / "dev", ignore=compiled)
        for name in ("constraints.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, self.checkout)
        for tool in ("sh", "dirname"):
            self.link(tool, shutil.which(tool) or "")

    def link(self, name: str, target: str) -> None:
        (self.bin / name).symlink_to(target)

    def script(self, name: str, body: str) -> None:
        path = self.bin / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def python(self, name: str, version: str) -> None:
        """A program that says it is this Python, and then what it was asked to run."""
        self.script(name, f'if [ "$1" = -c ]; then echo {version}; else echo "${{0##*/}} runs $1"; fi')

    def set_up(self, python: str = "", tensorflow: str = "") -> subprocess.CompletedProcess[str]:
        named = {"PYTHON": python, "TENSORFLOW": tensorflow}
        environment = {"PATH": self.path, "HOME": str(self.checkout), **named}
        command = ["sh", "tools/dev/setup.sh"]
        return subprocess.run(
            command, cwd=self.checkout, env=environment, capture_output=True, text=True, check=False
        )

    def refusal(self, python: str = "", tensorflow: str = "") -> str:
        """The one line with which set-up refuses."""
        done = self.set_up(python, tensorflow)
        assert done.returncode == 1, done.stdout + done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("setup: error: ")
        return line.removeprefix("setup: error: ")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_named_python_that_is_not_there(machine: Machine) -> None:
    line = machine.refusal("python9")
    assert line.startswith(
        "PYTHON=python9 does not run, but gmeta needs Python 3.10, 3.11 or 3.12; install one"
    )


def test_a_named_python_of_another_version(machine: Machine) -> None:
    machine.python("python3.9", "3.9")
    assert machine.refusal("python3.9").startswith("PYTHON=python3.9 is Python 3.9, but gmeta needs")


def test_no_python_at_all(machine: Machine) -> None:
    assert "no Python 3.10, 3.11 or 3.12 that runs is on PATH" in machine.refusal()


def test_a_shim_that_fails_is_passed_over(machine: Machine) -> None:
    machine.script("python3.11", "echo 'pyenv: python3.11: command not found' >&2; exit 127")
    machine.python("python3.12", "3.12")
    assert machine.set_up().stdout == "python3.12 runs tools/dev/setup_env.py\n"


def test_what_lies_behind_a_shim_that_fails_is_found(machine: Machine) -> None:
    machine.script("python3.11", "exit 127")
    machine.python("../later/python3.11", "3.11")
    machine.path += f":{machine.checkout.parent}/later"
    assert machine.set_up().stdout == "python3.11 runs tools/dev/setup_env.py\n"


def test_python_3_11_is_preferred(machine: Machine) -> None:
    for minor in (10, 11, 12):
        machine.python(f"python3.{minor}", f"3.{minor}")
    machine.python("python3", "3.12")
    assert machine.set_up().stdout == "python3.11 runs tools/dev/setup_env.py\n"


def test_a_newer_python3_is_not_taken(machine: Machine) -> None:
    machine.python("python3", "3.13")
    assert "that runs is on PATH" in machine.refusal()


def test_the_environments_python_stays(machine: Machine) -> None:
    machine.python("python3.11", "3.11")
    (machine.checkout / ".venv" / ".setup").mkdir(parents=True)
    (machine.checkout / ".venv" / ".setup" / "venv").write_text("3.12.1")
    machine.python("../checkout/.venv/bin/python", "3.12")
    assert machine.set_up().stdout == "python runs tools/dev/setup_env.py\n"


def test_another_tensorflow_has_a_set_up_of_its_own(machine: Machine) -> None:
    machine.python("python3", "3.13")
    assert machine.set_up(tensorflow="2.21.0").stdout == "python3 runs tools/dev/setup_tensorflow.py\n"


def test_the_python_of_another_tensorflow_stays(machine: Machine) -> None:
    machine.python("python3.11", "3.11")
    environment = machine.checkout / "build" / "tensorflow" / "2.21.0" / "venv"
    (environment / ".setup").mkdir(parents=True)
    (environment / ".setup" / "venv").write_text("3.13.0")
    machine.python("../checkout/build/tensorflow/2.21.0/venv/bin/python", "3.13")
    assert machine.set_up(tensorflow="2.21.0").stdout == "python runs tools/dev/setup_tensorflow.py\n"
    assert machine.set_up().stdout == "python3.11 runs tools/dev/setup_env.py\n"


def test_a_tensorflow_that_is_no_version(machine: Machine) -> None:
    line = machine.refusal(REAL_PYTHON, tensorflow="newest")
    assert line == "TENSORFLOW=newest is neither a version such as 2.21.0 nor lowest"


def test_no_compiler(machine: Machine) -> None:
    line = machine.refusal(REAL_PYTHON, TENSORFLOW)
    assert (
        line == "no C++ compiler: g++ is not on PATH; apt-get install g++ (9 or newer), or name one with CXX="
    )


def test_an_old_compiler(machine: Machine) -> None:
    machine.script("make", "true")
    machine.script("g++", "echo 8.3.0")
    line = machine.refusal(REAL_PYTHON, TENSORFLOW)
    assert line.startswith(
        f"{machine.bin}/g++ is version 8.3.0, but gmeta needs 9 or newer; apt-get install g++"
    )


def test_a_compiler_that_does_not_work(machine: Machine) -> None:
    machine.script("make", "true")
    machine.script("g++", "exit 1")
    assert "g++ does not say its version, so it doesn't work" in machine.refusal(REAL_PYTHON, TENSORFLOW)


def test_no_make(machine: Machine) -> None:
    machine.script("g++", "echo 12.2.0")
    assert machine.refusal(REAL_PYTHON, TENSORFLOW) == "no make on PATH; apt-get install make"


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write anywhere")
def test_a_checkout_that_cannot_be_written(machine: Machine) -> None:
    machine.checkout.chmod(0o555)
    assert "can't be written" in machine.refusal(REAL_PYTHON, TENSORFLOW)

"""A virtual environment that set-up makes: its Python, its pip, and whether it is complete."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import machine
from steps import Log, Step, Steps


class Environment:
    """The environment in a folder, which needn't exist yet.

    Attributes:
      folder: Its folder; its steps' stamps are in `.setup` there.
      bin: The folder of its programs.
      python: Its Python.
      pip: The words that begin a call of its pip.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.stamps = folder, folder / ".setup"
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        self.pip = (self.python, "-m", "pip", "--disable-pip-version-check", "--no-input")

    def make(self, steps: Steps, name: str) -> None:
        """Make it with the running Python, unless it exists with a Python of the same version.

        setup.sh runs set-up under the environment's own Python if that is complete and no other was named.
        """
        if Path(sys.prefix).resolve() == self.folder:
            return
        wanted, there = platform.python_version(), self._version()
        if there != wanted:
            machine.check_python()
            steps.forget("venv")
        title = f"{name} with Python {wanted}"
        steps.do(Step("venv", title, wanted, lambda log: self._create(log, there == wanted)))

    def _version(self) -> str | None:
        """Return the version of its Python, if that runs and has pip, which an unfinished one lacks."""
        ask = [str(self.python), "-c", "import pip, platform; print(platform.python_version())"]
        try:
            return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    def _create(self, log: Log, keep: bool) -> None:
        """Make it, unless one that was made by hand can be kept."""
        if not keep:
            log.run(sys.executable, "-m", "venv", "--clear", self.folder)

    def install(self, log: Log, *words: str | Path) -> None:
        """Run its `pip install`, without compiling modules, most of which are never imported."""
        log.run(*self.pip, "install", "--no-compile", "--progress-bar", "off", *words)

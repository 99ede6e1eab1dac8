"""Makes an environment with packages other than the pinned ones: `setup_tensorflow.py VERSION`.

    build/tensorflow/VERSION/venv         that TensorFlow, its tf-keras and NumPy, and gmeta itself, editable
    build/tensorflow/VERSION/libraries    the native libraries, compiled against it
    build/tensorflow/VERSION/setup        the output of each step's commands

The environment's Python finds its libraries by the variable GMETA_LIBRARIES, which a file of the environment
sets when Python starts. So the checkout's own libraries remain those for the pins, and this Python loads the
right ones from any folder and with any environment variables.

Packages are the newest that pyproject.toml and that TensorFlow allow, as in a new installation. With `lowest`
as the version they are the oldest that pyproject.toml allows, including TensorFlow, which pip keeps in an old
environment. Horovod isn't installed. With `--packages` neither is gmeta, which `make wheel` compiles
differently. Like setup_env.py, it uses only the standard library.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

import machine
from environment import Environment
from steps import Log, Step, Steps, digest, set_up

ROOT = Path(__file__).resolve().parents[2]
LOWEST = "lowest"  # of requirements.py
PYPROJECT, REQUIREMENTS = ROOT / "pyproject.toml", ROOT / "tools/dev/requirements.py"
NATIVE_SOURCES = tuple(ROOT / name for name in ("setup.py", "CMakeLists.txt", "cmake", "ops", "io"))
NATIVE_LIBRARIES = ("_gmeta_ops.so", "_gmeta_io.so", "_gmeta_records.so")
# Python runs this line of a .pth file when it starts.
STARTUP = 'import os; os.environ.setdefault("GMETA_LIBRARIES", {!r})\n'


class OtherTensorFlow:
    """The environment of one version of TensorFlow."""

    def __init__(self, version: str, packages_only: bool = False) -> None:
        self.version, self.packages_only = version, packages_only
        self.title = "the lowest versions" if version == LOWEST else f"TensorFlow {version}"
        self.folder = ROOT / "build" / "tensorflow" / version
        self.libraries = self.folder / "libraries"
        self.venv = Environment(self.folder / "venv")

    def steps(self) -> Steps:
        """Return the steps that make the environment."""
        return Steps(self.venv.stamps, self.folder / "setup")

    def make(self, steps: Steps) -> None:
        """Run every step that is due; each depends on the earlier ones."""
        compiler, cuda = machine.check_tools(), machine.check_cuda(ROOT)
        packages = digest([self.version, PYPROJECT, REQUIREMENTS])
        gmeta = digest([self.version, compiler, cuda, PYPROJECT, *NATIVE_SOURCES])
        self.venv.make(steps, f"an environment for {self.title}")
        title = f"{self.title}{' of' if self.version == LOWEST else ' and'} what else gmeta needs"
        wanted = Step("packages", title, packages, self.install_packages)
        if steps.due(wanted):
            machine.check_disk(ROOT)
        steps.do(wanted)
        if self.packages_only:
            return
        steps.do(Step("libraries", "where its libraries are", str(self.libraries), self.name_libraries))
        if not all((self.libraries / name).exists() for name in NATIVE_LIBRARIES):
            steps.forget("gmeta")
        # setup.py compiles them and installs the checkout at once.
        steps.do(Step("gmeta", f"gmeta, compiled against {self.title}", gmeta, self.install_gmeta))

    def install_packages(self, log: Log) -> None:
        """Install the requirements of pyproject.toml, with this TensorFlow instead of the range."""
        if sys.version_info < (3, 11):
            self.venv.install(log, "tomli")  # reads pyproject.toml
        wanted = self.folder / "requirements.txt"
        groups = ("build", "all", "dev", "stores", "wheels", *(["spark"] if self.version == LOWEST else []))
        log.run(self.venv.python, REQUIREMENTS, wanted, "--tensorflow", self.version, *groups)
        self.venv.install(log, "-r", wanted)

    def name_libraries(self, _: Log) -> None:
        """Make the environment's Python find its libraries."""
        (packages,) = self.venv.folder.glob("lib/python*/site-packages")
        (packages / "gmeta_libraries.pth").write_text(STARTUP.format(str(self.libraries)))

    def install_gmeta(self, log: Log) -> None:
        """Install the checkout itself, which compiles its libraries."""
        options = ("--no-deps", "--no-build-isolation")
        self.venv.install(log, *options, "-e", ROOT)


def main() -> int:
    """Make it, and return the exit status."""
    os.chdir(ROOT)
    version = sys.argv[1]
    if not re.fullmatch(rf"\d+\.\d+\.\d+|{LOWEST}", version):
        error = f"TENSORFLOW={version} is neither a version such as 2.21.0 nor {LOWEST}"
        print(f"setup: error: {error}", file=sys.stderr)
        return 1
    other = OtherTensorFlow(version, "--packages" in sys.argv)
    place, python = other.venv.folder.relative_to(ROOT), platform.python_version()
    ready = f"{place} has {other.title} and Python {python}"
    return set_up(other.folder / "setup.lock", other.steps, other.make, ready)


if __name__ == "__main__":
    sys.exit(main())

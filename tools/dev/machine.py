"""What a machine must have before anything is installed; an error of one line names what is missing.

The gigabytes are measured in a set-up without caches, and rounded up.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from steps import SetupError

OLDEST_COMPILER = 9  # the first g++ whose C++17 library is complete
GIGABYTES_CHECKOUT = 4  # .venv and build/
GIGABYTES_TEMPORARY = 2  # pip's downloads and Horovod's objects, while set-up runs


def check_python() -> None:
    """Check that this Python can make virtual environments, which Debian packages separately."""
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(
            f"{sys.executable} has no module {missing[-1]}: apt-get install python3-venv "
            "(for a Python of another version: python3.X-venv), or name another Python with PYTHON="
        )


def check_tools() -> str:
    """Check for make and a recent C++ compiler, and return the compiler's version."""
    compiler = os.environ.get("CXX", "g++")
    path = shutil.which(compiler)
    if path is None:
        raise SetupError(
            f"no C++ compiler: {compiler} is not on PATH; apt-get install g++ ({OLDEST_COMPILER} or newer), "
            "or name one with CXX="
        )
    if shutil.which("make") is None:
        raise SetupError("no make on PATH; apt-get install make")
    version = subprocess.run(
        [path, "-dumpfullversion", "-dumpversion"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    ).stdout.strip()
    found = re.match(r"\d+", version)
    if found is None:
        raise SetupError(
            f"{path} does not say its version, so it doesn't work; apt-get install --reinstall g++"
        )
    if int(found.group()) < OLDEST_COMPILER:
        raise SetupError(
            f"{path} is version {version}, but gmeta needs {OLDEST_COMPILER} or newer; "
            "apt-get install g++, or name another with CXX="
        )
    return version


def check_cuda(checkout: Path) -> str:
    """Check GMETA_CUDA, and return its effect on this machine, and the nvcc to run."""
    try:
        choice = runpy.run_path(str(checkout / "cmake" / "cuda_choice.py"))["cuda_choice"]()
    except ValueError as error:
        raise SetupError(str(error)) from None
    nvcc = None if choice == "OFF" else shutil.which(os.environ.get("CUDACXX", "nvcc"))
    if nvcc is None:
        return choice
    done = subprocess.run(
        [nvcc, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return f"{choice} {done.stdout}"


def check_disk(checkout: Path) -> None:
    """Check that the checkout's disk and the temporary one have room for what set-up writes."""
    temporary = Path(tempfile.gettempdir())
    needs = {checkout: GIGABYTES_CHECKOUT, temporary: GIGABYTES_TEMPORARY}
    if checkout.stat().st_dev == temporary.stat().st_dev:
        needs = {checkout: GIGABYTES_CHECKOUT + GIGABYTES_TEMPORARY}
    for folder, need in needs.items():
        free = shutil.disk_usage(folder).free / 1e9
        if free < need:
            where = "" if folder == checkout else ", or point TMPDIR to another disk"
            raise SetupError(f"{free:.1f} GB free at {folder}, but set-up needs {need} GB: free some{where}")

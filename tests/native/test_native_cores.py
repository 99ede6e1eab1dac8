"""Builds and runs the native cores' own tests, `tests/native/*_test.cc`; `make test-asan` sanitizes them.

They run for a second and compile for a minute and a half at -O3, which is what `make test-native` and the ops
are compiled with, so here they are optimized less.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "test-native-quick"
NAMES = sorted(path.stem for path in Path(__file__).parent.glob("*_test.cc"))


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of the built tests; only what changed is compiled. A second process waits for the first."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert cmake is not None
    options = ("-DGMETA_BUILD_OPS=OFF", "-DGMETA_BUILD_TESTS=ON", "-DGMETA_CUDA=OFF", "-DGMETA_SANITIZE=")
    options += ("-DCMAKE_BUILD_TYPE=Quick", "-DCMAKE_CXX_FLAGS_QUICK=-O1")
    jobs = str(len(os.sched_getaffinity(0)))
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:  # released when the file is closed, however that comes
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (
            ("-S", ROOT, "-B", BUILD, *options),
            ("--build", BUILD, "--target", "native_tests", "--parallel", jobs),
        ):
            done = run(cmake, *command)
            assert done.returncode == 0, done.stdout[-8000:]
    return BUILD


@pytest.mark.shown_by(
    "ops/table/test_hash_table.py::test_any_sequence_of_operations_agrees_with_the_reference"
)
@pytest.mark.parametrize("name", NAMES)
def test_native_core(programs: Path, name: str) -> None:
    done = run(programs / name)
    assert done.returncode == 0, done.stdout[-8000:]

"""The fuzzer runs, finds a defect that was planted, and gives the command that shows it again."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "fuzz-quick"


def run(*words, code=0):
    done = subprocess.run(
        [str(word) for word in words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=1800,
        check=False,
    )
    assert done.returncode == code, done.stdout[-8000:]
    return done.stdout


@pytest.fixture(scope="module")
def fuzz():
    """The program, as `make fuzz` builds it, but for optimizing: here compiling is what takes the time."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        options = (
            "-DGMETA_BUILD_OPS=OFF",
            "-DGMETA_BUILD_FUZZ=ON",
            "-DGMETA_CUDA=OFF",
            "-DGMETA_FUZZ_OPTIMIZE=-O0",
        )
        run(cmake, "-S", ROOT, "-B", BUILD, *options)
        run(cmake, "--build", BUILD, "--target", "fuzz", "--parallel", len(os.sched_getaffinity(0)))
    return BUILD / "fuzz"


def test_a_short_run_passes_and_covers_every_target(fuzz, tmp_path):
    lines = run(fuzz, "--executions", "1500", "--seed", "1", "--out", tmp_path).splitlines()
    assert lines[-1].startswith("fuzz: passed: 1500 executions of 7 targets in ")
    kept = {line.split()[1]: int(line.split()[4]) for line in lines[:-1] if line.endswith("inputs kept")}
    layouts, stages = ("example", "columnar"), ("records", "ranges")
    of_data = [f"{layout}-{stage}" for layout in layouts for stage in stages]
    assert sorted(kept) == sorted([*of_data, "stripes", "columns", "history_index"])
    assert min(kept.values()) > 3  # what was kept came through code in a new way
    assert list(tmp_path.iterdir()) == []


def test_a_hidden_defect_is_found_and_shown_again(fuzz, tmp_path):
    words = (fuzz, "--target", "planted", "--executions", "200000", "--seed", "1", "--out", tmp_path)
    lines = run(*words, code=1).splitlines()
    assert any("AddressSanitizer: heap-buffer-overflow" in line for line in lines)
    (found,) = tmp_path.iterdir()
    command = lines[-1].split("once more: ")[1].split()
    assert command == [str(fuzz), "--replay", str(found)]
    assert "AddressSanitizer: heap-buffer-overflow" in run(*command, code=1)
    # The same seed makes the same inputs.
    again = tmp_path / "again"
    again.mkdir()
    run(*words[:-1], again, code=1)
    assert next(again.iterdir()).read_bytes() == found.read_bytes()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--target", "none"), "there is no target none; there are example-records columnar-records"),
        (("--minuets", "3"), "--minuets isn't known"),
        (("--minutes",), "--minutes needs a value"),
        (("--replay", "driver.cc"), "driver.cc isn't an input that was kept"),
    ],
)
def test_words_that_make_no_sense(fuzz, words, says):
    assert run(fuzz, *words, code=2).startswith(f"fuzz: {says}")

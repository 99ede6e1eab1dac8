"""Whether set-up compiles the CUDA kernels: by GMETA_CUDA, the machine's GPU, and what was built before."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHOICE = runpy.run_path(str(ROOT / "cmake" / "cuda_choice.py"))

# Writes what CMake would leave in the build folder, by its -DGMETA_CUDA.
CMAKE = """#!/bin/sh
case "$1" in
-S)
  case "$*" in *-DGMETA_CUDA=ON*) has=ON ;; *) has=OFF ;; esac
  echo "GMETA_HAVE_CUDA:INTERNAL=$has" > "$4/CMakeCache.txt" ;;
--build)
  for name in ops io records cuda; do echo $name > "$2/_gmeta_$name.so"; done ;;
esac
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def with_device(root: Path) -> None:
    (root / "dev").mkdir()
    (root / "dev" / "nvidia0").touch()


def with_driver(root: Path) -> None:
    (root / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)


def with_program(root: Path) -> None:
    program(root / "bin" / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\n")


def with_program_that_fails(root: Path) -> None:
    program(root / "bin" / "nvidia-smi", "#!/bin/sh\necho 'GPU access blocked'\nexit 9\n")


def with_the_driver_alone(root: Path) -> None:
    (root / "dev").mkdir()
    (root / "dev" / "nvidiactl").touch()
    program(root / "bin" / "nvidia-smi", "#!/bin/sh\necho 'No devices found'\n")


def with_nothing(root: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("machine", "found"),
    [
        (with_device, True),
        (with_driver, True),
        (with_program, True),
        (with_program_that_fails, False),
        (with_the_driver_alone, False),
        (with_nothing, False),
    ],
)
def test_cuda_is_compiled_where_a_gpu_is_found_or_as_asked(
    machine: Callable[[Path], None], found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")
    program(tmp_path / "bin" / "nvcc", "#!/bin/sh\n")  # which alone is no reason
    answers = {}
    for asked in (None, "", "AUTO", "on", "OFF"):
        if asked is None:
            monkeypatch.delenv("GMETA_CUDA", raising=False)
        else:
            monkeypatch.setenv("GMETA_CUDA", asked)
        answers[asked] = CHOICE["cuda_choice"](tmp_path)
    automatic = "AUTO" if found else "OFF"
    assert answers == {None: automatic, "": automatic, "AUTO": automatic, "on": "ON", "OFF": "OFF"}


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GMETA_CUDA", "yes")
    with pytest.raises(ValueError, match="GMETA_CUDA=yes is none of AUTO, ON, OFF"):
        CHOICE["cuda_choice"]()


def test_another_answer_or_another_nvcc_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools" / "dev")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    for name in ("CUDACXX", "GMETA_CUDA"):
        monkeypatch.delenv(name, raising=False)
    machine = __import__("machine")
    seen = []
    for asked, nvcc in (("OFF", "12.8"), ("OFF", "13.0"), ("ON", "12.8"), ("ON", "13.0"), ("ON", "13.0")):
        program(tmp_path / "bin" / "nvcc", f"#!/bin/sh\necho 'release {nvcc}'\n")
        monkeypatch.setenv("GMETA_CUDA", asked)
        seen.append(machine.check_cuda(ROOT))
    assert seen[0] == seen[1] == "OFF"
    assert seen[3] == seen[4]
    assert len(set(seen)) == 3
    monkeypatch.setenv("GMETA_CUDA", "1")
    with pytest.raises(machine.SetupError, match="GMETA_CUDA=1 is none of"):
        machine.check_cuda(ROOT)


def test_a_build_without_cuda_removes_the_library_of_an_earlier_one(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "cmake/cuda_choice.py", "gmeta/core/version.py"):
        copy = tmp_path / "checkout" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    program(tmp_path / "bin" / "cmake", CMAKE)
    python = tmp_path / "bin" / "python"  # setup.py looks for cmake beside it first
    python.symlink_to(sys.executable)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GMETA_")}
    packages = os.pathsep.join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    there = {}
    for asked in ("ON", "OFF", "ON"):
        subprocess.run(
            [python, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace"],
            cwd=tmp_path / "checkout",
            env={**kept, "GMETA_CUDA": asked, "PYTHONPATH": packages},
            check=True,
        )
        there[asked] = sorted(path.name for path in (tmp_path / "checkout" / "gmeta").rglob("*.so"))
    assert there["OFF"] == ["_gmeta_io.so", "_gmeta_ops.so", "_gmeta_records.so"]
    assert there["ON"] == ["_gmeta_cuda.so", *there["OFF"]]


def test_cmake_that_must_have_cuda_names_what_is_missing(tmp_path: Path) -> None:
    languages = "cmake_minimum_required(VERSION 3.18)\nproject(alone LANGUAGES NONE)\n"
    program(tmp_path / "CMakeLists.txt", f"{languages}include({ROOT}/cmake/cuda.cmake)\n")
    done = subprocess.run(
        [Path(sys.executable).parent / "cmake", "-S", tmp_path, "-B", tmp_path / "build", "-DGMETA_CUDA=ON"],
        env={**os.environ, "CUDACXX": str(tmp_path / "nvcc")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    words = " ".join(done.stderr.split())
    assert "put nvcc on PATH, set CUDACXX, or leave the CUDA kernels out with GMETA_CUDA=OFF" in words

"""Compiles the native libraries with CMake and puts them beside the Python that loads them.

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# CMake target -> where the package expects it.
LIBRARIES = {
    "gmeta_ops": "gmeta/ops",
    "gmeta_io": "gmeta/io",
    "gmeta_records": "gmeta/preprocess",
}
# An environment of another TensorFlow keeps its libraries apart (tools/dev/setup_tensorflow.py).
APART = os.environ.get("GMETA_LIBRARIES")
# Built only where CMake finds a CUDA compiler.
CUDA_LIBRARY = {"gmeta_cuda": "gmeta/ops"}


class CMakeBuild(build_ext):
    """Runs CMake once for all libraries; incremental in a checkout, clean in a wheel build."""

    def run(self) -> None:
        checkout = self.editable_mode or self.inplace
        if not checkout:
            build = Path(self.build_temp)
        else:
            build = Path(APART) / "cmake" if APART else ROOT / "build" / "cmake"
        build = build.resolve()
        build.mkdir(parents=True, exist_ok=True)
        cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if cmake is None:
            sys.exit("gmeta: cmake is missing; get it with: pip install 'cmake>=3.18,<4'")
        tensorflow = importlib.metadata.distribution("tensorflow")
        cuda = os.environ.get("GMETA_CUDA", "AUTO").upper()
        subprocess.run(
            [
                cmake,
                "-S",
                str(ROOT),
                "-B",
                str(build),
                f"-DGMETA_PYTHON={sys.executable}",
                f"-DGMETA_TF_INSTALLED={tensorflow.version} {tensorflow.locate_file('tensorflow')}",
                f"-DGMETA_CUDA={cuda}",
            ],
            check=True,
        )
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
        libraries = LIBRARIES | (CUDA_LIBRARY if has_cuda(build) else {})
        targets = [word for name in libraries for word in ("--target", name)]
        subprocess.run([cmake, "--build", str(build), "--parallel", jobs, *targets], check=True)
        if checkout and APART:
            self.built = [Path(APART) / f"_{name}.so" for name in libraries]
        else:
            destination = ROOT if checkout else Path(self.build_lib)
            self.built = [destination / folder / f"_{name}.so" for name, folder in libraries.items()]
        for name, target in zip(libraries, self.built, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            # A new inode: a process that has the old library mapped keeps its old one.
            target.unlink(missing_ok=True)
            shutil.copy2(build / f"_{name}.so", target)

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self.built]


def has_cuda(build: Path) -> bool:
    """Whether CMake has decided to build with CUDA."""
    return "GMETA_HAVE_CUDA:INTERNAL=ON" in (build / "CMakeCache.txt").read_text()


setup(
    # Named only so that setuptools runs build_ext and tags the wheel for its platform.
    ext_modules=[Extension("gmeta.ops._gmeta_ops", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)

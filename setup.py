"""Compiles the native libraries with CMake and puts them beside the Python that loads them.

They are compiled against the TensorFlow of the environment that gmeta is installed into, also where pip
builds in an isolated one; if it has none that gmeta runs on, against the one that pip would install. No other
TensorFlow loads them, so what is built asks for that very version. Everything else about the package is in
pyproject.toml.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

from setuptools import Distribution, Extension, setup
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
# Where the libraries of a wheel are built, for other machines (tools/dev/build_wheel.py).
WHEEL = os.environ.get("GMETA_WHEEL")
# Built only where cmake/cuda_choice.py says so and CMake finds a CUDA compiler.
CUDA_LIBRARY = {"gmeta_cuda": "gmeta/ops"}
SUPPORTED = runpy.run_path(str(ROOT / "gmeta/core/version.py"))
CUDA = runpy.run_path(str(ROOT / "cmake/cuda_choice.py"))


def find_tensorflow() -> tuple[str, str, str] | None:
    """The name, version and folder of the TensorFlow to compile against, or None if there is none yet.

    pip hides the environment's packages while it builds, but not where they are.
    """
    outside = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    for folders in (outside, None):
        found = SUPPORTED["find_tensorflow"](folders)
        if found is not None and SUPPORTED["describe_misfit"](found[1]) is None:
            return found
    return None


class WithItsTensorFlow(Distribution):
    """Asks for the TensorFlow that its libraries are compiled against, in place of the whole range.

    A source distribution isn't compiled yet, so it keeps the range.
    """

    def parse_config_files(self, *given: object, **named: object) -> None:
        super().parse_config_files(*given, **named)
        found = find_tensorflow()
        if found is None or "sdist" in self.script_args:
            return
        name, version, _ = found
        others = [line for line in self.install_requires if not re.match(r"(tensorflow|tf-keras)[<>=]", line)]
        minor = ".".join(version.split(".")[:2])
        self.install_requires = [f"{name}=={version}", f"tf-keras=={minor}.*", *others]
        self.metadata.install_requires = self.install_requires


class CMakeBuild(build_ext):
    """Runs CMake once for all libraries; incremental in a checkout, clean in a wheel build."""

    def run(self) -> None:
        checkout = self.editable_mode or self.inplace
        if WHEEL:
            build = Path(WHEEL)
        elif not checkout:
            build = Path(self.build_temp)
        else:
            build = Path(APART) / "cmake" if APART else ROOT / "build" / "cmake"
        build = build.resolve()
        build.mkdir(parents=True, exist_ok=True)
        cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if cmake is None:
            sys.exit("gmeta: cmake is missing; get it with: pip install 'cmake>=3.18,<4'")
        _, version, folder = find_tensorflow() or refuse_tensorflow()
        try:
            cuda = CUDA["cuda_choice"]()
        except ValueError as error:
            sys.exit(f"gmeta: {error}")
        run(
            cmake,
            "-S",
            str(ROOT),
            "-B",
            str(build),
            f"-DGMETA_PYTHON={sys.executable}",
            f"-DGMETA_TF_INSTALLED={version} {folder}",
            f"-DGMETA_TF_PACKAGES={folder}",
            f"-DGMETA_CUDA={cuda}",
            f"-DGMETA_MANYLINUX={'ON' if WHEEL else 'OFF'}",
        )
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
        possible = LIBRARIES | CUDA_LIBRARY
        libraries = possible if has_cuda(build) else LIBRARIES
        # All targets together: make would do named ones one after the other.
        run(cmake, "--build", str(build), "--parallel", jobs)
        places = {name: self.place(folder, checkout) / f"_{name}.so" for name, folder in possible.items()}
        self.built = [places[name] for name in libraries]
        for name in possible.keys() - libraries.keys():
            places[name].unlink(missing_ok=True)  # of an earlier build
        for name, target in zip(libraries, self.built, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            # A new inode: a process that has the old library mapped keeps its old one.
            target.unlink(missing_ok=True)
            shutil.copy2(build / f"_{name}.so", target)

    def place(self, folder: str, checkout: bool) -> Path:
        """The folder for a library that the package expects in `folder`."""
        if checkout and APART:
            return Path(APART)
        return (ROOT if checkout else Path(self.build_lib)) / folder

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self.built]


def run(*words: str) -> None:
    """Run CMake; if it fails, end with its status, without a traceback below what it said."""
    status = subprocess.run(words, check=False).returncode
    if status:
        sys.exit(status)


def refuse_tensorflow() -> NoReturn:
    """End with the line that says what to install."""
    found = SUPPORTED["find_tensorflow"]()
    install = " ".join(f"'{line}'" for line in SUPPORTED["WANTED"])
    lacks = f"there is no TensorFlow to compile against: pip install {install}"
    sys.exit(f"gmeta: {SUPPORTED['describe_misfit'](found[1]) if found else lacks}")


def has_cuda(build: Path) -> bool:
    """Whether CMake has decided to build with CUDA."""
    return "GMETA_HAVE_CUDA:INTERNAL=ON" in (build / "CMakeCache.txt").read_text()


setup(
    # Named only so that setuptools runs build_ext and tags the wheel for its platform.
    ext_modules=[Extension("gmeta.ops._gmeta_ops", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    distclass=WithItsTensorFlow,
    # What pip puts into the isolated environment: a TensorFlow only where the outer one has none.
    setup_requires=[] if find_tensorflow() else list(SUPPORTED["WANTED"]),
)

"""Makes .venv: the pins of constraints.txt, Horovod with Gloo, the native libraries, gmeta itself.

It uses only the standard library, because it runs under any Python that setup.sh found. Steps that are done
aren't repeated (steps.py).

GMETA_CUDA=ON|OFF sets whether CUDA sources are compiled; by default they are if there are a GPU and nvcc.
Horovod's own build variables, such as HOROVOD_GPU_OPERATIONS=NCCL, take effect.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path

import machine
from environment import Environment
from steps import Log, SetupError, Step, Steps, digest, set_up

ROOT = Path(__file__).resolve().parents[2]
BUILD, VENV = ROOT / "build", Environment(ROOT / ".venv")
CONSTRAINTS, PYPROJECT = ROOT / "constraints.txt", ROOT / "pyproject.toml"

NATIVE_SOURCES = tuple(ROOT / name for name in ("setup.py", "CMakeLists.txt", "cmake", "ops", "io"))
NATIVE_LIBRARIES = tuple(
    ROOT / "gmeta" / name for name in ("ops/_gmeta_ops.so", "io/_gmeta_io.so", "preprocess/_gmeta_records.so")
)
HOROVOD_FLAGS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
}
HOROVOD_CMAKE = ROOT / "tools" / "dev" / "horovod.cmake"
# The variables that Horovod's build reads; others, such as HOROVOD_CYCLE_TIME, tune a run.
HOROVOD_BUILD = ("HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_NCCL", "HOROVOD_CUDA", "HOROVOD_CPU_OPERATIONS")
HOROVOD_CHECK = "import horovod.tensorflow as hvd; hvd.init(); assert hvd.gloo_built() and hvd.size() == 1"


def pin(package: str) -> str:
    """The version that constraints.txt names for a package on every Python."""
    found = re.search(rf"^{package}==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    if found is None:
        raise SetupError(f"{CONSTRAINTS} has no single pin of {package}: `make pins` writes one")
    return found.group(1)


def make_environment(steps: Steps) -> None:
    """Run every step that is due; each depends on the earlier ones."""
    compiler, cuda = machine.check_tools(), machine.check_cuda(ROOT)
    tensorflow, horovod = pin("tensorflow"), pin("horovod")
    chosen = {name: value for name, value in os.environ.items() if name.startswith(HOROVOD_BUILD)}
    flags = HOROVOD_FLAGS | chosen
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}"
    options = (f"{name}={flags[name]}" for name in sorted(flags))
    wheel = digest([tag, tensorflow, horovod, compiler, HOROVOD_CMAKE.read_text(), *options])
    package = digest([PYPROJECT, ROOT / "setup.py"])
    packages = digest([CONSTRAINTS, PYPROJECT])
    native = digest([tensorflow, compiler, cuda, *NATIVE_SOURCES])

    VENV.make(steps, ".venv")
    installed = Step("packages", "the packages of constraints.txt", packages, install_packages)
    built = Step(
        "horovod",
        f"Horovod {horovod} for TensorFlow {tensorflow}",
        wheel,
        lambda log: install_horovod(log, horovod, flags, wheel),
    )
    if steps.due(installed) or steps.due(built):
        machine.check_disk(ROOT)
    steps.do(installed)
    if not all(library.exists() for library in NATIVE_LIBRARIES):
        steps.forget("native")
    # Both need only TensorFlow.
    steps.do(built, Step("native", "the native libraries", native, compile_native))
    steps.do(Step("gmeta", "gmeta, editable", package, install_gmeta))


def install(log: Log, *words: str | Path) -> None:
    """Run .venv's `pip install` with the pins."""
    VENV.install(log, "-c", CONSTRAINTS, *words)


def install_packages(log: Log) -> None:
    """Install the requirements of pyproject.toml, at the versions of constraints.txt."""
    if sys.version_info < (3, 11):
        install(log, "tomli")  # reads pyproject.toml
    wanted = BUILD / "requirements.txt"
    log.run(VENV.python, ROOT / "tools/dev/requirements.py", wanted, "build", "all", "dev", "stores")
    install(log, "-r", wanted)


def install_horovod(log: Log, version: str, flags: dict[str, str], key: str) -> None:
    """Install Horovod's wheel from the cache, or build it from its sdist and cache it.

    The cache is ours, since pip's doesn't know which TensorFlow, compiler and flags a wheel was built with.
    """
    cache = cache_folder() / key[:16]
    for wheel in cache.glob("*.whl"):
        try:
            install_horovod_wheel(log, version, wheel)
        except SetupError:
            wheel.unlink()  # incomplete, or from a machine that differs in what the key doesn't cover
        else:
            return
    with tempfile.TemporaryDirectory(prefix="gmeta-horovod-") as folder:
        jobs = len(os.sched_getaffinity(0))
        build = {
            **flags,
            "CMAKE_TOOLCHAIN_FILE": os.environ.get("CMAKE_TOOLCHAIN_FILE", str(HOROVOD_CMAKE)),
            "MAKEFLAGS": f"-j{jobs}",
            "PATH": f"{VENV.bin}{os.pathsep}{os.environ['PATH']}",
        }
        sdist = ("--no-cache-dir", "--no-binary", "horovod", "--no-deps", f"horovod=={version}")
        options = ("--no-build-isolation", "--use-pep517", "--progress-bar", "off", "-w", folder)
        log.run(*VENV.pip, "wheel", *options, *sdist, env=build)
        (wheel,) = Path(folder).glob("*.whl")
        install_horovod_wheel(log, version, wheel)
        cache.mkdir(parents=True, exist_ok=True)
        partial = cache / f"{wheel.name}.{os.getpid()}"
        shutil.copyfile(wheel, partial)
        partial.replace(cache / wheel.name)


def install_horovod_wheel(log: Log, version: str, wheel: Path) -> None:
    """Install it with its requirements, and check that it loads into TensorFlow."""
    install(log, "--force-reinstall", "--no-deps", wheel)
    install(log, f"horovod=={version}")
    log.run(VENV.python, "-c", HOROVOD_CHECK, env={"TF_USE_LEGACY_KERAS": "1"})


def cache_folder() -> Path:
    """The folder that keeps built wheels for other checkouts; in this one if home isn't writable."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "gmeta" / "wheels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return BUILD / "wheels"
    return folder


def compile_native(log: Log) -> None:
    """Compile the native libraries beside the Python that loads them."""
    log.run(VENV.python, "setup.py", "-q", "build_ext", "--inplace")


def install_gmeta(log: Log) -> None:
    """Install the checkout itself, so that `import gmeta` and `gmeta` work from anywhere."""
    log.run(*VENV.pip, "install", "--no-deps", "--no-build-isolation", "-e", ROOT)


def main() -> int:
    """Make it, and return the exit status."""
    os.chdir(ROOT)
    ready = f".venv has Python {platform.python_version()}"
    return set_up(BUILD / "setup.lock", lambda: Steps(VENV.stamps, BUILD / "setup"), make_environment, ready)


if __name__ == "__main__":
    sys.exit(main())

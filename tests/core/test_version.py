"""Which TensorFlows and Pythons gmeta runs on, and how the installed TensorFlow is found."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gmeta.core import version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def install(folder: Path, name: str, number: str) -> None:
    """What pip leaves of a distribution: its metadata."""
    metadata = folder / f"{name.replace('-', '_')}-{number}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")


def test_a_tensorflow_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    install(tmp_path, "tensorflow-io-gcs-filesystem", "0.37.1")
    assert version.find_tensorflow([str(tmp_path)]) is None
    install(tmp_path, "tensorflow-cpu", "2.18.1")
    assert version.find_tensorflow([str(tmp_path)]) == ("tensorflow-cpu", "2.18.1", str(tmp_path))
    install(tmp_path, "tensorflow", "2.19.0")
    assert version.find_tensorflow([str(tmp_path)]) == ("tensorflow", "2.19.0", str(tmp_path))


def test_the_tensorflow_in_use_is_found() -> None:
    import tensorflow as tf

    found = version.find_tensorflow()
    assert found is not None
    assert found[1:] == (tf.__version__, str(Path(tf.__file__).parents[1]))


@pytest.mark.parametrize(
    "number", ["2.15.1", "2.16.1", "2.16.2", "2.17.0", "2.21.0", "2.21.3", "2.22.0", "3.0.0"]
)
def test_what_pip_accepts_is_what_gmeta_runs_on(number: str) -> None:
    (tensorflow,) = [line for line in map(Requirement, PROJECT["dependencies"]) if line.name == "tensorflow"]
    misfit = version.describe_misfit(number)
    assert (misfit is None) == tensorflow.specifier.contains(number)
    if misfit is not None:
        assert misfit == (
            f"TensorFlow {number} is installed, but gmeta runs on 2.16.2 to 2.21: "
            "pip install 'tensorflow>=2.16.2,<2.22' 'tf-keras>=2.16,<2.22'"
        )


def test_a_candidate_of_a_release_counts_as_the_release() -> None:
    assert version.describe_misfit("2.21.0-rc1") is None
    assert version.describe_misfit("2.22.0rc0") is not None


def test_the_metadata_says_the_same() -> None:
    assert [line for line in PROJECT["dependencies"] if line in version.WANTED] == list(version.WANTED)
    accepted = SpecifierSet(PROJECT["requires-python"])
    first, last = version.PYTHONS
    minors = [minor for minor in range(5, 30) if accepted.contains(f"3.{minor}.1")]
    assert minors == list(range(first[1], last[1] + 1))
    assert PROJECT["version"] == version.__version__


def test_readme_has_a_row_for_each_tensorflow() -> None:
    readme = (ROOT / "README.md").read_text()
    first, last = version.TENSORFLOWS
    rows = re.findall(r"^\| 2\.(\d+)(?:\.\d+)? \|", readme, flags=re.MULTILINE)
    assert sorted(set(map(int, rows))) == list(range(first[1], last[1] + 1))
    for found in (version.TENSORFLOWS, version.PYTHONS):
        assert " to ".join(".".join(map(str, numbers)) for numbers in found) in readme


@pytest.mark.parametrize("number", [(3, 9, 18), (3, 14, 0)])
def test_another_python_is_refused(number: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    version.check_python()
    monkeypatch.setattr(sys, "version_info", number)
    with pytest.raises(ImportError) as raised:
        version.check_python()
    found = f"{number[0]}.{number[1]}"
    assert str(raised.value) == (
        f"gmeta runs on Python 3.10 to 3.13, and this is {found} ({sys.executable})"
        ": install one of these, and gmeta with its pip"
    )

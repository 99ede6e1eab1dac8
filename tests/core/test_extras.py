"""Missing packages are named with their extra, training needs no extra, and submodules load on first use."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gmeta.core.imports import EXTRAS, MissingExtraError, name_missing_extras

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
# As in an environment without any extra.
WITHOUT = """
import importlib.machinery, sys
def without(find):
    return lambda name, *args: None if name in {extras} else find(name, *args)
path = importlib.machinery.PathFinder
path.find_spec = without(path.find_spec)
"""
TRAINS = """
import gmeta, numpy as np, tensorflow as tf
from gmeta import callbacks, checkpoint, export, io, layers, losses, meta, metrics, models, reinforcement
users = layers.EmbeddingCollection([layers.FeatureConfig("user", dim=4)])
class Clicks(models.Model):
    def __init__(self):
        super().__init__()
        self.users, self.dense = users, tf.keras.layers.Dense(1)
    def call(self, inputs, training=None):
        return self.dense(self.users(inputs, training=training)["user"])
model = Clicks()
model.compile("sgd", "mse")
model.fit({"user": np.arange(8)}, np.ones((8, 1)), verbose=0)
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {extras}, loaded & {extras}
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    names = repr(set(EXTRAS))
    code = (WITHOUT + code).replace("{extras}", names)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_rank_that_trains_needs_no_extra() -> None:
    done = run(TRAINS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (["prepare", "--data", "log.csv", "--task", "user", "--out", "out"], "duckdb"),
        (["semantic-ids", "vectors.npy", "ids"], "sklearn"),
        (["tune", "--run", "run"], "optuna"),
    ],
)
def test_a_command_names_the_extra_in_one_line(tmp_path: Path, words: list[str], package: str) -> None:
    (tmp_path / "log.csv").write_text("user,item,label\n1,2,1\n")
    np.save(tmp_path / "vectors.npy", np.ones((40, 4), np.float32))
    done = run(f"import os; os.chdir({str(tmp_path)!r})\nfrom gmeta.cli import main\nmain({words!r})")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert f"{package} isn't installed: pip install 'gmeta[{EXTRAS[package]}]'" in last, done.stderr


def test_only_imports_of_gmetas_own_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "no_such_package", "report")
    name_missing_extras()
    with pytest.raises(ModuleNotFoundError) as error:
        __import__("no_such_package")
    assert not isinstance(error.value, MissingExtraError)
    with pytest.raises(
        MissingExtraError, match=r"no_such_package isn't installed: pip install 'gmeta\[report\]'"
    ):
        exec("import no_such_package", {"__name__": "gmeta.somewhere"})


def test_the_extras_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {"sklearn": "scikit-learn", "faiss": "faiss-cpu"}
    for package, extra in EXTRAS.items():
        name = names.get(package, package.replace("_", "-"))
        assert any(line.startswith(name) for line in extras[extra]), package
    every = [*dict.fromkeys(EXTRAS.values()), "serve"]  # gRPC, which TensorFlow brings along
    assert extras["all"] == [f"gmeta[{','.join(every)}]"]


def test_a_submodule_loads_on_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lazy"
    package.mkdir()
    (package / "features.py").write_text("POLICY = 3")
    (package / "__init__.py").write_text(
        "from gmeta.core.imports import load_lazily\n__getattr__, __dir__ = load_lazily(__name__, {})"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    lazy = importlib.import_module("lazy")
    assert "lazy.features" not in sys.modules
    assert lazy.features.POLICY == 3
    for name in ("feature", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module 'lazy' has no attribute '{name}'"):
            getattr(lazy, name)

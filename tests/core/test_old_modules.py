"""Models that earlier versions saved are loaded, though their classes have moved."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.imports import OLD_MODULES
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.models import Model

LOADS = """
import gmeta, numpy as np, sys, tensorflow as tf
model = tf.keras.models.load_model(sys.argv[1])
np.save(sys.argv[2], model.predict({"user": np.arange(8)}, verbose=0))
"""


@pytest.mark.parametrize("old", OLD_MODULES)
def test_the_old_module_has_the_names_of_the_present_one(old: str) -> None:
    found, present = importlib.import_module(old), importlib.import_module(OLD_MODULES[old])
    assert {k for k in vars(present) if k[0] != "_"} == {k for k in vars(found) if k[0] != "_"}
    assert present.__name__ == OLD_MODULES[old]


@pytest.mark.shown_by("test_the_old_module_has_the_names_of_the_present_one")
def test_a_model_of_an_earlier_version_is_loaded_in_a_fresh_process(tmp_path: Path) -> None:
    users = EmbeddingCollection([FeatureConfig("user", dim=4)])
    user = tf.keras.Input((), dtype=tf.int64, name="user")
    model = Model({"user": user}, tf.keras.layers.Dense(1)(users({"user": user})["user"]))
    model.compile("adam", "mse")
    model.fit({"user": np.arange(8)}, np.ones((8, 1)), verbose=0)
    model.save(tmp_path / "new.keras")
    with zipfile.ZipFile(tmp_path / "new.keras") as new, zipfile.ZipFile(tmp_path / "old.keras", "w") as old:
        for name in new.namelist():
            data = new.read(name)
            if name == "config.json":
                assert b'"gmeta.training.model"' in data
                data = data.replace(b'"gmeta.training.model"', b'"gmeta.models.training.model"')
            old.writestr(name, data)
    words = [sys.executable, "-c", LOADS, tmp_path / "old.keras", tmp_path / "found.npy"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(
        np.load(tmp_path / "found.npy"), model.predict({"user": np.arange(8)}, verbose=0)
    )

from pathlib import Path

import pytest

from gmeta.core.config import load_toml
from gmeta.training.experiment_config import ExperimentConfig

RECIPES = Path(__file__).resolve().parents[2] / "models"


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*/*.toml")), ids=lambda file: file.stem)
def test_every_recipe_loads(file):
    assert load_toml(ExperimentConfig, file).methods


def test_the_melu_recipe_is_what_gmeta_train_does_by_default():
    assert load_toml(ExperimentConfig, RECIPES / "melu" / "ml-100k.toml") == ExperimentConfig()

import ast
from pathlib import Path

import pytest

from gmeta.core.settings import from_mapping, load_toml, read_toml
from gmeta.experiment.plan.experiment_config import ExperimentConfig
from gmeta.experiment.plan.ranking_config import RankingConfig
from gmeta.experiment.runs.run_folder import FAMILIES

RECIPES = Path(__file__).resolve().parents[3] / "models"


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*/*.toml")), ids=lambda file: file.stem)
def test_every_recipe_loads(file):
    settings = read_toml(file)
    family = FAMILIES[settings.pop("for", "cold-start")]
    if family is RankingConfig:
        settings = {"label": "click", "user": "user", "time": "ts", **settings}  # which the data decide
    assert from_mapping(family, settings, str(file)).methods


def test_the_factors_recipe_is_what_gmeta_train_does_by_default():
    assert load_toml(ExperimentConfig, RECIPES / "factors" / "ml-100k.toml") == ExperimentConfig()


@pytest.mark.parametrize("script", sorted(RECIPES.glob("*/*.py")), ids=lambda script: script.stem)
def test_a_script_imports_gmeta_before_what_imports_tensorflow(script):
    """By which TensorFlow gets the Keras that gmeta trains with."""
    source = script.read_text()
    if "__main__" not in source:
        return
    names = [
        name.split(".")[0]
        for node in ast.parse(source).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    ]
    siblings = {path.stem for path in script.parent.glob("*.py")}
    assert next(name for name in names if name in {"gmeta", "tensorflow", *siblings}) == "gmeta"

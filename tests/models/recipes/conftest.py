"""What tests of the recipe of generative retrieval share; other recipes have their own."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

RECIPES = Path(__file__).resolve().parents[3] / "models"
ITEMS = 60


@pytest.fixture
def recipe(monkeypatch):
    """Imports a module of the recipe's folder, or of that which it reads histories by."""
    folders = [RECIPES / "hstu", RECIPES / "generative"]  # the last comes first: both have a train
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    yield __import__
    for path in (each for folder in folders for each in folder.glob("*.py")):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def file(tmp_path):
    """Histories within one of three sets of items, which are also their attributes."""
    random = np.random.default_rng(0)
    sets = np.arange(1, ITEMS + 1).reshape(3, -1)
    rows = [random.permutation(sets[user % 3])[:6] for user in range(90)]
    path = tmp_path / "Beauty.txt"
    path.write_text("".join(f"{user} {' '.join(map(str, row))}\n" for user, row in enumerate(rows)))
    attributes = {str(item): [place] for place, items in enumerate(sets.tolist()) for item in items}
    (tmp_path / "Beauty_item2attributes.json").write_text(json.dumps({**attributes, "999": [7]}))
    return path

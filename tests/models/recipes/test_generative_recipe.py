"""The recipe of generative retrieval: its ids, and a run from a text file to measures."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from gmeta.core.errors import ConfigError, DataError
from gmeta.testing.jobs import warm

RECIPES = Path(__file__).resolve().parents[3] / "models"
ITEMS = 60


@pytest.fixture
def recipe(monkeypatch):
    """Imports a module of the recipe's folder, or of that which it reads histories by."""
    folders = [RECIPES / "generative", RECIPES / "hstu"]
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


def made(recipe, file, **settings):
    data = recipe("sequences").read_sequences(file)
    own = recipe("retriever_settings").RetrieverSettings(
        **{"levels": 1, "codes": 3, "vectors": 4, "balanced": False} | settings
    )
    return data, recipe("item_codes").make_ids(data, file, own, seed=0)


def test_ids_follow_sets_of_items_and_random_ones_do_not(recipe, file):
    data, ids = made(recipe, file)
    attributes = recipe("sequences").read_attributes(file)
    assert len(attributes) == len(ids.items) == data.items  # no user has item 999
    sets = np.array([attributes[item][0] for item in range(data.items)])
    pairs = {(int(own), int(code)) for own, code in zip(sets, ids.digits[:, 0], strict=True)}
    assert len(pairs) == 3
    _, chance = made(recipe, file, ids="random")
    assert len(set(zip(sets.tolist(), chance.digits[:, 0].tolist(), strict=True))) > 3
    np.testing.assert_array_equal(np.sort(chance.digits, axis=0), np.sort(ids.digits, axis=0))


def test_ids_know_nothing_of_what_is_held_out(recipe, file):
    _, before = made(recipe, file, ids="cooccurrence")
    rows = [line.split() for line in file.read_text().splitlines()]
    held = [row[-2:] for row in rows]
    turned = [[*row[:-2], *other] for row, other in zip(rows, held[1:] + held[:1], strict=True)]
    file.write_text("".join(" ".join(row) + "\n" for row in turned))
    _, after = made(recipe, file, ids="cooccurrence")
    assert before.digest == after.digest


def test_what_ids_cannot_be_made_of_is_named(recipe, file):
    with pytest.raises(ConfigError, match="ids must be one of attributes, cooccurrence, items, random, got"):
        made(recipe, file, ids="titles")
    (file.parent / "Beauty_item2attributes.json").write_text("[]")
    with pytest.raises(DataError, match="no mapping from items to attributes"):
        made(recipe, file)


def test_it_trains_and_measures(file, tmp_path):
    words = ["--levels", "1", "--codes", "3", "--vectors", "4", "--batch", "16", "--negatives", "8"]
    words += ["--threads", "1", "--epochs", "2", "--json", "runs/all.jsonl"]
    done = warm.run([sys.executable, RECIPES / "generative" / "train.py", file, *words], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs" / "all.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert lines[1]["code_loss"] < lines[0]["code_loss"] < lines[0]["loss"]
    assert lines[0]["settings"]["batch"] == 16
    assert 0 < lines[0]["test"]["hr@50"] <= lines[0]["test_unseen"]["hr@50"] <= 1
    assert "retriever-attributes, chosen, seed 0" in done.stdout

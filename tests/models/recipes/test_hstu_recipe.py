"""The recipe of the next item: its histories, its SASRec, what it runs and what it reports."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from gmeta.core.errors import DataError
from gmeta.testing.small_experiment import ITEMS, USERS, as_1m, small_100k

RECIPE = Path(__file__).resolve().parents[3] / "models" / "hstu"


@pytest.fixture
def recipe(monkeypatch):
    """Imports a module of the recipe's folder, which is no package."""
    monkeypatch.syspath_prepend(RECIPE)
    names = [path.stem for path in RECIPE.glob("*.py")]
    yield __import__
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_100k(tmp_path_factory.mktemp("ml-100k"))


def test_histories_are_in_the_order_of_time_and_hold_two_items_out(recipe, folder, tmp_path):
    data = recipe("histories").read_histories(folder)
    rows = np.loadtxt(folder / "u.data", dtype=int)
    assert (data.users, data.items) == (USERS, ITEMS)
    for place, user in enumerate(np.unique(rows[:, 0])):
        own = rows[rows[:, 0] == user]
        own = own[np.argsort(own[:, 3], kind="stable")]
        np.testing.assert_array_equal(data.test["item"][place], own[:, 1] - 1)
        np.testing.assert_array_equal(data.test["time"][place], own[:, 3])
        for cut, held in ((data.validation, 1), (data.train, 2)):
            for column in ("item", "time"):
                np.testing.assert_array_equal(cut[column][place], data.test[column][place][:-held])
    same = recipe("histories").read_histories(as_1m(folder, tmp_path / "ml-1m"))
    assert same.name == "ml-1m"
    np.testing.assert_array_equal(same.test["item"].values, data.test["item"].values)


def test_batches_are_shuffled_anew_each_epoch_and_alike_by_a_seed(recipe, folder):
    histories = recipe("histories")
    train = histories.read_histories(folder).train
    first, again = (histories.batches(train, 7, shuffle=3) for _ in range(2))
    epochs = [[batch["item"].to_list() for batch in data] for data in (first, first, again)]
    assert epochs[0] == epochs[2] != epochs[1]
    everyone = sorted(row for batch in epochs[1] for row in batch)
    assert everyone == sorted(train["item"].to_list())


def line(model="hstu-2", seed=0, epoch=5, validation=0.1, test=0.2, **other):
    numbers = {"hr@10": 0.3, "hr@50": 0.4, "mrr": 0.1}
    facts = {"data": "ml-100k", "model": model, "seed": seed, "epoch": epoch, "seconds": 2.0 * epoch}
    cuts = {"validation": {**numbers, "ndcg@10": validation}, "test": {**numbers, "ndcg@10": test}}
    return {**facts, "settings": {"batch": 128}, **cuts, **other}


def write(path, *lines):
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def test_the_test_item_chooses_nothing(recipe, tmp_path):
    report, untrained = recipe("report"), ("data", "model", "epoch", "validation", "test")
    first = write(tmp_path / "0", line(epoch=10, validation=0.3, test=0.1), line(validation=0.2, test=0.9))
    second = write(
        tmp_path / "1",
        line(seed=1, validation=0.3, test=0.2),
        line(seed=1, epoch=10, validation=0.3, test=0.9),  # no better by validation: the earlier one
        {name: value for name, value in line("popularity", epoch=0).items() if name in untrained},
    )
    runs = report.read_runs([second, first])
    assert list(runs) == ["popularity", "hstu-2"]
    last = report.table(runs).splitlines()[-1]
    assert last == "| hstu-2 | 0.3000±.0000 | 0.4000±.0000 | 0.1500±.0707 | 0.1000±.0000 | 2 | 10, 5 | 2.00 |"


def test_lines_that_do_not_belong_together_are_named(recipe, tmp_path):
    report = recipe("report")
    for second, words in (
        (line(), "2: hstu-2, seed 0, epoch 5: measured twice; give the files"),
        (line(seed=1, settings={"batch": 1}), "2: settings differ between runs"),
        (line(seed=1, data="ml-1m"), "2: data differ between runs"),
        ({"model": "hstu-2"}, "2: not a line of train.py: KeyError"),
    ):
        with pytest.raises(DataError, match=words):
            report.read_runs([write(tmp_path / "lines", line(), second)])


def test_text_files_are_renumbered_and_their_faults_named(recipe, tmp_path):
    sequences = recipe("sequences")
    path = tmp_path / "Beauty.txt"
    path.write_text("1 1 2 3 4\n2 1 5\n3 4 2 6\n")  # the second user has too few items
    data = sequences.read_sequences(sequences.find_file("beauty", tmp_path))
    assert (data.name, data.users, data.items) == ("beauty", 2, 5)
    first, second = data.test["item"].to_list()
    assert (first[1], first[3]) == (second[1], second[0])
    assert data.train["item"].to_list() == [first[:2], second[:1]]
    assert sequences.find_file("ml-100k", None) is None
    with pytest.raises(DataError, match=r"no Yelp\.txt in"):
        sequences.find_file("yelp", tmp_path)
    path.write_text("1 a\n")
    with pytest.raises(DataError, match="not a line of whole numbers"):
        sequences.read_sequences(path)


def test_the_published_numbers_stand_beside_ours(recipe, tmp_path):
    report = recipe("report")
    runs = {"sasrec": [[line("sasrec", data="beauty")]]}
    text = report.write_report(runs, tmp_path)
    assert text.splitlines()[-1] == "| sasrec | 0.3000 | 0.0921 | 0.2000 | 0.0531 |"

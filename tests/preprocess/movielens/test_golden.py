"""Prepared MovieLens-100K against an independent implementation's features and order."""

import numpy as np
import pytest

from gmeta.preprocess import prepare
from support.data_files import read_split
from support.public_data import golden_maml, movielens_100k

pytestmark = pytest.mark.data
QUERY = 10


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(movielens_100k(), tmp_path_factory.mktemp("ml-100k"))


@pytest.fixture(scope="module")
def tasks(prepared):
    """Task -> its records in the order of the files, as dicts of lists."""
    found = {}
    for split in prepared.splits:
        for row in read_split(prepared.out, split):
            found.setdefault(row["task"][0], []).append(row)
    return found


def test_counts(prepared, tasks):
    assert {name: split.tasks for name, split in prepared.splits.items()} == {"warm": 461, "cold": 121}
    assert prepared.rows_read == 100_000
    assert prepared.bad == ()
    assert prepared.rows == sum(map(len, tasks.values()))
    assert len(tasks) == 461 + 121


def test_records_agree_up_to_the_names_of_the_categories(tasks):
    arrays = golden_maml().arrays
    pairs = {name: set() for name in ("item", "year", "gender", "age", "occupation", "area")}
    for place, user in enumerate(arrays["task/users"].tolist()):
        size = int((arrays["task/sm"][place] > 0).sum())
        golden = np.concatenate([arrays["task/sx"][place, :size], arrays["task/qx"][place]])
        labels = np.concatenate([arrays["task/sy"][place, :size], arrays["task/qy"][place]])
        rows = tasks[user]
        assert len(rows) == len(golden) == size + QUERY
        assert [row["rating"][0] for row in rows] == labels.tolist()
        assert [row["genre"] for row in rows] == [np.flatnonzero(flags).tolist() for flags in golden[:, 2:21]]
        assert {row["batch_id"][0] for row in rows} == {0}
        times = [row["timestamp"][0] for row in rows]
        assert times == sorted(times)
        for name, column in zip(pairs, (0, 1, 21, 22, 23, 24), strict=True):
            pairs[name] |= {
                (row[name][0], int(index)) for row, index in zip(rows, golden[:, column], strict=True)
            }
    for name, both in pairs.items():
        ours, theirs = zip(*both, strict=True)
        assert len(both) == len(set(ours)) == len(set(theirs)), name
    assert len(pairs["item"]) > 100
    # Years and ages are numbered in ascending order by both, so a bijection alone would be too weak.
    for name in ("item", "year", "age"):
        assert sorted(pairs[name]) == sorted(pairs[name], key=lambda pair: pair[1])


def test_the_item_without_a_date(prepared):
    from gmeta.preprocess.movielens.movielens_folder import open_folder
    from gmeta.preprocess.source import BadRecords

    items = open_folder(movielens_100k(), BadRecords()).items
    joined = items.take(np.array([267]))
    assert joined["year"].tolist() == [0]
    assert joined["genre"][0].tolist() == [0]
    assert np.count_nonzero(items.columns["year"] == 0) == 1

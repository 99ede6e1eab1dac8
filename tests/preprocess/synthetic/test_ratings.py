"""The synthetic data set: MovieLens' shape, and a structure that adaptation finds."""

import numpy as np
import pytest

from gmeta.core.errors import ConfigError
from gmeta.preprocess.movielens.movielens_folder import open_folder
from gmeta.preprocess.source import BadRecords
from gmeta.preprocess.synthetic import ratings as synthetic
from gmeta.preprocess.synthetic.ratings import SyntheticConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return synthetic.generate(tmp_path_factory.mktemp("synthetic"))


@pytest.fixture(scope="module")
def table(folder):
    return np.loadtxt(folder / "u.data", dtype=np.int64)


def test_it_reads_as_movielens_without_a_bad_record(folder):
    source = open_folder(folder, BadRecords("raise"))
    assert len(source.users.ids) == 943
    assert len(source.items.ids) == 1682
    years = source.items.columns["year"]
    assert np.count_nonzero(years == 0) == 1
    assert years[years > 0].min() >= 1922
    assert years.max() <= 1998
    assert (source.users.columns["area"] >= 10).any()
    assert set(source.users.columns["gender"]) == {0, 1}
    assert set(source.users.columns["age"]) == set(range(7))


def test_its_shape(table):
    assert 95_000 < len(table) < 105_000
    assert len(np.unique(table[:, :2], axis=0)) == len(table)
    stars = np.bincount(table[:, 2], minlength=6)
    assert stars[0] == 0
    assert (stars[1:] > 0.01 * len(table)).all()
    assert 3.3 < table[:, 2].mean() < 3.8
    sizes = np.bincount(table[:, 0])[1:]
    assert np.median(sizes) == 65
    assert sizes.max() > 10 * np.median(sizes)
    assert 500 < ((sizes >= 13) & (sizes <= 100)).sum() < 650
    popular = np.sort(np.bincount(table[:, 1], minlength=1683))[::-1]
    assert popular[:168].sum() > 0.3 * len(table)  # a tenth of the items has a third of the ratings


def test_a_seed_is_a_data_set():
    small = {"users": 20, "items": 50}
    assert synthetic.files(SyntheticConfig(seed=3, **small)) == synthetic.files(
        SyntheticConfig(seed=3, **small)
    )
    assert synthetic.files(SyntheticConfig(seed=3, **small)) != synthetic.files(
        SyntheticConfig(seed=4, **small)
    )


def test_adapting_to_a_user_beats_the_mean_of_an_item(folder, table):
    """A ridge regression of a cold user's support ratings on genres, against the warm users' item means."""
    sizes = np.bincount(table[:, 0])
    kept = (sizes >= 13) & (sizes <= 100)
    cold = np.arange(len(sizes)) % 5 == 0
    warm = table[(kept & ~cold)[table[:, 0]]]
    mean = warm[:, 2].mean()
    count, total = (
        np.bincount(warm[:, 1], minlength=1683),
        np.bincount(warm[:, 1], warm[:, 2], minlength=1683),
    )
    item_mean = np.where(count > 0, total / np.maximum(count, 1), mean)
    lines = (folder / "u.item").read_text().splitlines()
    flags = np.array([line.split("|")[5:] for line in lines], np.float64)
    features = np.hstack([np.ones((len(flags), 1)), flags])

    by_item, adapted = [], []
    for user in np.flatnonzero(kept & cold):
        rows = table[table[:, 0] == user]
        rows = rows[np.lexsort((rows[:, 1], rows[:, 3]))]
        support, query = rows[:-10], rows[-10:]
        x, y = features[support[:, 1] - 1], support[:, 2] - mean
        taste = np.linalg.solve(x.T @ x + 3 * np.eye(x.shape[1]), x.T @ y)
        by_item += abs(query[:, 2] - item_mean[query[:, 1]]).tolist()
        adapted += abs(query[:, 2] - mean - features[query[:, 1] - 1] @ taste).tolist()
    assert np.mean(adapted) < np.mean(by_item) - 0.1


def test_a_size_that_is_refused():
    with pytest.raises(ConfigError, match="10 items are needed"):
        SyntheticConfig(items=5)

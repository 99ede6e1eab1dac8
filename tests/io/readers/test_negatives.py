"""Drawn negatives keep their law, spare what a user has, and are the same after any interruption."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.core.errors import ConfigError
from gmeta.io import AfterSteps, ReadOptions, rows
from gmeta.io.readers.read_options import OneEpoch
from gmeta.io.readers.row_reader import Negatives

USERS, ITEMS = 40, 12
FEATURES = ["user", "item", "place", "genre", "tags"]


def genre_of(item):
    return item % 5 + 70


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Users with 3 to 6 of the items 100, 110, …, the first most often; one row in ten isn't positive."""
    folder = tmp_path_factory.mktemp("negatives")
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, ITEMS + 1)
    found = {name: [] for name in (*FEATURES, "label")}
    for user in range(USERS):
        size = rng.integers(3, 7)
        for place, item in enumerate(rng.choice(ITEMS, size, replace=False, p=weights / weights.sum())):
            values = (
                user,
                100 + 10 * int(item),
                place,
                genre_of(item),
                [int(item)] * (item % 3),
                float(rng.random() > 0.1),
            )
            for name, value in zip((*FEATURES, "label"), values, strict=True):
                found[name].append(value)
    pq.write_table(pa.table(found), folder / "rows.parquet")
    arguments = ["prepare", "--data", str(folder / "rows.parquet"), "--task", "user", "--label", "label"]
    done = CliRunner().invoke(main, [*arguments, "--out", str(folder / "data")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return found, str(folder / "data" / "train")


def read(path, negatives, start=0, shard=(0, 1), batch_size=64):
    """All rows of an epoch: (user, item, place, genre, tags, label)."""
    batches = rows(
        path,
        batch_size=batch_size,
        features=FEATURES,
        negatives=negatives,
        start=start,
        options=ReadOptions(seed=3, shard=shard, shuffle_buffer=1000),
    )
    found = []
    for features, label in batches:
        scalars = [features[name].numpy().tolist() for name in FEATURES[:-1]]
        tags = [tuple(each) for each in features["tags"].to_list()]
        found.append([*zip(*scalars, tags, label.numpy().tolist(), strict=True)])
    return found


def flat(batches):
    return sorted(row for batch in batches for row in batch)


def test_negatives_are_rows_of_their_positive_with_another_item_and_what_describes_it(data):
    found, path = data
    own = flat(read(path, None))
    drawn = flat(read(path, Negatives("item", count=2, columns=["genre", "tags"])))
    positives = [row for row in own if row[-1] > 0]
    assert len(drawn) == len(own) + 2 * len(positives)
    added = list(drawn)
    for row in own:
        added.remove(row)
    had = {(user, item) for user, item, *_, label in own if label > 0}
    expected = sorted([row[0], row[2]] for row in positives for _ in range(2))
    assert sorted([row[0], row[2]] for row in added) == expected
    for user, item, _, genre, tags, label in added:
        number = (item - 100) // 10
        assert (genre, tags, label) == (genre_of(number), (number,) * (number % 3), 0.0)
        assert (user, item) not in had
    assert max(map(len, read(path, Negatives("item")))) == 64
    assert len(found["user"]) == len(own)


@pytest.mark.parametrize("law", ["uniform", "popularity", "in-batch"])
@pytest.mark.shown_by(case="popularity")
def test_shares_are_those_of_the_law(data, law):
    found, path = data
    count = 60
    own = flat(read(path, None))
    added = flat(read(path, Negatives("item", count=count, law=law, known=True, seed=1)))
    numbers = np.bincount([(row[1] - 100) // 10 for row in added], minlength=ITEMS)
    numbers -= np.bincount([(row[1] - 100) // 10 for row in own], minlength=ITEMS)
    assert numbers.sum() == count * sum(label > 0 for *_, label in own)
    rows_of = np.bincount((np.array(found["item"]) - 100) // 10, minlength=ITEMS)
    shares = (
        np.ones(ITEMS) / ITEMS if law == "uniform" else rows_of / rows_of.sum()
    )  # one element has all rows
    expected = numbers.sum() * shares
    assert ((numbers - expected) ** 2 / expected).sum() < 37  # chi squared of 11 degrees: once in 10,000


def test_of_what_a_user_lacks_shares_are_still_those_of_the_law(data):
    found, path = data
    own = flat(read(path, None))
    added = flat(read(path, Negatives("item", count=300, law="popularity", seed=1)))
    user = own[0][0]
    has = {row[1] for row in own if row[0] == user and row[-1] > 0}
    counts = np.zeros(ITEMS)
    for row in added:
        counts[(row[1] - 100) // 10] += row[0] == user
    for row in own:
        counts[(row[1] - 100) // 10] -= row[0] == user
    weights = np.bincount((np.array(found["item"]) - 100) // 10, minlength=ITEMS).astype(float)
    weights[[(item - 100) // 10 for item in has]] = 0
    expected = counts.sum() * weights / weights.sum()
    assert (counts[weights == 0] == 0).all()
    lacks = expected > 0
    assert ((counts - expected)[lacks] ** 2 / expected[lacks]).sum() < 37


def test_draws_differ_by_epoch_and_seed_and_are_the_same_on_any_ranks_and_after_an_interruption(data):
    _, path = data
    negatives = Negatives("item", count=2)
    whole = read(path, negatives, start=OneEpoch(5))
    assert read(path, negatives, start=OneEpoch(5)) == whole
    assert read(path, negatives, start=AfterSteps([(1, 2)], epoch=5)) == whole[2:]
    assert flat(
        read(path, negatives, OneEpoch(5), (0, 2)) + read(path, negatives, OneEpoch(5), (1, 2))
    ) == flat(whole)
    assert flat(read(path, negatives, start=OneEpoch(6))) != flat(whole)
    assert flat(read(path, Negatives("item", count=2, seed=1), start=OneEpoch(5))) != flat(whole)


def test_a_user_who_has_all_items_gets_none(tmp_path):
    table = {"user": [1, 1, 2], "item": [5, 6, 5], "label": [1.0, 1.0, 1.0]}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    arguments = ["prepare", "--data", str(tmp_path / "rows.parquet"), "--task", "user", "--label", "label"]
    CliRunner().invoke(main, [*arguments, "--out", str(tmp_path / "data")], catch_exceptions=False)
    batches = rows(
        tmp_path / "data" / "train", negatives=Negatives("item", count=3), options=ReadOptions(shard=(0, 1))
    )
    ((features, label),) = batches
    found = sorted(
        zip(
            features["user"].numpy().tolist(),
            features["item"].numpy().tolist(),
            label.numpy().tolist(),
            strict=True,
        )
    )
    assert found == [(1, 5, 1.0), (1, 6, 1.0), (2, 5, 1.0), *[(2, 6, 0.0)] * 3]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"item": "film"}, "no column film"),
        ({"item": "tags"}, "name a column of ids"),
        ({"item": "item", "columns": ["label"]}, "can't have the label"),
        ({"item": "item", "law": "rare"}, "law must be one of"),
        ({"item": "item", "count": 0}, "count must be a whole number from 1 on"),
    ],
)
def test_what_makes_no_sense_is_refused(data, settings, said):
    with pytest.raises(ConfigError, match=said):
        rows(data[1], negatives=Negatives(**settings))
    with pytest.raises(ConfigError, match="has several: name one"):
        rows(data[1], label=["label", "place"], negatives=Negatives("item"))

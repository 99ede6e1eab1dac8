"""Columns of users and of items as features of the towers: found, learned from, and served."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.core.errors import ConfigError
from gmeta.experiment.next_item.runs import load_catalogue, plan_catalogue
from gmeta.experiment.next_item.side_columns import Described, SideColumns
from gmeta.experiment.plan.next_item_config import RetrievalConfig
from gmeta.experiment.runs.run_folder import RunFolder

USERS, ITEMS = 90, 24
COLUMNS = """
for = "retrieval"
protocol = "users"
ks = [4]
blend = false
[methods.columns]
label = "columns alone"
user_id = false
history = false
dim = 8
learning_rate = 0.03
epochs = 15
"""


def gmeta(*arguments):
    result = CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output + result.stderr
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run whose user tower reads columns alone: a user takes items of the kind of the user's group."""
    folder = tmp_path_factory.mktemp("columns")
    rng = np.random.default_rng(0)
    rows = [
        (user, int(item))
        for user in range(USERS)
        for item in rng.permutation(ITEMS)[:12]
        if rng.random() < (0.95 if item % 3 == user % 3 else 0.05)
    ]
    user, item = map(np.array, zip(*rows, strict=True))
    age = rng.permutation(USERS) + 20.0
    log = {
        "user": user + 1000,
        "ts": 1_600_000_000 + rng.permutation(len(user)),
        "item": item * 7 + 100,
        "group": [f"g{each % 3}" for each in user],
        "age": age[user],
        "name": [f"user {each}" for each in user],
        "genres": [[int(each) % 3, 5] if each % 2 else [int(each) % 3] for each in item],
        "rare": (item == 5).astype(int) + (item == 7),
        "price": np.exp(item / 3.0),
        "hour": rng.integers(0, 24, len(user)),
        "promoted": (rng.random(len(user)) < 0.03).astype(int),
        "shop": np.ones(len(user), int),
    }
    pq.write_table(pa.table(log), folder / "log.parquet")
    (folder / "columns.toml").write_text(COLUMNS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        gmeta("prepare", "--data", "log.parquet", "--task", "user", "--time", "ts")
        (folder / "said.txt").write_text(gmeta("train", "--config", "columns.toml").stderr)
        gmeta("export", "-k", 4, "--method", "columns", "--seen")
    return folder


@pytest.fixture(scope="module")
def columns(folder):
    return SideColumns.read(folder / "data", "item")


def test_columns_are_those_of_users_or_of_items_or_of_rows(columns):
    """A name of one user alone, what is rare in all rows, and what all rows have say nothing."""
    assert [*columns.users.columns] == ["group", "age"]
    assert [*columns.items.columns] == ["genres", "rare", "price"]
    assert columns.users.ids.tolist() == list(range(1000, 1000 + USERS))


def test_values_are_numbered_once_for_all_columns(columns):
    users = columns.users
    values, splits = users.choose(["group", "age"], np.array([1001, 7, 1004, 1002]))
    assert np.diff(splits).tolist() == [2, 0, 2, 2]  # 7 isn't a user
    groups, ages = values[::2], values[1::2]
    assert groups[0] == groups[1] != groups[2]
    assert groups.max() < 3 <= ages.min()
    assert ages.max() < 13  # ten bins
    counts = np.bincount(users.columns["age"][0])
    assert counts.tolist() == [9] * 10
    rare, ends = columns.items.columns["rare"]
    assert (len(rare), ends[-1]) == (2, 2)  # the two items that have it
    values, splits = columns.items.choose(["genres"], 7 * np.arange(ITEMS) + 100)
    assert np.diff(splits).tolist() == [1 + item % 2 for item in range(ITEMS)]
    assert Described(np.zeros(0, np.int64), {}).choose([], np.array([3]))[1].tolist() == [0, 0]


def test_a_setting_names_columns(columns, folder):
    assert columns.names(["price", "group"]) == (["group"], ["price"])
    assert columns.names(False) == ([], [])
    with pytest.raises(ConfigError, match=r"columns names hour, which aren't .* of users are group, age"):
        columns.names(["hour"])
    given = {"protocol": "users", "methods": {"a": {"label": "a", "columns": ["group"]}}}
    notes = plan_catalogue(given, folder / "data", kind=RetrievalConfig).notes
    assert notes[-1] == "columns of item: none; of users: group"


def test_new_users_are_known_by_their_columns(folder):
    assert "columns of item: genres, rare, price; of users: group, age" in (folder / "said.txt").read_text()
    trained = load_catalogue(RunFolder(folder / "runs/default"))
    asked = trained.cuts.test
    assert not set(asked.histories.users) & set(trained.cuts.train.users)
    _, scorer = trained.choose("columns", None)
    best = trained.cuts.ids[np.argmax(scorer.scores(asked.histories), axis=1)]
    assert ((best - 100) // 7 % 3 == (asked.histories.users - 1000) % 3).all()
    stranger = asked.histories.choose(slice(0, 2))
    stranger.users[:] = 5, 6
    scores = scorer.scores(stranger)
    np.testing.assert_array_equal(scores[0], scores[1])


def test_the_export_finds_the_columns_by_the_users_ids(folder):
    trained = load_catalogue(RunFolder(folder / "runs/default"))
    _, scorer = trained.choose("columns", None)
    users = np.array([1000, 1001, 1002, 3, 10**9])
    histories = trained.cuts.whole.choose(np.zeros(5, np.int64))
    histories.users[:] = users
    want = np.sort(scorer.scores(histories), axis=1)[:, ::-1][:, :4]
    served = tf.saved_model.load(str(folder / "serving/1")).signatures["recommend"]
    answer = served(user=tf.constant(users), item=tf.fill([5, 1], tf.constant(-1, tf.int64)))
    np.testing.assert_allclose(answer["scores"], want, rtol=1e-4, atol=1e-5)
    assert answer["items"][0, 0] != answer["items"][1, 0]

"""Features joined into elements while they are read."""

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

import gmeta.io
from gmeta.core.errors import ConfigError, DataError, StoreUnavailableError
from gmeta.io import ArrowSource, ReadOptions, join_features, tasks
from gmeta.io.features import FetchPolicy
from gmeta.io.reader_stats import data_errors
from gmeta.io.readers.read_options import OneEpoch
from support.grouped_data import grouped_columns, write_folder

SIZES = [3, 1, 4]  # rows of timestamps 0 to 7
ITEMS = grouped_columns(SIZES)["item"]
KNOWN = np.unique(np.concatenate([ITEMS, np.arange(20)]))  # and the genres
# The price is an item's place among the known ones; at time 4 all rise by 1000.
PRICES = pa.table(
    {
        "key": np.concatenate([KNOWN, KNOWN]),
        "version": np.repeat([0, 4], len(KNOWN)),
        "price": pa.array([*range(len(KNOWN)), *range(1000, 1000 + len(KNOWN))], pa.float32()),
        "tags": pa.array([[i] * (i % 3) for i in range(len(KNOWN))] * 2, pa.list_(pa.int64())),
    }
)


def source(**policy):
    return ArrowSource({"item": PRICES}, version="version", policy=FetchPolicy(timeout=None, **policy))


def place(key):
    return int(np.searchsorted(KNOWN, key))


@pytest.fixture
def groups(tmp_path):
    path, options = write_folder(tmp_path, SIZES), ReadOptions(shuffle=False)
    return gmeta.io.groups(path, groups_per_element=2, start=OneEpoch(), options=options)


def test_rows_get_the_features_of_their_own_time(groups):
    joined = join_features(
        groups, source(), "item", key="item", columns=["tags", "price"], as_of="timestamp", prefix="item_"
    )
    spec = joined.element_spec["columns"]
    assert spec["item_price"] == tf.TensorSpec([None], tf.float32)
    assert spec["item_tags"] == tf.RaggedTensorSpec([None, None], tf.int64, 1)
    found = [element["columns"] for element in joined]
    assert [len(columns["item"]) for columns in found] == [4, 4]
    for columns in found:
        rows = [columns[name].numpy().tolist() for name in ("item", "timestamp", "item_price")]
        for item, time, price in zip(*rows, strict=True):
            assert price == place(item) + (1000 if time >= 4 else 0)
        assert columns["item_tags"].to_list() == [[place(i)] * (place(i) % 3) for i in rows[0]]
        assert set(columns) == {"item", "genre", "rating", "weights", "timestamp", "item_tags", "item_price"}


def test_a_list_of_keys_gets_a_list_of_features(groups):
    joined = join_features(
        groups, source(), "item", key="genre", columns=["price", "tags"], as_of="timestamp"
    )
    for before, after in zip(groups, joined, strict=True):
        genres, times = before["columns"]["genre"].to_list(), before["columns"]["timestamp"].numpy()
        assert after["columns"]["price"].to_list() == [
            [place(genre) + (1000 if time >= 4 else 0) for genre in row]
            for row, time in zip(genres, times, strict=True)
        ]
        assert after["columns"]["tags"].to_list() == [
            [[place(genre)] * (place(genre) % 3) for genre in row] for row in genres
        ]
    assert joined.element_spec["columns"]["tags"].ragged_rank == 2


def test_an_element_asks_once(groups):
    counted = source(cache_rows=0)
    list(join_features(groups, counted, "item", key="genre", columns=["price"]))
    counts = counted.counts()
    genres = [element["columns"]["genre"] for element in groups]
    assert counts.requests == 2
    assert counts.rows == sum(int(tf.size(genre.flat_values)) for genre in genres)
    assert counts.distinct == sum(len(np.unique(genre.flat_values)) for genre in genres)


def test_tasks_are_joined_and_batched_on(tmp_path):
    (tmp_path / "data").mkdir()
    path = write_folder(tmp_path / "data", [3, 4], [5])
    batches = tasks(
        path, tasks_per_batch=2, query=1, features=["item", "timestamp"], options=ReadOptions(shuffle=False)
    )
    joined = join_features(
        batches,
        source(missing="default", defaults={"price": -1.0}),
        "item",
        key="item",
        columns=["price"],
        as_of="timestamp",
    ).prefetch(1)
    found = [element["features"] for element in joined]
    assert [len(features["price"]) for features in found] == [7, 5]
    for features in found:
        for item, price in zip(features["item"].numpy(), features["price"].numpy(), strict=True):
            assert price == -1.0 if item not in KNOWN else price % 1000 == place(item)


def test_an_iterator_is_saved_and_goes_on(groups, tmp_path):
    joined = join_features(groups, source(), "item", key="item", columns=["price"])
    iterator = iter(joined)
    next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "checkpoint"))
    rest = next(iterator)["columns"]["price"].numpy()
    fresh = iter(joined)
    tf.train.Checkpoint(iterator=fresh).read(path)
    np.testing.assert_array_equal(next(fresh)["columns"]["price"], rest)


def test_what_goes_wrong_while_reading_is_one_line(groups):
    few = ArrowSource(
        {
            "item": pa.table({"key": [1], "price": [1.5]}).cast(
                pa.schema({"key": pa.int64(), "price": pa.float32()})
            )
        }
    )
    with pytest.raises(DataError) as raised, data_errors():
        list(join_features(groups, few, "item", key="item", columns=["price"]))
    line = str(raised.value)
    assert line.startswith("ArrowSource: table 'item': 4 of 4 keys lack a value: key ")
    assert line.endswith("put it into the store, or take FetchPolicy(missing='default') or 'null'")

    class Down(ArrowSource):
        def fetch(self, *_):
            raise StoreUnavailableError("ConnectionRefusedError: refused")

    down = Down({"item": PRICES}, version="version", policy=FetchPolicy(attempts=1))
    with (
        pytest.raises(DataError, match=r"^ArrowSource: table 'item', 4 keys from .*refused; tried 1 times"),
        data_errors(),
    ):
        list(join_features(groups, down, "item", key="item", columns=["price"]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"key": "movie"}, "no column key='movie' in 'columns'; it has item, genre"),
        ({"as_of": "time"}, "no column as_of='time'"),
        ({"key": "rating"}, "key='rating' must be int64"),
        ({"as_of": "genre"}, "as_of='genre' must be int64"),
        ({"columns": ["cost"]}, "no column 'cost'; it has price, tags"),
        ({"source": source(missing="null")}, "tensors hold no nulls"),
        ({"source": source(missing="default", defaults={"price": "x"})}, "default 'x' of column 'price'"),
    ],
)
def test_what_makes_no_sense_is_refused(groups, options, says):
    given = {"source": source(), "table": "item", "key": "item", "columns": ["price"], **options}
    with pytest.raises(ConfigError, match=says):
        join_features(groups, **given)


def test_columns_are_not_overwritten(groups):
    joined = join_features(groups, source(), "item", key="item", columns=["price"])
    with pytest.raises(ConfigError, match="'columns' has price already; give a prefix"):
        join_features(joined, source(), "item", key="item", columns=["price"])
    with pytest.raises(ConfigError, match="a dict with 'columns' or 'features'"):
        join_features(tf.data.Dataset.range(3), source(), "item", key="item", columns=["price"])

"""Readers take the task, the time, the label and the features from what `gmeta prepare` was told."""

import json

import pytest

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError
from gmeta.core.schema import Roles
from gmeta.io import rows, sequences, tasks
from gmeta.preprocess import ColumnSpec, TableSpec, prepare
from support.grouped_data import write_folder

TABLE = "user,ts,item,price,timestamp,click\n" + "".join(
    f"{user},{time},{user + time},{time / 2},{time + 5},{time % 2}\n"
    for user in range(6)
    for time in range(4)
)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "clicks.csv"
    path.write_text(TABLE)
    return path


def prepared(table, **roles):
    columns = {name: ColumnSpec() for name in ("item", "price", "timestamp", "click")}
    columns = {**columns, "item": ColumnSpec(hash=True), "price": ColumnSpec(dtype="float32")}
    columns["timestamp"] = ColumnSpec(dtype="int64")
    columns["click"] = ColumnSpec(dtype="float32")
    prepare([table], table.parent / "out", spec=TableSpec("user", columns=columns, **roles))
    return table.parent / "out" / "train"


def test_the_manifest_says_what_columns_are_for(table):
    path = prepared(table, time="ts", label="click")
    roles = Manifest.load(path.parent).roles
    assert roles == Roles("user", "batch_id", "ts", "click", ("item",))


def test_tasks_and_rows_take_label_and_features_from_it(table):
    path = prepared(table, time="ts", label="click")
    spec = tasks(path, query=2).element_spec
    assert set(spec["features"]) == {
        "item",
        "price",
        "timestamp",
    }  # the time is ts, whatever others are called
    features, _ = rows(path).element_spec
    assert set(features) == {"user", "item", "price", "timestamp"}
    batch = next(iter(tasks(path, query=2, tasks_per_batch=6)))
    assert sorted(batch["label"].numpy()) == [0.0] * 12 + [1.0] * 12


def test_without_a_label_one_has_to_be_named(table):
    path = prepared(table, time="ts")
    for reader in (tasks, rows):
        with pytest.raises(ConfigError, match=r"prepared without a label: say label=COLUMN, .*it has user, "):
            reader(path)
        with pytest.raises(
            ConfigError, match=r"label='item' is hashed text, and its numbers have no meaning"
        ):
            reader(path, label="item")
    assert rows(path, label="click").element_spec[1].shape.as_list() == [None]


def test_data_of_older_manifests_has_the_usual_names(tmp_path):
    path = write_folder(tmp_path, [3, 4])
    assert json.loads((tmp_path / "manifest.json").read_text())["config"] == {}
    assert Manifest.load(path.parent).roles == Roles("task", "batch_id", "timestamp", "rating")


def test_sequences_have_the_label_of_their_targets(table):
    path = prepared(table, time="ts", label="click")
    batch = next(iter(sequences(path, history=["item"], targets=["item"], exposed=2)))
    assert list(batch["labels"]) == ["click"]
    assert sequences(path, targets=["item"], exposed=2, labels=[]).element_spec["labels"] == {}
    assert sequences(path, history=["item"]).element_spec["labels"] == {}

"""What an experiment takes from a data set of one's own where nobody says otherwise."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.settings import from_mapping
from gmeta.experiment.next_item.runs import plan_catalogue
from gmeta.experiment.plan.experiment_config import HELD_OUT, ExperimentConfig, FeatureSettings, MethodConfig
from gmeta.experiment.plan.own_plan import plan_experiment
from gmeta.experiment.plan.task_sets import count_measured, count_trained, measured_tasks, training_tasks
from gmeta.experiment.runs.model_choice import build_model
from gmeta.models.zoo.factor_model import FactorSettings
from gmeta.preprocess import ColumnSpec, PrepareConfig, TableSpec, prepare
from gmeta.testing import small_data
from support.data_files import CLICK_SPEC as SPEC
from support.data_files import click_log, prepared_clicks, write_table


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    return prepared_clicks(tmp_path_factory.mktemp("clicks"), users=60, rows=20)


def prepared(folder, table, spec=SPEC, config=None):
    prepare(write_table(table, folder / "log.parquet"), folder / "data", config, spec=spec)
    return folder / "data"


def test_everything_is_decided_by_the_data_set(clicks):
    planned = plan_experiment({}, clicks)
    config = planned.config
    assert (config.label, config.loss, config.positive) == ("click", "binary_crossentropy", 0.5)
    assert {name: (each.hash, each.combiner) for name, each in config.features.items()} == {
        "item_id": (True, None),
        "city": (True, None),
        "tags": (True, "sqrtn"),
    }
    prices = np.array(click_log(users=60, rows=20)["price"])
    assert config.numbers["price"].mean == pytest.approx(prices.mean(), rel=0.1)
    assert config.item == "item_id"
    assert (config.train_split, config.test_splits, config.held_out) == ("train", (HELD_OUT,), 5)
    assert list(config.methods) == ["factor_model", "maml", "joint"]
    labels = np.concatenate([batch["label"] for batch in training_tasks(config, clicks)])
    assert (config.labels.count, config.labels.mean) == (len(labels), pytest.approx(labels.mean(), abs=1e-5))
    assert config.task_columns == ("city",)
    said = "\n".join(planned.notes)
    for words in ("predicts whether click", "tags (sqrtn)", "numbers: price", "item_id", "(held-out)"):
        assert words in said
    assert plan_experiment({}, clicks) == planned  # the same each time, or a run couldn't be resumed


def test_rows_without_times_are_measured_whatever_their_labels(tmp_path):
    """A task's last rows would be those with the highest labels, or the highest ids."""
    labels = np.tile([0.0, 1.0, 1.0, 0.0, 1.0], 12)
    orders = []
    for name, given in (("one", labels), ("other", 1 - labels)):
        table = pa.table({"user": np.repeat(np.arange(12), 5), "item": np.arange(60) % 15, "click": given})
        spec = TableSpec(task="user", label="click")
        (tmp_path / name).mkdir()
        data = prepared(tmp_path / name, table, spec)
        planned = plan_experiment({"held_out": 2, "features": ["item"]}, data)
        assert planned.config.rows == "random"
        assert "there are no times" in "".join(planned.notes)
        batches = list(measured_tasks(planned.config, data, HELD_OUT))
        orders.append(
            [batch["features"]["item"].numpy()[batch["query"]["index"]].tolist() for batch in batches]
        )
    assert orders[0] == orders[1]


def test_of_rows_without_users_an_id_is_the_item_and_no_count(tmp_path):
    """As Criteo's: counts vary more than any id, and each row is in a block by a hash of its values."""
    rng = np.random.default_rng(0)
    rows = 3000
    table = pa.table(
        {
            "label": rng.integers(0, 2, rows),
            "count": rng.integers(0, 500, rows),
            "small": [f"{value:08x}" for value in rng.integers(0, 9, rows)],
            "large": [f"{value:08x}" for value in rng.integers(0, 150, rows)],
        }
    )
    data = prepared(tmp_path, table, TableSpec(label="label"))
    config = plan_experiment({}, data).config
    assert config.item == "large"
    assert set(config.features) == {"count", "small", "large"}
    with pytest.raises(ConfigError, match="was prepared without users, who have histories"):
        plan_catalogue({}, data)


def test_an_item_that_occurs_once_is_known_by_its_name(tmp_path):
    # Five items of each session's own, and then those that two other sessions began with.
    own = np.arange(45).reshape(9, 5)
    items = np.concatenate([own, np.roll(own[:, :1], 1), np.roll(own[:, :1], 2)], axis=1)
    columns = {"session": np.repeat(np.arange(9), 7), "ts": np.arange(63), "itemId": items.ravel()}
    table = pa.table(columns)
    spec = TableSpec(task="session", time="ts")
    assert plan_catalogue({}, prepared(tmp_path, table, spec)).config.item == "itemId"


def test_what_is_given_counts_more(clicks):
    given = {
        "features": {"tags": {"dim": 8, "combiner": "sum"}, "item_id": {}},
        "numbers": [],
        "item": "city",
        "embedding_dim": 4,
        "query": 3,
        "seeds": [4, 5],
    }
    config = plan_experiment(given, clicks).config
    assert from_mapping(FeatureSettings, {"pooling": "sum"}) == FeatureSettings(combiner="sum")
    assert (config.features["tags"].dim, config.features["tags"].combiner) == (8, "sum")
    assert list(config.features) == ["tags", "item_id"]
    assert (config.numbers, config.item, config.query, config.seeds) == ({}, "city", 3, (4, 5))


def test_no_task_is_both_trained_on_and_measured(clicks):
    config = plan_experiment({"tasks_per_batch": 7}, clicks).config
    trained = [int(t) for batch in training_tasks(config, clicks) for t in batch["task"]]
    measured = [int(t) for batch in measured_tasks(config, clicks, HELD_OUT) for t in batch["task"]]
    assert not set(trained) & set(measured)
    assert len(trained) + len(measured) == 60
    assert 4 <= len(measured) <= 24
    counted = [count_trained(config, clicks), count_measured(config, clicks, HELD_OUT)]
    assert counted == [(len(trained), 0), (len(measured), 0)]


@pytest.mark.shown_by("test_no_task_is_both_trained_on_and_measured")
def test_own_data_take_folds_by_id_and_bounds_of_what_is_measured(tmp_path):
    table = click_log(users=40, rows=12)
    table = pa.concat_tables([table, table.slice(0, 200)])
    sizes = np.array([each["counts"].as_py() for each in table["user_id"].value_counts()])
    data = prepared(tmp_path, table)
    given = {"held_out": 2, "held_out_by": "id", "measured_rows": [16, 20]}
    measured = []
    for part in (0, 1):
        config = plan_experiment({**given, "held_out_part": part}, data).config
        trained = {int(t) for batch in training_tasks(config, data) for t in batch["task"]}
        own = {int(t) for batch in measured_tasks(config, data, HELD_OUT) for t in batch["task"]}
        assert all(task % 2 == part for task in own)
        assert not trained & own
        assert len(trained | own) == 40
        assert config.labels.count == sum(len(batch["label"]) for batch in training_tasks(config, data))
        measured += own
    assert 0 < len(measured) == ((sizes >= 16) & (sizes <= 20)).sum() < 40


def test_splits_of_the_data_set_are_used_where_there_are_several(tmp_path):
    data = prepared_clicks(tmp_path, PrepareConfig(cold_modulus=4), users=40, rows=8)
    config = plan_experiment({}, data).config
    assert (config.train_split, config.test_splits, config.held_out) == ("warm", ("cold",), 0)


def test_tasks_too_small_to_split_are_passed_over_and_counted(tmp_path):
    table = click_log(users=40, rows=12)
    alone = table.slice(0, 30).set_column(0, "user_id", pa.array([f"once-{n}" for n in range(30)]))
    data = prepared(tmp_path, pa.concat_tables([table, alone]))
    planned = plan_experiment({}, data)
    assert any("passes over 30 that are too small" in note for note in planned.notes)
    read = sum(len(batch["task"]) for batch in training_tasks(planned.config, data))
    assert read == count_trained(planned.config, data)[0]


def test_a_label_of_other_numbers_is_regressed_on_its_own_scale(tmp_path):
    table = click_log(users=40, rows=10)
    watched = np.random.default_rng(0).normal(400.0, 90.0, table.num_rows)
    data = prepared(
        tmp_path, table.append_column("watched", pa.array(watched)), replace(SPEC, label="watched")
    )
    planned = plan_experiment({}, data)
    assert planned.config.loss == "mse"
    assert planned.config.label_scale.mean == pytest.approx(400, rel=0.1)
    assert "watched" not in planned.config.columns
    with pytest.raises(ConfigError, match=r"give the threshold of positive labels, positive = NUMBER"):
        plan_experiment({"loss": "binary_crossentropy"}, data)
    wanted = {"loss": "binary_crossentropy", "positive": 400.0}
    assert plan_experiment(wanted, data).config.positive == 400.0


def test_columns_that_say_nothing_are_left_out_and_named(tmp_path):
    table = click_log(users=60, rows=30)
    rows = table.num_rows
    table = table.append_column("event", pa.array(np.arange(rows) * 7)).append_column(
        "one", pa.array([3] * rows)
    )
    table = table.append_column("flat", pa.array([0.5] * rows))
    table = table.append_column("far", pa.array((np.arange(rows) % 9) - 2**60))
    spec = TableSpec(
        "user_id",
        time="ts",
        label="click",
        columns={**SPEC.columns, **dict.fromkeys(("event", "one", "flat", "far"), ColumnSpec())},
    )
    planned = plan_experiment({}, prepared(tmp_path, table, spec))
    said = "\n".join(planned.notes)
    assert "event (another one in nearly every row)" in said
    assert "one (the same in all rows)" in said
    assert "flat (the same in all rows)" in said
    assert set(planned.config.columns) == {"item_id", "city", "tags", "price", "far"}
    assert planned.config.features["far"].hash  # ids below 0 are no rows of a table as they are


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"features": ["itm"]},
            r"features names 'itm', which .* doesn't have; its columns are user_id, .*item_id",
        ),
        ({"features": ["price"]}, r"features names 'price', which is float32: features take ids"),
        ({"features": ["user_id"]}, r"features names 'user_id', which identifies tasks"),
        ({"features": {"city": {"dims": 3}}}, r"unknown keys: dims @ my\.toml\.features\.city"),
        ({"features": {"city": {"hash": False}}}, r"features\.city: hash = false, but the column was hashed"),
        ({"numbers": ["city"]}, r"numbers names 'city', which is int64"),
        ({"numbers": ["click"]}, r"numbers names 'click', which is the label"),
        ({"item": "tags"}, r"item names 'tags', which holds lists"),
        ({"label": "clicked"}, r"label names 'clicked', which .* doesn't have; its columns are"),
        ({"label": "tags"}, r"label names 'tags', which holds lists"),
        ({"embeding_dim": 3}, r"unknown keys: embeding_dim"),
        ({"embedding_dim": 10**12}, r"embedding_dim must lie in \[1, 65536\], got 1000000000000"),
        ({"embedding_dim": 1e12}, r"embedding_dim"),
        ({"hidden": [8, 10**12]}, r"hidden must lie in \[1, 65536\]"),
        ({"evaluation_steps": [10**12]}, r"evaluation_steps must lie in"),
        ({"features": {"city": {"dim": 10**12}}}, r"dim must lie in \[1, 65536\]"),
        ({"label": "city"}, r"label 'city' is hashed text, and its numbers have no meaning"),
        ({"query": 1.5}, r"query must be a number of rows or a share below 1, got 1.5"),
        ({"held_out": 1}, r"held_out=1 keeps one in this many"),
        ({"held_out": 3, "held_out_part": 3}, r"held_out_part=3 .* held_out=3 parts is held out"),
        ({"measured_rows": [9, 3]}, r"measured_rows: the most, 3, is below the fewest, 9"),
        ({"measured_rows": [9]}, r"@ my\.toml\.measured_rows"),
        ({"measured_rows": [999, 0]}, r"held-out: no task is large enough"),
        ({"test_splits": ["cold"]}, r"no split 'cold'; it has train"),
    ],
)
def test_settings_that_do_not_fit_name_the_column_and_what_there_is(clicks, given, says):
    with pytest.raises((ConfigError, DataError), match=says):
        plan_experiment(given, clicks, "my.toml")


def test_a_label_that_teaches_nothing_is_refused(tmp_path):
    table = click_log(users=20, rows=10)
    at = table.column_names.index("click")
    ones = table.set_column(at, "click", pa.array([1] * table.num_rows))
    with pytest.raises(DataError, match=r"label 'click' is 1 in all of [\d,]+ rows: nothing can be learnt"):
        plan_experiment({}, prepared(tmp_path, ones))


def test_a_data_set_without_a_label_says_how_to_name_one(tmp_path):
    data = prepared(tmp_path, click_log(users=20, rows=10), replace(SPEC, label=None))
    with pytest.raises(
        ConfigError, match=r"prepared without a label: prepare it with --label COLUMN, or name one"
    ):
        plan_experiment({}, data)


def test_movielens_keeps_its_own_settings(tmp_path):
    config = plan_experiment({}, small_data(tmp_path)).config
    assert replace(config, labels=None) == ExperimentConfig()


def test_what_factors_need_is_decided_only_if_a_method_has_them(clicks):
    methods = {"maml": {"label": "MAML", "description": "second order"}}
    config = plan_experiment({"methods": methods}, clicks).config
    assert (config.labels, config.task_columns) == (None, ())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task_columns": ["shop"]}, "task_columns names shop, which aren't among the features"),
        ({"labels": {"count": 0, "mean": 0.5}}, "labels: there must be one"),
    ],
)
def test_facts_that_cant_be_are_refused(clicks, given, message):
    with pytest.raises(ConfigError, match=message):
        plan_experiment(given, clicks)


@pytest.mark.parametrize("setting", [{"dim": 4}, {"table": "shared"}, {"max_length": 3}])
def test_factors_take_no_settings_that_would_do_nothing(clicks, setting):
    config = plan_experiment({"features": {"item_id": {}, "tags": setting}}, clicks).config
    with pytest.raises(ConfigError, match=f"features.tags: factor_ridge takes no {next(iter(setting))}"):
        build_model(config, "factor_model", 0)


def test_other_models_take_no_factors():
    with pytest.raises(ConfigError, match="factors are the settings of the model 'factor_ridge'"):
        MethodConfig("MAML", "second order", factors=FactorSettings(dim=3))


def test_a_method_cant_bear_the_name_of_a_baseline():
    with pytest.raises(ConfigError, match="method 'factors' has the name of a baseline"):
        ExperimentConfig(methods={"factors": MethodConfig("mine", "a model of mine")})

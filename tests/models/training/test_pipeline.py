"""A pipeline changes when rows are fetched, and not one bit of what is learnt."""

from __future__ import annotations

import functools
import itertools
import random

import numpy as np
import pytest
import tensorflow as tf

import gmeta
from gmeta.callbacks import StepTimes
from gmeta.checkpoint import ShardedCheckpoint
from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model
from gmeta.ops import HashTable, device
from gmeta.ops.table.read_ahead import Reread
from gmeta.training import steps_ahead
from support.cells import slow_but
from support.pipeline_runs import (
    KINDS,
    STEPS,
    collections_of,
    differences,
    make_model,
    own_data,
    train_at_depth,
)
from support.tables import sorted_records


@functools.cache
def at_depth_0(kind):
    return train_at_depth(kind, 0)


# Tracing takes the time. Quick: "policies" for tables of each policy alone, "rows" for "maml", and
# "next item" for "grm".
QUICK = [("policies", 1), ("policies", 2), ("towers", 2), ("rows", 2), ("drawn", 1), ("next item", 1)]


@pytest.mark.parametrize(("kind", "depth"), slow_but(QUICK, itertools.product(KINDS, (1, 2))))
@pytest.mark.shown_by(case="drawn-1")
def test_all_numbers_are_those_of_depth_0(kind, depth):
    found = train_at_depth(kind, depth)
    assert differences(at_depth_0(kind), found) == []
    assert all(np.isfinite(found["history"]["loss"]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["next item of users", "next item of positions"])
def test_all_numbers_are_those_of_depth_0_whoever_shares_negatives(kind):
    assert differences(at_depth_0(kind), train_at_depth(kind, 2)) == []


def test_rows_that_are_not_read_again_are_noticed(monkeypatch):
    def reread(table, keys, peeked, insert=True, **_):
        table.lookup_keys(keys, insert)
        return Reread(peeked.rows, tf.constant(0, tf.int64))

    monkeypatch.setattr(HashTable, "reread", reread)
    # On a busy machine, all rows may be read only after the updates that they were to be read before.
    assert any(differences(at_depth_0("ctr"), train_at_depth("ctr", 2)) for _ in range(5))


SETTINGS = {
    "together": {
        "accumulate_steps": 3,
        "steps_per_execution": 2,
        "fit": {"steps_per_epoch": 6, "validation_freq": 1, "validation_steps": 4},
    },
    "accumulation": {"accumulate_steps": 3},
    "eager": {"run_eagerly": True, "epochs": 1},
    "several steps a call": {"steps_per_execution": 4, "fit": {"steps_per_epoch": 8}, "epochs": 1},
    "validation": {"fit": {"validation_freq": 1}},
    "epochs of some steps": {"fit": {"steps_per_epoch": 5}, "epochs": 2},
}


# Quick: "together" for each of the others.
@pytest.mark.parametrize("name", slow_but(["together", "eager"], SETTINGS))
@pytest.mark.shown_by(case="eager")
def test_settings_of_a_run_change_nothing(name):
    settings = dict(SETTINGS[name])
    fit = dict(settings.pop("fit", {}))
    if "validation_freq" in fit:
        fit["validation_data"] = own_data(make_model("recent")[1])
    plain, ahead = (train_at_depth("recent", depth, fit=fit, **settings) for depth in (0, 2))
    assert differences(plain, ahead) == []


def overflow():
    """A loss scale that grows every other step, so that gradients overflow and steps are skipped."""
    return tf.keras.mixed_precision.LossScaleOptimizer(
        tf.keras.optimizers.Adam(0.02), initial_scale=2.0**126, dynamic_growth_steps=2
    )


# Quick: pipeline/test_step_number.py, test_a_wrong_prediction_changes_no_number[skipped steps-1].
@pytest.mark.slow
def test_steps_that_the_loss_scale_skips_change_nothing():
    plain, ahead = (train_at_depth("recent", depth, optimizer=overflow()) for depth in (0, 1))
    assert differences(plain, ahead) == []
    assert plain["records"][0]["step"] < 2 * STEPS


class Meddle(tf.keras.callbacks.Callback):
    """Removes rows, evicts, imports and saves between batches."""

    def __init__(self, folder):
        super().__init__()
        self._folder = folder

    def on_train_batch_end(self, batch, logs=None):
        (collection,) = collections_of(self.model)
        for table in collection.tables:
            records = table.export()
            if batch % 4 == 0:
                table.remove(records.keys[::3])
            elif batch % 4 == 1:
                table.import_(records._replace(rows=records.rows + 1.0))
            elif batch % 4 == 2:
                table.evict()
        if batch % 4 == 3 and self._folder is not None:
            self.model.save_weights(self._folder / "weights")
            if batch % 8 == 3:
                self.model.load_weights(self._folder / "weights")


# Quick: "policies" has a table of each.
@pytest.mark.parametrize(
    ("kind", "depth"),
    slow_but([("policies", 2)], [("counted", 1), ("by chance", 2), ("expiring", 1), ("policies", 2)]),
)
def test_callbacks_that_change_tables_are_seen(kind, depth, tmp_path):
    plain = train_at_depth(kind, 0, callbacks=[Meddle(tmp_path)])
    ahead = train_at_depth(kind, depth, callbacks=[Meddle(tmp_path)])
    assert differences(plain, ahead) == []


@pytest.mark.shown_by(
    "models/training/pipeline/test_step_number.py::test_a_training_that_a_checkpoint_continues_draws_as_one_without_a_break"
)
def test_a_checkpoint_of_mid_epoch_has_the_bytes_of_depth_0(tmp_path):
    saved = []
    for depth in (0, 2):
        folder = tmp_path / str(depth)
        train_at_depth("recent", depth, callbacks=[ShardedCheckpoint(folder, every=5)], epochs=1)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
        saved.append({str(path.relative_to(folder)): path.read_bytes() for path in files})
    assert saved[0].keys() == saved[1].keys()
    tables = [name for name in saved[0] if "/dense" not in name and not name.endswith(".json")]
    assert [name for name in tables if saved[0][name] != saved[1][name]] == []


class Interrupt(tf.keras.callbacks.Callback):
    """Ends training like a killed process, after some batches of the second epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == STEPS + 7:
            raise KeyboardInterrupt


def make_without_chance(kind):
    random.seed(5)  # Keras draws seeds from it
    return make_model(kind, dropout=0.0)


# Quick: pipeline/test_step_number.py,
# test_a_training_that_a_checkpoint_continues_draws_as_one_without_a_break.
@pytest.mark.slow
def test_a_training_that_a_checkpoint_continues_equals_one_without_a_break(tmp_path):
    def fit(folder, depth, *callbacks):
        model, batches = make_without_chance("recent")
        model.compile("adam", "mse", pipeline=gmeta.Pipeline(depth=depth))
        saves = ShardedCheckpoint(folder, every=5)
        saves.fit(model, own_data(batches), epochs=2, verbose=0, callbacks=list(callbacks))
        table = collections_of(model)[0].tables[0]
        return [weight.numpy() for weight in model.weights], sorted_records(table)

    plain = fit(tmp_path / "plain", 0)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "ahead", 2, Interrupt())
    assert differences(list(plain), list(fit(tmp_path / "ahead", 2))) == []


def test_training_on_batches_needs_no_read_ahead():
    (one, batches), (other, _) = (make_without_chance("ctr") for _ in range(2))
    one.compile("adam", "mse")
    other.compile("adam", "mse", pipeline=gmeta.Pipeline())
    for batch in itertools.islice(batches(), 0, None, 3):  # of equal sizes: another one is traced anew
        assert one.train_on_batch(*batch) == other.train_on_batch(*batch)


# Quick: tests/callbacks/test_timed_models.py, test_losses_are_those_of_a_training_that_is_not_measured.
@pytest.mark.slow
def test_times_of_a_step_are_measured():
    times = StepTimes(every=3, print_fn=lambda text: None)
    plain, ahead = (train_at_depth("ctr", depth, callbacks=[times]) for depth in (0, 1))
    assert differences(plain, ahead) == []
    assert times.times.steps > 3


def test_a_model_can_be_saved_with_its_pipeline(tmp_path):
    model, batches = make_model("ctr")
    model.compile("adam", "mse", pipeline=gmeta.Pipeline(depth=2))
    model.fit(own_data(batches), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert loaded.get_compile_config()["pipeline"] == gmeta.Pipeline(depth=2)


class Chained(Model):
    """Its second lookup depends on the rows of the first, on a variable, or on chance."""

    def __init__(self, on):
        super().__init__()
        features = [FeatureConfig("item", TableConfig("item", 4))]
        self.first, self.second = (
            EmbeddingCollection(features, name="first"),
            EmbeddingCollection(features, name="second"),
        )
        self.on, self.shift = on, tf.Variable(1, dtype=tf.int64, trainable=False, name="shift")

    def call(self, x, training=None):
        rows, item = self.first(x, training=training)["item"], x["item"]
        if self.on == "rows":
            item = tf.cast(tf.abs(rows[:, 0]) * 100, tf.int64)
        elif self.on == "variable":
            item = item + self.shift
        elif self.on == "chance":
            item = tf.random.uniform(tf.shape(item), 0, 9, tf.int64)
        elif self.on == "python":
            item = tf.numpy_function(lambda ids: ids + 1, [item], tf.int64)
        return tf.reduce_sum(
            rows + self.second({"item": tf.ensure_shape(item, [None])}, training=training)["item"], axis=1
        )


@pytest.mark.parametrize(
    ("on", "what"),
    [
        ("rows", "the rows of the lookup in 'first'"),
        ("variable", "the variable 'shift:0'"),
        ("chance", "random numbers"),
        ("python", "a function with effects"),
    ],
)
def test_ids_that_depend_on_more_than_the_batch_are_refused(on, what):
    model = Chained(on)
    model.compile("adam", "mse", pipeline=gmeta.Pipeline())
    with pytest.raises(ConfigError, match=rf"looks up in 'second' depend on {what}.*lookup_inputs"):
        model.fit({"item": np.arange(8)}, np.zeros(8), verbose=0)


def test_a_model_may_say_what_it_looks_up():
    class Told(Chained):
        def lookup_inputs(self, data):
            x = data[0]
            return [(self.first, x), (self.second, {"item": x["item"] + 1})]

    model = Told("python")
    model.compile("adam", "mse", pipeline=gmeta.Pipeline())
    model.fit({"item": np.arange(8)}, np.zeros(8), verbose=0)
    assert sorted(model.second.tables[0].export().keys.numpy()) == list(range(1, 9))


@pytest.mark.parametrize(
    ("told", "what"),
    [
        (lambda model, x: [(model.second, x), (model.first, x)], "lookup 1 .* foreseen in 'second'"),
        (
            lambda model, x: [(model.first, x), (model.second, x), (model.first, x)],
            "made none of the last ones, in 'first'",
        ),
        (lambda model, x: [], "looks up none"),
    ],
)
def test_a_model_that_says_something_else_than_it_does_is_refused(told, what):
    class Wrong(Chained):
        def lookup_inputs(self, data):
            return told(self, data[0])

    model = Wrong("nothing")
    model.compile("adam", "mse", pipeline=gmeta.Pipeline())
    with pytest.raises(ConfigError, match=what):
        model.fit({"item": np.arange(8)}, np.zeros(8), verbose=0)


def test_what_leaves_a_function_as_int32_enters_as_it_was(monkeypatch):
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(steps_ahead, "on_gpu", lambda: True)
    assert differences(at_depth_0("ctr"), train_at_depth("ctr", 2)) == []


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ConfigError, match="depth must be 0, 1 or 2, got 3"):
        gmeta.Pipeline(depth=3)
    model, _ = make_model("ctr")
    with pytest.raises(ConfigError, match=r"pipeline must be a gmeta\.Pipeline, got 1"):
        model.compile("adam", "mse", pipeline=1)

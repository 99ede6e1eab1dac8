"""Micro-batches change when rows travel and when gradients are summed, and nothing that is learnt.

The strict comparisons use SGD. Adam divides a gradient by its own size, so where a gradient is nearly zero
its first steps turn the rounding of a sum into a step of full length.
"""

from __future__ import annotations

import functools
import itertools
import random
import time

import numpy as np
import pytest
import tensorflow as tf

import gmeta
from gmeta.callbacks import StepTimes
from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.layers.exchange import frozen_window
from gmeta.models import Model
from support.cells import slow_but
from support.pipeline_runs import distances, make_model, own_data, train_to_compare_sums

STRICT = 1e-6
CASES = [
    ("ctr", 8, 0),
    ("ctr", 2, 2),
    ("towers", 4, 1),
    ("maml", 2, 1),
    ("grm", 2, 0),
    ("next item of positions", 2, 1),
]
EVERY = [
    (kind, micro_batches, depth)
    for kind in (
        *("ctr", "towers", "maml", "rows", "grm", "drawn"),
        *("next item", "next item of users", "next item of positions"),
    )
    for micro_batches in (2, 4, 8)
    for depth in (0, 1, 2)
    if (kind, micro_batches, depth) not in CASES
]
# Quick: ctr-2-2 for other numbers and for two lookups, and grm for all that reads sequences; for what a step
# draws, pipeline/test_step_number.py, test_micro_batches_of_a_step_have_its_number.
QUICK = [("ctr", 2, 2), ("maml", 2, 1), ("grm", 2, 0)]


def train(kind, depth=0, micro_batches=1, *, fit=None, **settings):
    return train_to_compare_sums(
        kind, depth, micro_batches, {"steps_per_epoch": 5, **(fit or {})}, **settings
    )


@functools.cache
def undivided(kind):
    return train(kind)


def far(one, other, limit=STRICT):
    return {name: apart for name, apart in distances(one, other).items() if not apart <= limit}


@pytest.mark.parametrize(
    ("kind", "micro_batches", "depth"),
    slow_but(QUICK, [*CASES, *EVERY]),
)
@pytest.mark.shown_by(case="ctr-2-2")
def test_a_step_of_micro_batches_is_the_step_of_the_batch(kind, micro_batches, depth):
    found = train(kind, depth, micro_batches)
    assert far(undivided(kind), found) == {}
    assert all(np.isfinite(found["history"]["loss"]))


# Quick: "policies" has a table of each.
@pytest.mark.parametrize(
    "kind", slow_but(["policies"], ["by chance", "recent", "counted", "frequent", "expiring", "policies"])
)
def test_admissions_evictions_frequencies_and_statistics_are_exactly_those_of_the_batch(kind):
    assert far(train(kind, fit={"steps_per_epoch": 14}), train(kind, 0, 3, fit={"steps_per_epoch": 14})) == {}


def test_a_loss_that_is_a_sum_is_refused():
    model, _ = make_model("ctr")
    loss = tf.keras.losses.MeanSquaredError(reduction="sum")
    with pytest.raises(ConfigError, match=r"micro_batches makes means .* reduced by SUM"):
        model.compile("sgd", loss, pipeline=gmeta.Pipeline(depth=0, micro_batches=2))


@pytest.mark.parametrize("kind", ["ctr", pytest.param("maml", marks=pytest.mark.slow)])
def test_gradients_that_leave_too_early_are_noticed(kind, monkeypatch):
    monkeypatch.setattr(frozen_window, "leaves_after", lambda keys: keys.first)
    assert far(undivided(kind), train(kind, 0, 2), limit=1e-3) != {}


SETTINGS = {
    "together": {
        "optimizer": lambda: tf.keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.1),
        "accumulate_steps": 2,
        "metrics": ["mae"],
        "weighted_metrics": ["mse"],
        "fit": {"steps_per_epoch": 4, "validation_freq": 1, "validation_steps": 2},
    },
    "accumulation": {"accumulate_steps": 3},
    "eager": {"run_eagerly": True},
    "several steps a call": {"steps_per_execution": 2, "fit": {"steps_per_epoch": 4}},
    "Adagrad": {"optimizer": lambda: tf.keras.optimizers.Adagrad(0.05)},
    "momentum": {"optimizer": lambda: tf.keras.optimizers.SGD(0.05, momentum=0.9)},
    "clipping": {"optimizer": lambda: tf.keras.optimizers.SGD(0.05, global_clipnorm=0.1)},
    "metrics": {"metrics": ["mae"], "weighted_metrics": ["mse"]},
    "validation": {"fit": {"validation_freq": 1, "validation_steps": 2}},
}


# Quick: "together" has momentum for Adagrad, too; test_pipeline.py has several steps a call.
@pytest.mark.parametrize("name", slow_but(["together", "eager"], SETTINGS))
@pytest.mark.shown_by(case="eager")
def test_settings_of_a_run_work_with_micro_batches(name):
    def settings():
        given = dict(SETTINGS[name])
        fit = dict(given.pop("fit", {}))
        if "validation_freq" in fit:
            fit["validation_data"] = own_data(make_model("recent")[1])
        if "optimizer" in given:
            given["optimizer"] = given["optimizer"]()
        return {"fit": fit, **given}

    assert far(train("recent", **settings()), train("recent", 0, 3, **settings())) == {}


def overflow():
    """A loss scale that grows every other step, so that gradients overflow and steps are skipped."""
    return tf.keras.mixed_precision.LossScaleOptimizer(
        tf.keras.optimizers.SGD(0.05), initial_scale=2.0**126, dynamic_growth_steps=2
    )


def test_a_step_whose_scaled_gradients_overflow_is_skipped():
    """Gradients of a micro-batch are means over fewer samples, so they may overflow a step earlier."""
    found = train("ctr", 0, 2, optimizer=overflow(), fit={"steps_per_epoch": 14})
    assert 0 < found["records"][0]["step"] < 14
    assert all(np.isfinite(weight).all() for weight in found["dense"])


def test_training_on_batches_uses_micro_batches():
    models = []
    for _ in range(2):
        random.seed(5)  # Keras draws seeds from it
        model, batches = make_model("ctr", dropout=0.0)
        models.append(model)
    one, other = models
    one.compile(tf.keras.optimizers.SGD(0.05), "mse")
    other.compile(tf.keras.optimizers.SGD(0.05), "mse", pipeline=gmeta.Pipeline(micro_batches=2))
    for batch in itertools.islice(batches(), 0, 6, 3):  # of equal sizes: another one is traced anew
        np.testing.assert_allclose(one.train_on_batch(*batch), other.train_on_batch(*batch), rtol=1e-5)
    assert far([w.numpy() for w in one.weights], [w.numpy() for w in other.weights]) == {}


# Quick: tests/callbacks/test_timed_models.py, test_what_a_pipeline_fetches_is_drawn_beside_the_step[1-2].
@pytest.mark.slow
def test_times_of_a_step_are_measured():
    times = StepTimes(every=2, print_fn=lambda text: None)
    assert far(undivided("ctr"), train("ctr", 0, 2, callbacks=[times])) == {}
    assert times.times.steps > 1


# Quick: test_pipeline.py, test_a_model_can_be_saved_with_its_pipeline.
@pytest.mark.slow
def test_a_model_can_be_saved_with_its_micro_batches(tmp_path):
    model, batches = make_model("ctr")
    model.compile("adam", "mse", pipeline=gmeta.Pipeline(depth=0, micro_batches=2))
    model.fit(own_data(batches), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert loaded.get_compile_config()["pipeline"] == gmeta.Pipeline(depth=0, micro_batches=2)


class Reader(Model):
    """It reads two features of a table, and learns from one; it also has a frozen table."""

    def __init__(self):
        super().__init__()
        shared = TableConfig("shared", 4)
        self.learnt = EmbeddingCollection(
            [FeatureConfig("a", shared), FeatureConfig("b", shared)], name="learnt"
        )
        self.frozen = EmbeddingCollection([FeatureConfig("a", TableConfig("frozen", 4))], name="frozen")
        self.frozen.trainable = False
        self.dense = tf.keras.layers.Embedding(50, 4)

    def call(self, x, training=None):
        read, still = self.learnt(x, training=training), self.frozen(x, training=training)
        return tf.reduce_sum(read["a"] * (1.0 + self.dense(x["b"])) + still["a"], axis=1, keepdims=True)


def test_rows_without_a_gradient_stay_as_they_are():
    def run(micro_batches):
        random.seed(1)  # Keras draws seeds from it
        tf.random.set_seed(1)
        model = Reader()
        model.compile(
            tf.keras.optimizers.SGD(0.1, momentum=0.9),
            "mse",
            pipeline=gmeta.Pipeline(depth=0, micro_batches=micro_batches),
            run_eagerly=True,
        )
        draw = np.random.default_rng(3)
        x = {"a": draw.integers(0, 20, 60), "b": draw.integers(15, 50, 60)}
        model.fit(x, draw.normal(size=[60, 1]).astype(np.float32), batch_size=16, shuffle=False, verbose=0)
        (table,) = model.learnt.tables
        return {
            "weights": [w.numpy() for w in model.weights],
            "statistics": [int(count) for count in table.statistics()],
            "rows": table.lookup_keys(np.arange(50), insert=False).numpy(),
        }

    whole, divided = run(1), run(4)
    assert far(whole, divided) == {}


class Noting(tf.keras.layers.Layer):
    """It notes when its forward and its backward pass run; TensorFlow sees no effect that it would order."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def call(self, x):
        def passes(what, seconds):
            def note(values):
                self.seen.append(what)
                time.sleep(seconds)
                return values

            return lambda values: tf.numpy_function(note, [values], tf.float32, stateful=False)

        @tf.custom_gradient
        def noted(x):
            return tf.ensure_shape(passes("forward", 0.0)(x), x.shape), passes("backward", 0.02)

        return noted(x)


def test_a_micro_batch_begins_when_the_one_before_has_ended():
    seen = []
    item, number = tf.keras.Input([], name="item", dtype=tf.int64), tf.keras.Input([1], name="number")
    rows = EmbeddingCollection([FeatureConfig("item", TableConfig("item", 4))])({"item": item})["item"]
    hidden = Noting(seen)(tf.keras.layers.Dense(4)(number))  # it depends on no row
    model = Model({"item": item, "number": number}, tf.keras.layers.Dot(1)([rows, hidden]))
    model.compile("sgd", "mse", pipeline=gmeta.Pipeline(depth=0, micro_batches=4))
    model.fit({"item": np.arange(8), "number": np.ones([8, 1])}, np.zeros([8, 1]), batch_size=8, verbose=0)
    assert seen == ["forward", "backward"] * 4


def test_a_batch_that_cannot_be_divided_is_refused():
    model, batches = make_model("ctr")
    model.compile("sgd", "mse", pipeline=gmeta.Pipeline(depth=0, micro_batches=2), run_eagerly=True)
    x, y = next(batches())
    with pytest.raises(ConfigError, match="first dimension, which its parts don't have in common"):
        model.train_step((x, y[:-1]))
    with pytest.raises(ConfigError, match="a part of this one is a single number"):
        model.train_step(({**x, "temperature": tf.constant(1.0)}, y))


class Twice(Model):
    """It looks up once more than it says."""

    def __init__(self):
        super().__init__()
        self.items = EmbeddingCollection([FeatureConfig("item", TableConfig("item", 4))], name="items")

    def lookup_inputs(self, data):
        return [(self.items, data[0])]

    def call(self, x, training=None):
        rows = self.items(x, training=training)["item"] + self.items(x, training=training)["item"]
        return tf.reduce_sum(rows, axis=1)


def test_a_lookup_that_nobody_foresaw_is_refused():
    model = Twice()
    model.compile("sgd", "mse", pipeline=gmeta.Pipeline(depth=0, micro_batches=2))
    with pytest.raises(ConfigError, match="'items' is looked up where micro-batches can't bring its rows"):
        model.fit({"item": np.arange(8)}, np.zeros(8), verbose=0)


@pytest.mark.parametrize("number", [0, 9])
def test_numbers_of_micro_batches_that_mean_nothing_are_refused(number):
    with pytest.raises(ConfigError, match=f"micro_batches must be .*{number}"):
        gmeta.Pipeline(micro_batches=number)

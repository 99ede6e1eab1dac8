"""ProgressiveEvaluation: it sees each batch as predicted before its step, and training stays what it is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

import gmeta
from gmeta.callbacks import ProgressiveEvaluation
from gmeta.core.errors import ConfigError, DataError
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.metrics.guard import Guard
from gmeta.metrics.progressive import ProgressiveMetrics
from gmeta.models import Model
from support.process_ranks import run_ranks

SECOND, SIZE, BATCH = 1_000_000, 480, 32
LOSS = tf.keras.losses.BinaryCrossentropy(from_logits=True)


class Clicks(Model):
    def __init__(self, rate=0.0, norm=False):
        super().__init__(name="clicks")
        features = [FeatureConfig(name, dim=4) for name in ("user", "item")]
        self.collection = EmbeddingCollection(features, optimizer=gmeta.optimizers.Adam(0.05), seed=1)
        self.drop = tf.keras.layers.Dropout(rate, seed=3)
        self.norm = tf.keras.layers.BatchNormalization() if norm else None
        self.dense = tf.keras.layers.Dense(1, kernel_initializer=tf.keras.initializers.GlorotUniform(5))

    def call(self, inputs, training=False):
        ids = {name: inputs[name] for name in ("user", "item")}
        x = tf.concat([*self.collection(ids, training=training).values()], axis=-1)
        x = self.drop(x if self.norm is None else self.norm(x, training=training), training=training)
        return self.dense(x)


def made(compiled=None, **options):
    model = Clicks(**options)
    model.compile(tf.keras.optimizers.Adam(0.05), LOSS, **(compiled or {}))
    return model


def columns(size=SIZE):
    random = np.random.default_rng(0)
    user, item = random.integers(0, 20, size), random.integers(0, 30, size)
    x = {"user": user, "item": item, "time": np.arange(size) * SECOND, "fixes": random.random(size) < 0.1}
    y = (random.random(size) < np.where((user + item) % 3, 0.2, 0.8)).astype(np.float32)
    return x, y, random.choice([0.0, 1.0, 1.0, 2.0], size).astype(np.float32)


def stream(batch=BATCH):
    return tf.data.Dataset.from_tensor_slices(columns()).batch(batch)


def evaluated(model, window="60s", **options):
    return ProgressiveEvaluation(model, window, users="user", times="time", corrects="fixes", **options)


class PredictsBefore(tf.keras.callbacks.Callback):
    """Predicts each batch before its step."""

    def __init__(self):
        super().__init__()
        self.batches, self.scores = list(stream()), []

    def on_train_batch_begin(self, batch, logs=None):
        self.scores.append(self.model.predict_on_batch(self.batches[batch][0]))


@pytest.mark.parametrize(
    ("options", "compiled"),
    [
        ({}, {}),
        ({"rate": 0.5, "norm": True}, {}),
        ({"rate": 0.5}, {"pipeline": gmeta.Pipeline(depth=1)}),
        ({}, {"run_eagerly": True}),
    ],
)
def test_windows_are_of_predictions_before_the_step(options, compiled):
    model, before = made(compiled, **options), PredictsBefore()
    progressive = evaluated(model, every=4)
    model.fit(stream(), callbacks=[before, progressive], verbose=0)
    x, y, weights = columns()
    oracle = ProgressiveMetrics("60s", logits=True)
    wanted = {"weights": weights, "users": x["user"], "times": x["time"], "corrects": x["fixes"]}
    ended = oracle.update(y, np.concatenate(before.scores), **wanted)
    assert len(ended) == len(progressive.metrics.windows) == SIZE // 60 - 1
    for found, expected in zip(progressive.metrics.windows, ended, strict=True):
        assert vars(found) == pytest.approx(vars(expected), rel=1e-5)


@pytest.mark.shown_by(case="pipeline2")
@pytest.mark.parametrize(
    "pipeline", [None, gmeta.Pipeline(depth=1), gmeta.Pipeline(depth=2, micro_batches=2)]
)
def test_training_is_the_same_to_the_bit(pipeline):
    def trained(watched):
        tf.random.set_seed(1)
        model = made({"pipeline": pipeline}, rate=0.5)
        model.fit(stream(), callbacks=[evaluated(model)] if watched else [], epochs=2, verbose=0)
        (table,) = model.collection.tables
        exported = table.export_shards(0, 1024)
        order = np.argsort(exported.keys)
        return [*model.get_weights(), np.asarray(exported.keys)[order], np.asarray(exported.rows)[order]]

    for one, other in zip(trained(True), trained(False), strict=True):
        np.testing.assert_array_equal(one, other)


def test_windows_do_not_depend_on_when_samples_leave_the_queue():
    found = []
    for options, compiled in (({"every": 1}, {}), ({"every": 7}, {}), ({}, {"steps_per_execution": 5})):
        model = made(compiled)
        progressive = evaluated(model, 50, **options)
        model.fit(stream(), callbacks=[progressive], verbose=0)
        found.append(repr(progressive.metrics.windows))
    assert found[0] == found[1] == found[2] != "[]"


def test_a_restored_evaluation_continues_its_windows():
    model, ended = made(), []
    whole = evaluated(model, 70, on_window=ended.append)
    model.fit(stream(), callbacks=[whole], epochs=2, verbose=0)
    again = made()
    first = evaluated(again, 70)
    again.fit(stream(), callbacks=[first], verbose=0)
    second = evaluated(again, 70)
    second.restore(first.state())
    again.fit(stream(), callbacks=[second], verbose=0)
    assert repr(second.metrics.windows) == repr(whole.metrics.windows) == repr(ended)
    assert second.state() == whole.state()


def test_a_broken_rule_ends_training():
    model = made()
    guard = Guard(stop_if=["auc > 1"], fall_back_if=["log_loss > 0 for 2 windows"], most_fall_backs=1)
    progressive = evaluated(model, 64, every=1, guard=guard)
    model.fit(stream(), callbacks=[progressive], epochs=9, verbose=0)
    assert int(model.optimizer.iterations) < SIZE // BATCH
    assert (progressive.decision.action, progressive.decision.since, progressive.fall_backs) == (
        "fall back",
        0,
        1,
    )
    state = progressive.state()
    model.fit(stream(), callbacks=[progressive], epochs=9, verbose=0)
    assert (progressive.decision.action, progressive.fall_backs) == ("stop", 1)
    assert "after 1 fall-backs" in str(progressive.decision)
    other = evaluated(model, 64)
    other.restore(state)
    assert other.fall_backs == 1


def test_one_of_several_outputs_is_evaluated():
    class Two(Clicks):
        def call(self, inputs, training=False):
            click = super().call(inputs, training=training)
            return {"click": tf.sigmoid(click), "like": -click}

    model = Two()
    model.compile("adam", {"click": "binary_crossentropy", "like": LOSS})
    x, y, _ = columns()
    labels = {"click": y, "like": 1 - y}
    for output, logits in (("click", False), ("like", True)):
        progressive = ProgressiveEvaluation(model, 60, users=lambda x: x["user"], output=output)
        model.fit(x, labels, batch_size=BATCH, callbacks=[progressive], verbose=0)
        assert progressive.metrics.logits is logits
        assert 0 < progressive.metrics.windows[0].gauc < 1


def test_a_fit_that_fails_leaves_no_observer():
    class Fails(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise DataError("no more")

    model = made()
    with pytest.raises(DataError):
        model.fit(stream(), callbacks=[evaluated(model), Fails()], verbose=0)
    assert model.observer is None
    model.fit(stream(), verbose=0)


class OwnLearning(Clicks):
    def learn(self, data):
        loss = tf.reduce_mean(self(data[0], training=True) ** 2)
        return loss, tf.constant(BATCH), lambda: {"loss": loss}


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (made, {"window": "1h"}, "give times"),
        (made, {"window": 9, "users": "person"}, "users='person' is no column"),
        (made, {"window": 9, "every": 0}, "every must be"),
        (lambda: tf.keras.Sequential(), {"window": 9}, "no gmeta.models.Model"),
        (Clicks, {"window": 9}, "call compile before"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(make, options, message):
    def fit():
        model = make()
        model.fit(stream(), callbacks=[ProgressiveEvaluation(model, **options)], verbose=0)

    with pytest.raises(ConfigError, match=message):
        fit()


def test_models_that_report_no_predictions_are_refused():
    model = OwnLearning()
    model.compile("sgd", LOSS)
    with pytest.raises(ConfigError, match="reports no predictions"):
        model.fit(stream(), callbacks=[ProgressiveEvaluation(model, 9)], verbose=0)
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match="logits=True or logits=False"):
        ProgressiveEvaluation(model, 9)


def fit_on_ranks(data):
    x, y, weights = data
    size = gmeta.core.collectives.world().size
    model = made()
    progressive = evaluated(model, 60, every=3)
    model.fit(
        tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(BATCH // size),
        callbacks=[progressive],
        verbose=0,
    )
    return [vars(window) for window in progressive.metrics.windows], progressive.state()


@pytest.mark.ranks
def test_ranks_evaluate_the_samples_of_all():
    size = SIZE - BATCH // 2  # so that the data of a rank end earlier
    data = tuple(tf.nest.map_structure(lambda each: each[:size], columns()))
    (alone, _), ((one, state), (other, its)) = fit_on_ranks(data), run_ranks(fit_on_ranks, 2, data)
    assert repr(one) == repr(other)
    assert state == its
    assert len(one) == len(alone) > 4
    for found, expected in zip(one, alone, strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)
        assert not math.isnan(found["gauc"])

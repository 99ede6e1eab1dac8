"""An overridden train step applies the arguments of `compile`, or is refused before it has any effect."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import gmeta
from gmeta.callbacks import StepTimes
from gmeta.core.errors import ConfigError, NotFiniteError
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig, record_lookups
from gmeta.models import Model
from support.cells import slow_but

X, Y = {"item": np.arange(24) % 7}, np.ones([24, 1], np.float32)


class Plain(Model):
    def __init__(self):
        super().__init__()
        table = TableConfig("item", 4, initializer=Normal(0.0, 0.3))
        self.items = EmbeddingCollection([FeatureConfig("item", table)], optimizer=gmeta.optimizers.SGD(0.1))
        self.head = tf.keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x, training=None):
        return self.head(self.items(x, training=training)["item"])


class Alone(Plain):
    """It makes the whole step itself."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape, record_lookups(tape) as lookups:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        found = tape.gradient(loss, [*weights, *lookups.rows])
        self.optimizer.apply_gradients(zip(found[: len(weights)], weights, strict=True))
        lookups.apply_gradients(found[len(weights) :])
        return {"loss": loss}


class Joint(Plain):
    """It makes the whole step itself, with the model's optimizer of dense weights and tables."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape, record_lookups(tape) as lookups:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, [*weights, *lookups.rows])
        self.joint_optimizer.step(gradients, weights, lookups, samples=tf.shape(y)[0])
        return {"loss": loss}


class Undefined(Joint):
    """The gradient of item 3 is NaN, and the loss is 0."""

    def call(self, x, training=None):
        rows = self.items(x, training=training)["item"]
        norm = tf.norm(tf.where((x["item"] == 3)[:, tf.newaxis], rows - tf.stop_gradient(rows), rows), axis=1)
        return self.head(norm[:, tf.newaxis])


class Unrecorded(Plain):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        self.optimizer.minimize(loss, self.trainable_variables, tape)
        return {"loss": loss}


class Around(Plain):
    """It does something of its own around the step."""

    def __init__(self):
        super().__init__()
        self.seen = tf.Variable(0, trainable=False)

    def train_step(self, data):
        self.seen.assign_add(1)
        return super().train_step(data)


def fit(model, callbacks=(), fit=None, **settings):
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", **settings)
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, callbacks=list(callbacks), **(fit or {}))
    return [weight.numpy() for weight in model.trainable_variables]


IGNORED = {
    "accumulation": {"accumulate_steps": 3},
    "micro-batches": {"pipeline": gmeta.Pipeline(depth=0, micro_batches=2)},
    "accumulation, ahead": {"accumulate_steps": 3, "pipeline": gmeta.Pipeline(depth=1)},
    "divided": {"shard_optimizer": True},
    "eager": {"accumulate_steps": 3, "run_eagerly": True},
}


@pytest.mark.parametrize("name", IGNORED)
def test_a_step_that_ignores_a_setting_is_refused(name):
    model = Alone()
    settings = "accumulate_steps=3|micro_batches=2|shard_optimizer=True"
    told = rf"compile received ({settings}), and Alone.*call super\(\)\.train_step"
    with pytest.raises(ConfigError, match=told):
        fit(model, **IGNORED[name])
    # Eager steps have no trace that could be checked before they run.
    assert int(model.optimizer.iterations) == ("run_eagerly" in IGNORED[name])
    with pytest.raises(ConfigError, match="ignores"):
        model.train_on_batch(X, Y)


def test_a_step_that_knows_no_micro_batches_cannot_look_up_what_was_fetched_for_them():
    with pytest.raises(ConfigError, match="where micro-batches can't bring its rows: outside of"):
        fit(Alone(), pipeline=gmeta.Pipeline(depth=1, micro_batches=2))


# Quick: the parts of "accumulation, ahead", and test_a_step_of_its_own_may_fetch_ahead.
@pytest.mark.parametrize("name", slow_but(["accumulation", "micro-batches"], IGNORED))
@pytest.mark.shown_by(case="accumulation")
def test_a_step_around_that_of_the_base_class_is_as_good(name):
    around = Around()
    times = StepTimes(every=2, print_fn=lambda text: None)
    ours, plain = fit(around, [times], **IGNORED[name]), fit(Plain(), **IGNORED[name])
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(around.seen) == 6
    assert "train_step" not in vars(around)


def test_a_step_that_is_refused_passes_once_it_is_compiled_without_the_setting():
    model = Alone()
    with pytest.raises(ConfigError):
        fit(model, accumulate_steps=3)
    fit(model)
    assert int(model.optimizer.iterations) == 6


def test_a_step_of_its_own_may_fetch_ahead():
    ahead, plain = fit(Alone(), pipeline=gmeta.Pipeline(depth=1)), fit(Alone())
    for one, other in zip(ahead, plain, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("accumulate_steps", [1, 3])
@pytest.mark.shown_by(case="3")
def test_a_step_made_by_the_joint_optimizer_is_that_of_fit(accumulate_steps):
    own, plain = Joint(), Plain()
    settings = {"accumulate_steps": accumulate_steps}
    for mine, other in zip(fit(own, **settings), fit(plain, **settings), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)
    np.testing.assert_allclose(own.items(X)["item"], plain.items(X)["item"], rtol=1e-6)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_step_by_the_joint_optimizer_refuses_gradients_that_are_not_finite(run_eagerly):
    model = Undefined()
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
    with pytest.raises(NotFiniteError, match="NaN or infinite for id 3 of table 'item', and nothing was upd"):
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    assert np.isfinite(model.items.tables[0].export().rows).all()


def test_a_step_without_a_recording_is_told_how_to_make_one():
    with pytest.raises(
        ConfigError, match=r"custom loop or train_step.*record_lookups\(tape\).*joint_optimizer.*learn"
    ):
        fit(Unrecorded())

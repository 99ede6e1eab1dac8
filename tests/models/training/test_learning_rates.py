"""Schedules of the learning rate: their values, tables that follow them, and the callbacks before them."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import gmeta
from gmeta.checkpoint import ShardedCheckpoint
from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.models import Model
from gmeta.optimizers import OneCycle, Warmup
from gmeta.training import joint_optimizer


class Rates(tf.keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(np.float32(self.model.optimizer.learning_rate))


def zeros(batches):
    data = tf.data.Dataset.from_tensor_slices((np.zeros((batches, 2)), np.zeros((batches, 1))))
    return data.batch(1)


def fit(rate, *callbacks, epochs=4, batches=5):
    model, rates = tf.keras.Sequential([tf.keras.layers.Dense(1)]), Rates()
    model.compile(tf.keras.optimizers.SGD(rate), "mse")
    model.fit(zeros(batches), epochs=epochs, verbose=0, callbacks=[*callbacks, rates])
    return rates.seen


def one_cycle(step, steps, warm_up):
    """The share of the callback of earlier releases, in Python's numbers."""
    rise = warm_up * steps
    fallen = min(max(step - rise, 0.0) / (steps - rise), 1.0)
    return min((step + 1) / rise, 0.5 * (1 + math.cos(math.pi * fallen)))


def warmup(step, steps, ranks):
    return 1 / ranks + (1 - 1 / ranks) * min(step, steps) / steps


def rates_of(share, rate, count):
    """The rates that the callbacks assigned to the optimizer's float32 variable."""
    return np.array([np.float32(float(np.float32(rate)) * share(step)) for step in range(count)])


@pytest.fixture
def three_ranks(monkeypatch):
    world = SimpleNamespace(shares=SimpleNamespace(total=3))
    monkeypatch.setattr(joint_optimizer, "collectives", SimpleNamespace(world=lambda: world))


@pytest.mark.parametrize("warm_up", [0.3, 0.5])
@pytest.mark.parametrize(("rate", "steps"), [(0.2, 20), (5e-3, 1000), (0.1, 1)])
def test_one_cycle_is_the_callbacks_bit_for_bit(rate, steps, warm_up):
    made = tf.function(OneCycle(rate, steps, warm_up))
    seen = np.array([made(tf.constant(step, tf.int64)) for step in range(steps + 3)])
    np.testing.assert_array_equal(
        seen, rates_of(lambda step: one_cycle(step, steps, warm_up), rate, steps + 3)
    )
    assert seen[-1] == 0.0
    assert seen.dtype == np.float32


@pytest.mark.parametrize(("rate", "steps"), [(0.2, 7), (1e-3, 500)])
def test_a_warmup_is_the_callbacks_bit_for_bit(rate, steps):
    made = tf.function(Warmup(rate, steps, start=1 / 3))
    seen = np.array([made(tf.constant(step, tf.int64)) for step in range(steps + 3)])
    np.testing.assert_array_equal(seen, rates_of(lambda step: warmup(step, steps, 3), rate, steps + 3))


@pytest.mark.parametrize("made", [OneCycle(0.2, 20), Warmup(0.2, 4, 0.25)])
def test_a_schedule_is_saved_with_its_optimizer(made):
    optimizer = tf.keras.optimizers.Adam(made)
    again = tf.keras.optimizers.deserialize(tf.keras.optimizers.serialize(optimizer))
    assert type(again._learning_rate) is type(made)
    assert again._learning_rate.get_config() == made.get_config()


def model_of(rate):
    x = {"user": tf.keras.Input([], name="user", dtype=tf.int64)}
    vectors = EmbeddingCollection([FeatureConfig("user", dim=1)], name="users")(x)
    model = Model(x, tf.keras.layers.Dense(1, kernel_initializer="ones")(vectors["user"]))
    model.compile(tf.keras.optimizers.Adam(rate), "mse")
    return model


USERS = tf.data.Dataset.from_tensor_slices(({"user": [[1, 2], [2, 3]] * 5}, [[1.0, 0.0], [1.0, 3.0]] * 5))


def rows_of(model):
    return model.get_layer("users")({"user": tf.constant([1, 2, 3])})["user"].numpy()


def test_tables_follow_a_schedule_step_by_step():
    """As they follow the same rates that are assigned one by one."""
    ours, theirs = model_of(OneCycle(0.1, 10)), model_of(0.1)
    rates = rates_of(lambda step: one_cycle(step, 10, 0.3), 0.1, 10)
    setter = tf.keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, _: theirs.optimizer.learning_rate.assign(rates[batch])
    )
    before = rows_of(ours)
    ours.fit(USERS, verbose=0, shuffle=False)
    theirs.fit(USERS, verbose=0, shuffle=False, callbacks=[setter])
    np.testing.assert_array_equal(rows_of(ours), rows_of(theirs))
    assert np.abs(rows_of(ours) - before).min() > 0.01


def test_a_resumed_run_goes_on_with_the_schedule(tmp_path):
    whole, first = model_of(OneCycle(0.1, 20)), model_of(OneCycle(0.1, 20))
    whole.fit(USERS, epochs=2, verbose=0, shuffle=False)
    first.fit(USERS, verbose=0, shuffle=False, callbacks=[ShardedCheckpoint(tmp_path)])
    resumed, rates = model_of(OneCycle(0.1, 20)), Rates()
    begin = ShardedCheckpoint(tmp_path).restore(resumed)
    resumed.fit(USERS, initial_epoch=begin, epochs=2, verbose=0, shuffle=False, callbacks=[rates])
    np.testing.assert_array_equal(rows_of(resumed), rows_of(whole))
    expected = rates_of(lambda step: one_cycle(step, 20, 0.3), 0.1, 20)
    np.testing.assert_array_equal(rates.seen, expected[10:])


def callback(name, *args, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = getattr(gmeta.callbacks, name)(*args, **options)
    assert "give the optimizer the schedule gmeta.optimizers." in str(caught[-1].message)
    return made


@pytest.mark.parametrize("warm_up", [0.3, 0.5])
def test_the_callback_of_earlier_releases_takes_the_steps_of_fit(warm_up):
    expected = rates_of(lambda step: one_cycle(step, 20, warm_up), 0.2, 20)
    np.testing.assert_array_equal(fit(0.2, callback("OneCycle", warm_up=warm_up)), expected)


def test_the_callbacks_of_earlier_releases_take_their_own_steps(three_ranks):
    expected = rates_of(lambda step: one_cycle(step, 10, 0.3), 0.2, 20)
    np.testing.assert_array_equal(fit(0.2, callback("OneCycle", 10)), expected)
    expected = rates_of(lambda step: warmup(step, 4, 3), 0.2, 20)
    np.testing.assert_array_equal(fit(0.2, callback("LearningRateWarmup", steps=4)), expected)


def test_steps_before_fit_count_for_a_callback():
    made = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    made.compile(tf.keras.optimizers.SGD(0.2), "mse")
    cycle, rates = callback("OneCycle", 10), Rates()
    for _ in range(2):
        made.fit(zeros(5), epochs=1, verbose=0, callbacks=[cycle, rates])
    np.testing.assert_array_equal(rates.seen, rates_of(lambda step: one_cycle(step, 10, 0.3), 0.2, 10))


def test_a_callback_beside_a_schedule_is_refused():
    with pytest.raises(ConfigError, match="the optimizer's rate is a CosineDecay"):
        fit(tf.keras.optimizers.schedules.CosineDecay(0.1, 10), callback("OneCycle"))


def test_a_callback_needs_steps_for_data_of_unknown_length():
    data = tf.data.Dataset.from_generator(
        lambda: iter([(np.zeros((1, 2)), np.zeros((1, 1)))]), output_types=(tf.float32, tf.float32)
    )
    made = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    made.compile(tf.keras.optimizers.SGD(0.2), "mse")
    with pytest.raises(ConfigError, match=r"give OneCycle\(steps=...\)"):
        made.fit(data, verbose=0, callbacks=[callback("OneCycle")])


@pytest.mark.parametrize(
    "make",
    [
        lambda: OneCycle(0.1, 0),
        lambda: OneCycle(0.1, 5, warm_up=0.0),
        lambda: OneCycle(0.1, 5, warm_up=1.0),
        lambda: OneCycle(-0.1, 5),
        lambda: callback("OneCycle", 0),
    ],
)
def test_numbers_out_of_their_range_are_refused(make):
    with pytest.raises(ConfigError, match="OneCycle"):
        make()


def test_numbers_of_a_warmup_out_of_their_range_are_refused():
    for given in ({"steps": 0}, {"steps": 4, "start": 1.5}):
        with pytest.raises(ConfigError, match=r"Warmup: (steps|start) must be"):
            Warmup(0.1, **given)

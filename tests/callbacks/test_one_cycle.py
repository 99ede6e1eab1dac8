"""A rate that rises and falls once: its values, where it ends, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from gmeta.callbacks import OneCycle
from gmeta.core.errors import ConfigError


def model(rate):
    made = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    made.compile(tf.keras.optimizers.SGD(rate), "mse")
    return made


class Rates(tf.keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(self.model.optimizer.learning_rate))


def fit(callback, epochs=4, batches=5, rate=0.2, **options):
    rates = Rates()
    data = tf.data.Dataset.from_tensor_slices((np.zeros((batches, 2)), np.zeros((batches, 1)))).batch(1)
    fitted = model(rate)
    fitted.fit(data, epochs=epochs, verbose=0, callbacks=[callback, rates], **options)
    return rates.seen


def formula(step, steps, warm_up):
    rise = warm_up * steps
    fall = max(step - rise, 0) / (steps - rise)
    return min((step + 1) / rise, 0.5 * (1 + math.cos(math.pi * fall)))


@pytest.mark.parametrize("warm_up", [0.3, 0.5])
def test_the_rate_is_the_formulas_over_all_epochs(warm_up):
    expected = [0.2 * formula(step, 20, warm_up) for step in range(20)]
    np.testing.assert_allclose(fit(OneCycle(warm_up=warm_up)), expected, rtol=1e-5)
    assert max(expected) > 0.19
    assert expected[-1] < 0.01


def test_steps_may_be_given_and_after_them_the_rate_is_0():
    seen = fit(OneCycle(10))
    np.testing.assert_allclose(seen[:10], [0.2 * formula(step, 10, 0.3) for step in range(10)], rtol=1e-5)
    np.testing.assert_array_equal(seen[10:], np.zeros(10))


def test_steps_before_fit_count():
    callback, made = OneCycle(10), model(0.2)
    data = tf.data.Dataset.from_tensor_slices((np.zeros((5, 2)), np.zeros((5, 1)))).batch(1)
    rates = Rates()
    for _ in range(2):
        made.fit(data, epochs=1, verbose=0, callbacks=[callback, rates])
    np.testing.assert_allclose(rates.seen, [0.2 * formula(step, 10, 0.3) for step in range(10)], rtol=1e-5)


def test_a_schedule_is_refused():
    with pytest.raises(ConfigError, match="the optimizer's rate is a CosineDecay"):
        fit(OneCycle(), rate=tf.keras.optimizers.schedules.CosineDecay(0.1, 10))


def test_data_of_unknown_length_need_steps():
    data = tf.data.Dataset.from_generator(
        lambda: iter([(np.zeros((1, 2)), np.zeros((1, 1)))]), output_types=(tf.float32, tf.float32)
    )
    with pytest.raises(ConfigError, match=r"give OneCycle\(steps=...\)"):
        model(0.1).fit(data, verbose=0, callbacks=[OneCycle()])


@pytest.mark.parametrize("given", [{"steps": 0}, {"warm_up": 0.0}, {"warm_up": 1.0}])
def test_numbers_out_of_their_range_are_refused(given):
    with pytest.raises(ConfigError, match="OneCycle"):
        OneCycle(**given)

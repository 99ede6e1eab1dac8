"""The first call of `fit` traces the step once, whatever the optimizer and the metrics make in it."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel, Model
from support.drawn_batches import make_batch


def counted(cls):
    """A class whose steps say when they are traced."""

    class Counted(cls):
        traced = ()

    def noted(name):
        step = getattr(cls, f"{name}_step")

        def run(self, data):
            self.traced = (*self.traced, name)
            return step(self, data)

        return run

    for name in ("train", "test"):
        setattr(Counted, f"{name}_step", noted(name))
    return Counted


def of_samples(**settings):
    x = {"user": tf.keras.Input([], name="user", dtype=tf.int64)}
    vectors = EmbeddingCollection([FeatureConfig("user", dim=4)])(x)["user"]
    model = counted(Model)(x, tf.keras.layers.Dense(1)(vectors))
    model.compile("adam", "mse", metrics=["mae", "accuracy"], **settings)
    return model, tf.data.Dataset.from_tensors(({"user": [1, 2]}, np.ones([2, 1], "f")))


def of_tasks(**settings):
    collection = EmbeddingCollection([FeatureConfig("user", dim=4), FeatureConfig("item", dim=4)])
    model = counted(MetaModel)(collection, MLP({"out": 1}), inner=InnerLoop(steps=1))
    model.compile("adam", "mse", metrics=["mae"], **settings)
    return model, tf.data.Dataset.from_tensors(make_batch([2, 3]))


@pytest.mark.parametrize("settings", [{}, {"accumulate_steps": 2}], ids=["plain", "accumulated"])
@pytest.mark.parametrize("make", [of_samples, of_tasks])
@pytest.mark.shown_by(case="of_tasks-accumulated")
def test_the_step_is_traced_once(make, settings):
    model, data = make(**settings)
    history = model.fit(data.repeat(4), validation_data=data, epochs=2, verbose=0).history
    assert model.traced == ("train", "test")
    assert all(np.isfinite(history[name]).all() for name in ("loss", "mae", "val_mae"))
    assert int(model.optimizer.iterations) == 8 // settings.get("accumulate_steps", 1)


def test_a_variable_without_a_gradient_stays_and_has_slots_as_in_keras():
    class Half(Model):
        def __init__(self):
            super().__init__()
            self.used, self.idle = tf.Variable([1.0]), tf.Variable([1.0])

        def call(self, x, training=None):
            return x * self.used

    model = Half()
    model.compile("adam", "mse")
    model.fit(tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.zeros([2, 1]))), verbose=0)
    slots = [v.name for v in model.optimizer.variables if v.shape == [1]]
    assert len(slots) == 4
    assert float(model.idle[0]) == 1 != float(model.used[0])

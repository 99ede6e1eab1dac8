"""The first call of `fit` traces the step once, whatever the optimizer and the metrics make in it; later
calls take that trace.
"""

import gc
import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf

from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel, Model
from gmeta.training import rank_loops
from gmeta.training.steps_ahead import QuickCalls
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


def test_a_function_is_looked_up_once_for_each_iterator():
    calls = []

    class Counted:
        def __init__(self):
            self.function = tf.function(lambda iterator: next(iterator) * 2)

        def __call__(self, iterator):
            calls.append("whole")
            return self.function(iterator)

        def get_concrete_function(self, iterator):
            calls.append("trace")
            return self.function.get_concrete_function(iterator)

    quick = QuickCalls.of(Counted())
    for values in ([1, 2, 3, 4], [5, 6]):
        iterator = iter(tf.data.Dataset.from_tensor_slices(values))
        assert [int(quick(iterator)) for _ in values] == [2 * value for value in values]
        with pytest.raises(tf.errors.OutOfRangeError):
            quick(iterator)
    assert calls == ["whole", "trace", "whole", "trace"]
    assert [int(quick(iter([value]))) for value in (7, 8)] == [14, 16]  # any iterator, as Keras takes it
    assert QuickCalls.of(print) is print
    assert QuickCalls.of(quick) is quick


def test_a_model_s_functions_are_quick_and_its_data_near_a_gpu(monkeypatch):
    seen = []
    monkeypatch.setattr(rank_loops, "near_gpu", lambda data: seen.append(data) or data)
    model = Model(x := tf.keras.Input([2]), tf.keras.layers.Dense(1)(x))
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.ones([3, 2]), tf.ones([3])))
    model.fit(data, validation_data=data, verbose=0)
    model.predict(data, verbose=0)
    assert seen == [data]
    for function in (model.train_function, model.test_function, model.predict_function):
        assert isinstance(function, QuickCalls)
        assert function.experimental_get_tracing_count() == 1


def test_threads_that_share_a_function_get_their_own_answers():
    quick, errors = QuickCalls.of(tf.function(lambda iterator: next(iterator) * 2)), []

    def work(dtype):
        try:
            for _ in range(20):
                iterator = iter(tf.data.Dataset.range(1, 6, output_type=dtype))
                assert [float(quick(iterator)) for _ in range(5)] == [2, 4, 6, 8, 10]
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[dtype]) for dtype in (tf.int64, tf.float32, tf.int64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_functions_that_are_made_to_run_eagerly_do_so_at_once():
    @tf.function
    def step(iterator):
        return tf.executing_eagerly(), next(iterator)

    quick, iterator = QuickCalls.of(step), iter(tf.data.Dataset.range(9))
    first = [quick(iterator)[0] for _ in range(3)]
    tf.config.run_functions_eagerly(True)
    try:
        assert quick(iterator)[0] is True
    finally:
        tf.config.run_functions_eagerly(False)
    assert not any(map(bool, [*first, quick(iterator)[0]]))


def test_an_iterator_is_not_kept_by_the_function_of_its_steps():
    quick = QuickCalls.of(tf.function(lambda iterator: next(iterator)))
    iterator = iter(tf.data.Dataset.range(9))
    for _ in range(3):
        quick(iterator)
    gone = weakref.ref(iterator)
    del iterator
    gc.collect()
    assert gone() is None


def test_models_that_are_trained_one_after_another_give_no_warning_of_retracing(caplog):
    data = tf.data.Dataset.from_tensors((tf.ones([3, 2]), tf.ones([3]))).repeat(12)
    for _ in range(6):
        model = Model(x := tf.keras.Input([2]), tf.keras.layers.Dense(1)(x))
        model.compile("sgd", "mse")
        with caplog.at_level("WARNING", logger="tensorflow"):
            model.fit(data, verbose=0)
    assert "retracing" not in caplog.text

"""Users' code that Keras calls asks tensors in `if` and `while`; Keras' and gmeta's own code is left alone.

What a graph finds is compared with what the same model finds eagerly, where Python's `if` works by itself.
"""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.core import config
from tensorflow.python.autograph.impl import api
from tensorflow.python.util import tf_inspect

from gmeta.core.keras import convert_only_calls
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.models import Model

Dense, Layer = tf.keras.layers.Dense, tf.keras.layers.Layer


def leaky(x: tf.Tensor) -> tf.Tensor:
    """Other values for a batch whose mean is negative; of one that is far out, `while` it is."""
    if tf.reduce_mean(x) < 0:
        x = x * 0.5
    while tf.reduce_max(tf.abs(x)) > 1:
        x = x / 2
    return x


class Steps(tf.keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = Dense(1, kernel_initializer="ones")
        self.many = tf.Variable(0, trainable=False)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.head(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        if tf.reduce_mean(x) < 0:
            self.many.assign_add(1)
        found = super().train_step((leaky(x), y))
        return {**found, "many": self.many + 0}

    def measure(self, data: Any) -> Any:
        x, y = data
        return super().test_step((leaky(x), y))

    test_step = measure

    def predict_step(self, data: Any) -> Any:
        return leaky(super().predict_step(data))


class Losses(tf.keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = Dense(1, kernel_initializer="ones")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.head(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return tf.reduce_mean(leaky(y_pred - y) ** 2)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        return {"off": leaky(tf.reduce_mean(y_pred - y))}


class Leaky(Layer):
    def call(self, x: tf.Tensor) -> tf.Tensor:
        return leaky(x)


class Traced(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tf.function(leaky)

    @tf.function
    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.inner(x)


class LeakyDense(Dense):
    """What Keras' own `call` calls."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return leaky(super().call(x))


class Convolution(tf.keras.layers.Conv1D):
    def convolution_op(self, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        return leaky(super().convolution_op(x, kernel))


class Cell(Layer):
    state_size = output_size = 3

    def call(self, x: tf.Tensor, states: Any) -> Any:
        found = leaky(x + states[0])
        return found, [found]


class LossOfCall(tf.keras.losses.Loss):
    def call(self, y: tf.Tensor, found: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(leaky(y - found) ** 2, -1)


class LossOfItsOwn(tf.keras.losses.Loss):
    def __call__(self, y: tf.Tensor, found: tf.Tensor, sample_weight: Any = None) -> tf.Tensor:
        return tf.reduce_mean(leaky(y - found) ** 2)


class Mean(tf.keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="mean")
        self.sum = self.add_weight("sum", initializer="zeros")

    def update_state(self, y: tf.Tensor, found: tf.Tensor, sample_weight: Any = None) -> None:
        if tf.reduce_mean(found) < 0:
            self.sum.assign_add(1.0)

    def result(self) -> tf.Tensor:
        return leaky(self.sum - 10)


class Falls(tf.keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> Any:
        return 0.1 if step < 3 else 0.05


class Descent(tf.keras.optimizers.Optimizer):
    def __init__(self) -> None:
        super().__init__("descent")
        self._learning_rate = self._build_learning_rate(0.1)

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        if tf.norm(gradient) > 0.1:
            variable.assign_sub(gradient * self.learning_rate)


class Short(tf.keras.constraints.Constraint):
    def __call__(self, weights: tf.Tensor) -> tf.Tensor:
        return leaky(weights)


def squares(y: tf.Tensor, found: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(leaky(y - found) ** 2, -1)


def stacked(*layers: Layer, functional: bool = False, **compiled: Any) -> tf.keras.Model:
    """A model of layers; a functional one, or one with a `call` of its own."""
    inputs = tf.keras.Input([3])
    if functional:
        x = inputs
        for layer in layers:
            x = layer(x)
        model = tf.keras.Model(inputs, x)
    else:
        model = Stack(layers)
    model.compile(**{"optimizer": tf.keras.optimizers.SGD(0.1), "loss": "mse", **compiled})
    return model


class Stack(tf.keras.Model):
    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.parts = list(layers)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def compiled(model: tf.keras.Model) -> tf.keras.Model:
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    return model


def head(**settings: Any) -> Dense:
    return Dense(1, kernel_initializer="ones", **settings)


def layers() -> list[Layer]:
    leaky_lambda = tf.keras.layers.Lambda(leaky)
    return [Leaky(), leaky_lambda, Traced(), head(activation=leaky, kernel_constraint=Short())]


def methods_of_layers() -> tf.keras.Model:
    """Those that Keras' own layers call."""
    as_steps, recurrent = tf.keras.layers.Reshape([3, 1]), tf.keras.layers.RNN(Cell())
    ones = {"kernel_initializer": "ones"}
    return stacked(as_steps, Convolution(3, 2, **ones), recurrent, LeakyDense(1, **ones))


CASES: dict[str, Callable[[], tf.keras.Model]] = {
    "steps of a model": lambda: compiled(Steps()),
    "compute_loss and compute_metrics": lambda: compiled(Losses()),
    "layers": lambda: stacked(*layers()),
    "layers of a functional model": lambda: stacked(Leaky(), Traced(), head(), functional=True),
    "methods of layers": methods_of_layers,
    "functions of losses and metrics": lambda: stacked(head(), loss=squares, metrics=[squares]),
    "losses and metrics": lambda: stacked(head(), loss=LossOfCall(), metrics=[Mean()]),
    "a loss's __call__": lambda: stacked(head(), loss=LossOfItsOwn()),
    "a schedule": lambda: stacked(head(), optimizer=tf.keras.optimizers.Adam(Falls())),
    "an optimizer": lambda: stacked(head(), optimizer=Descent()),
    "several steps at once": lambda: stacked(Leaky(), head(), steps_per_execution=2),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.shown_by(case="steps of a model")
def test_code_that_keras_calls_may_ask_tensors(case: str) -> None:
    graph, eager = results(CASES[case])
    np.testing.assert_allclose(graph, eager, rtol=1e-4, atol=1e-6)


def results(make: Callable[[], tf.keras.Model]) -> list[np.ndarray]:
    """What a model and its like find in graphs and eagerly, of means of both signs and values far out."""
    x = np.random.default_rng(3).normal(size=[24, 3]).astype(np.float32) * 3
    x[::2] -= 2 * x[::2].mean()
    y = np.linspace(-1, 1, 24, dtype=np.float32)[:, None]
    found = []
    for eagerly in (False, True):
        model = make()
        model.run_eagerly = eagerly
        history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        measured = model.evaluate(x, y, batch_size=4, verbose=0)
        predicted = model.predict(x, batch_size=4, verbose=0)
        found.append(np.concatenate([*history.values(), np.ravel(measured), np.ravel(predicted)]))
    return found


def test_a_package_whose_name_begins_as_keras_does_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "tf_keras_extras"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import tensorflow as tf\n\n\ndef positive(x):\n"
        "    if tf.reduce_mean(x) < 0:\n        return -x\n    return x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    positive = importlib.import_module("tf_keras_extras").positive
    graph, eager = results(lambda: stacked(head(activation=positive)))
    np.testing.assert_allclose(graph, eager, rtol=1e-4, atol=1e-6)


class Branches(Model):
    def __init__(self) -> None:
        super().__init__()
        self.collection = EmbeddingCollection([FeatureConfig("user", dim=2)])
        self.head, self.many = Dense(1), tf.Variable(0, trainable=False)

    def call(self, x: Any, training: Any = None) -> tf.Tensor:
        return self.head(leaky(self.collection(x, training=training)["user"]))

    def train_step(self, data: Any) -> Any:
        if tf.shape(data[1])[0] >= 6:
            self.many.assign_add(1)
        return super().train_step(data)


def history_of_branches() -> tuple[Any, int]:
    random.seed(1)
    tf.random.set_seed(1)
    model = Branches()
    model.compile("sgd", squares, metrics=["mae", Mean()])
    x, y = {"user": np.arange(16) % 3}, np.ones([16, 1], np.float32)
    settings = {"batch_size": 6, "epochs": 3, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, validation_data=(x, y), **settings).history
    return history, int(model.many)


@pytest.mark.slow
def test_losses_are_those_of_functions_converted_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    found, many = history_of_branches()
    monkeypatch.setattr(api, "_convert_actual", api._convert_actual.__wrapped__)
    assert history_of_branches() == (found, many)
    assert many == 2 * 3


CODE = '''
import functools
from contextlib import contextmanager

import tensorflow as tf


def twice(function):
    @functools.wraps(function)
    def both(*args, **kwargs):
        return function(*args, **kwargs) + function(*args, **kwargs)
    return both


def free(offset, scale=2):
    held = [offset]
    def add(ask, x, *, more=tf.zeros([])):
        nonlocal scale
        scale = 3
        return ask(x) * scale + held[0] + more
    return add


class Base:
    def method(self, ask, x):
        return ask(x) + 1


class Derived(Base):
    def method(self, ask, x):
        return super().method(ask, x) * self.factor(ask, *[x], **{"more": 2.0})

    def factor(self, ask, *xs, more):
        """Its text has a line
that isn't indented."""
        return sum([ask(x) for x in xs]) + more

    def __own(self, x):
        return x * 2

    def private(self, ask, x):
        return self.__own(x)  # AutoGraph can't convert names of a class's own


@twice
def decorated(ask, x):
    return ask(x) + 1


def recursive(ask, x, depth=2):
    return ask(x) if depth == 0 else recursive(ask, -x, depth=depth - 1)


def nested(ask, x):
    inner = lambda each: ask(each) + 1
    def mapped(each):
        return inner(each) * 2
    return tf.nest.map_structure(mapped, [x, -x])[1]


@contextmanager
def doubled():
    yield 2.0


def managed(ask, x):
    with doubled() as factor:
        try:
            raise KeyError(factor)
        except KeyError as error:
            return ask(x) * error.args[0]


anonymous = lambda ask, x: ask(x) + 1
method, private, closed = Derived().method, Derived().private, free(1.0)
partial = functools.partial(decorated)
'''
FORMS = (
    "twice(anonymous)",
    "closed",
    "method",
    "private",
    "decorated",
    "recursive",
    "nested",
    "managed",
    "anonymous",
    "partial",
)


@pytest.fixture(scope="module")
def framework(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A module that AutoGraph takes for one of Keras'."""
    path = tmp_path_factory.mktemp("forms") / "forms.py"
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location("tf_keras.forms", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def positive(x: tf.Tensor) -> tf.Tensor:
    if x < 0:
        return -x
    return x * 3


@pytest.mark.parametrize("form", FORMS)
def test_a_converted_function_does_what_it_did(form: str, framework: Any) -> None:
    function = eval(form, vars(framework))
    traced = tf.function(lambda x: function(positive, x))
    for x in (-2.0, 5.0):
        assert traced(tf.constant(x)) == function(positive, tf.constant(x))


def test_the_functions_of_keras_are_not_converted_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, transform = [], api._TRANSPILER.transform

    def noted(entity: Any, context: Any) -> Any:
        whole.append(entity)
        return transform(entity, context)

    monkeypatch.setattr(api._TRANSPILER, "transform", noted)
    x, y = {"user": np.arange(4)}, np.ones([4, 1], np.float32)
    model = Branches()
    model.compile("adam", "mse", metrics=["mae", "AUC"])
    model.fit(x, y, verbose=0, validation_data=(x, y))
    names = {each.__name__ for each in whole if each.__module__.split(".")[0] in ("tf_keras", "gmeta")}
    assert names == {"train_function", "test_function"}  # which Keras gives to `tf.function`


def test_it_is_installed_once_and_newer_tensorflows_own_rule_goes() -> None:
    before = api._convert_actual
    convert_only_calls()
    assert api._convert_actual is before
    assert not hasattr(before.__wrapped__, "__wrapped__")
    assert not any(rule.matches("tf_keras") for rule in config.CONVERSION_RULES)
    assert tf_inspect.currentframe() is sys._getframe()


def test_it_is_installed_where_tensorflow_came_first() -> None:
    code = "import tensorflow, gmeta; from tensorflow.python.autograph.impl import api"
    found = subprocess.run(
        [sys.executable, "-c", f"{code}; print(hasattr(api._convert_actual, '__wrapped__'))"],
        env={**os.environ, "TF_USE_LEGACY_KERAS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.split()[-1:] == ["True"], found.stderr

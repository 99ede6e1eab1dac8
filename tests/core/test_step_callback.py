"""Callbacks of steps don't make a step wait for the loss of the last."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gmeta
from gmeta.core.step import StepCallback
from gmeta.models import Model

OF_STEPS = ("on_train_batch_begin", "on_train_batch_end")


def callbacks_of_steps() -> list[type]:
    for module in pkgutil.walk_packages(gmeta.__path__, "gmeta."):
        if any(word in module.name for word in ("callback", "training", "checkpoint")):
            importlib.import_module(module.name)
    found, rest = [], [tf.keras.callbacks.Callback]
    while rest:
        each = rest.pop()
        rest.extend(each.__subclasses__())
        if each.__module__.startswith("gmeta.") and any(name in vars(each) for name in OF_STEPS):
            found.append(each)
    return found


def test_gmetas_callbacks_of_steps_wait_for_nothing() -> None:
    found = callbacks_of_steps()
    assert len(found) >= 5
    assert [each.__name__ for each in found if not issubclass(each, StepCallback)] == []


class Note(StepCallback):
    """A callback that notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self.epochs: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(logs["loss"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(logs["loss"])


@pytest.mark.parametrize("others", [0, 1])
def test_logs_of_steps_are_tensors_and_those_of_epochs_numbers(others: int) -> None:
    inputs = tf.keras.Input([2])
    model = Model(inputs, tf.keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    note = Note()
    more = [tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)] * others
    model.fit(np.ones([8, 2]), np.ones([8, 1]), batch_size=4, verbose=0, callbacks=[note, *more])
    assert all(tf.is_tensor(loss) for loss in note.steps)
    assert [type(loss) for loss in note.epochs] == [float]

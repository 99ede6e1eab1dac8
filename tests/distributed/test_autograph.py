"""Steps and schedules that ask tensors in Python's `if`, on ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gmeta
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig
from gmeta.models import MetaModel, Model
from support.drawn_batches import make_batch
from support.process_ranks import run_ranks

pytestmark = pytest.mark.ranks


class Branches(Model):
    """Asks tensors in Python's `if`, in a step of its own."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.collection = EmbeddingCollection([FeatureConfig("user", dim=2)])
        self.head = tf.keras.layers.Dense(1)
        self.large, self.many = large, tf.Variable(0, trainable=False)

    def call(self, x: Any, training: Any = None) -> tf.Tensor:
        return self.head(self.collection(x, training=training)["user"])

    def train_step(self, data: Any) -> Any:
        if tf.shape(data[1])[0] >= self.large:
            self.many.assign_add(1)
        return super().train_step(data)


class Falls(tf.keras.optimizers.schedules.LearningRateSchedule):
    """Asks the step in Python's `if`."""

    def __call__(self, step: Any) -> Any:
        return 0.01 if step < 3 else 0.005


def main() -> None:
    size = gmeta.init().size
    x, y = {"user": np.arange(16) % 3}, np.ones([16, 1], np.float32)
    model = Branches(large=6 // size)
    model.compile(tf.keras.optimizers.SGD(Falls()), "mse", metrics=["mae"])
    settings = {"batch_size": 6 // size, "epochs": 3, "shuffle": False, "verbose": 0}
    found = model.fit(x, y, validation_data=(x, y), **settings).history
    off = float(np.abs(model.predict(x, verbose=0) - 1).mean())
    summing = Branches(large=6 // size)
    summing.compile(tf.keras.optimizers.SGD(Falls()), "mse", accumulate_steps=2)
    summing.fit(x, y, **settings)
    tasks = MetaModel(
        EmbeddingCollection([FeatureConfig("user", dim=2), FeatureConfig("item", dim=2)]), MLP({"out": 1})
    )
    tasks.compile(tf.keras.optimizers.SGD(Falls()), "mse")
    losses = [tasks.train_on_batch(make_batch([2, 3])) for _ in range(4)]
    many = [int(each.many) for each in (model, summing)]
    said = {"many": many, "off": off, "tasks": float(losses[-1] - losses[0]), **found}
    sys.stdout.write(json.dumps(said) + "\n")


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.shown_by("core/test_autograph.py::test_code_that_keras_calls_may_ask_tensors")
def test_steps_of_a_users_own_ask_tensors(size: int) -> None:
    """In processes of a file, which AutoGraph reads."""
    for said in run_ranks(Path(__file__), size):
        found = json.loads(said.splitlines()[-1])
        assert found["many"] == [2 * 3] * 2  # of global batches of 6, 6 and 4
        assert found["loss"][2] < found["loss"][0]
        assert found["tasks"] < 0
        assert found["val_mae"][2] == pytest.approx(found["off"], rel=1e-5)


if __name__ == "__main__":
    main()

"""Steps as users trace them: AutoGraph rewrites Keras too, which the other tests leave as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gmeta
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.models import Model
from gmeta.testing.jobs.process_ranks import run_ranks
from gmeta.testing.jobs.tracing import rewrite_keras_too

pytestmark = pytest.mark.ranks


class Branches(Model):
    """Asks tensors in Python's `if`, in a step of its own."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.collection = EmbeddingCollection([FeatureConfig("user", 2)])
        self.head = tf.keras.layers.Dense(1)
        self.large, self.many = large, tf.Variable(0, trainable=False)

    def call(self, x: Any, training: Any = None) -> tf.Tensor:
        return self.head(self.collection(x, training=training)["user"])

    def train_step(self, data: Any) -> Any:
        if tf.shape(data[1])[0] >= self.large:
            self.many.assign_add(1)
        return super().train_step(data)


def main() -> None:
    size = gmeta.init().size
    rewrite_keras_too()
    x, y = {"user": np.arange(16) % 3}, np.ones([16, 1], np.float32)
    model = Branches(large=6 // size)
    model.compile("sgd", "mse", metrics=["mae"])
    settings = {"batch_size": 6 // size, "epochs": 3, "shuffle": False, "verbose": 0}
    found = model.fit(x, y, validation_data=(x, y), **settings).history
    off = float(np.abs(model.predict(x, verbose=0) - 1).mean())
    sys.stdout.write(json.dumps({"many": int(model.many), "off": off, **found}) + "\n")


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_steps_are_rewritten_with_keras_around_them(size: int) -> None:
    """In processes of their own, where nothing has been traced yet, and of a file, which AutoGraph reads."""
    for said in run_ranks(Path(__file__), size):
        found = json.loads(said.splitlines()[-1])
        assert found["many"] == 2 * 3  # of global batches of 6, 6 and 4
        assert found["loss"][2] < found["loss"][0]
        assert found["val_mae"][2] == pytest.approx(found["off"], rel=1e-5)


if __name__ == "__main__":
    main()

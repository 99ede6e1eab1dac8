"""A program from its start to its second ``fit``: imports, a model of README, seconds on standard output.

Arguments are the model, the folder of its data, whether AutoGraph converts Keras' functions as a whole
(``whole``) or only their calls (``calls``), and the time of the program's start.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def make_model(rows: int = 9000) -> tuple[Any, dict[str, Any]]:
    """Return the model of README's "An ordinary model", and the arguments of ``fit``."""
    items = layers.TableConfig("item", dim=16)
    embeddings = layers.EmbeddingCollection(
        [
            layers.FeatureConfig("user", dim=16),
            layers.FeatureConfig("item", items),
            layers.FeatureConfig("seen", items, combiner="mean", max_length=50),
        ]
    )
    inputs = {name: tf.keras.Input([], name=name, dtype=tf.int64) for name in ("user", "item")}
    inputs["seen"] = tf.keras.Input([None], name="seen", dtype=tf.int64, ragged=True)
    x = tf.keras.layers.Concatenate()(list(embeddings(inputs).values()))
    x = tf.keras.layers.Dense(64, "relu")(x)
    model = models.Model(inputs, tf.keras.layers.Dense(1, "sigmoid")(x))
    model.compile("adam", "binary_crossentropy", metrics=["AUC"])
    ids, lengths = np.random.default_rng(0).integers(0, 99, (2, rows)), np.arange(rows) % 5
    seen = tf.RaggedTensor.from_row_lengths(ids[0].repeat(lengths), lengths)
    data = {"user": ids[0] * 10**12, "item": ids[1], "seen": seen}
    return model, {"x": data, "y": ids[0] > ids[1], "batch_size": 500}


def make_meta_model(folder: str) -> tuple[Any, dict[str, Any]]:
    """Return the model of README's "In Keras", and the arguments of ``fit``, without validation."""
    features = [layers.FeatureConfig(name, dim=16) for name in ("item", "occupation")]
    features.append(layers.FeatureConfig("genre", dim=16, combiner="mean"))
    network = tf.keras.Sequential(
        [tf.keras.layers.Dense(64, "relu", name="fc1"), tf.keras.layers.Dense(1, name="out")]
    )
    model = models.MetaModel(layers.EmbeddingCollection(features), network)
    model.compile(
        optimizer=tf.keras.optimizers.Adam(1e-3),
        loss="mse",
        metrics=["mae", metrics.NDCG(3)],
        inner=meta.InnerLoop(algorithm="maml", steps=1, learning_rate=0.01, adapt=["fc1", "out"]),
    )
    return model, {"x": io.tasks(f"{folder}/warm", tasks_per_batch=32, query=10, resample=True)}


if __name__ == "__main__":
    kind, folder, conversion, started = sys.argv[1:]
    begin = time.perf_counter()
    import gmeta  # noqa: F401  before TensorFlow: it selects Keras 2
    from gmeta import io, layers, meta, metrics, models

    import numpy as np
    import tensorflow as tf
    from tensorflow.python.autograph.impl import api

    seconds = {"import": time.perf_counter() - begin}
    if conversion == "whole":
        api._convert_actual = api._convert_actual.__wrapped__
    model, arguments = make_model() if kind == "model" else make_meta_model(folder)

    class FirstStep(tf.keras.callbacks.Callback):
        """Notes when the first step has ended."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            """Called by Keras."""
            seconds.setdefault("to_first_step", time.time() - float(started))

    for fit in ("first_fit", "second_fit"):
        begin = time.perf_counter()
        losses = model.fit(**arguments, shuffle=False, verbose=0, callbacks=[FirstStep()]).history["loss"]
        seconds[fit] = time.perf_counter() - begin
    print(json.dumps(seconds))

"""What it costs to evaluate each batch before training on it.

    python tools/bench/progressive.py
    python tools/bench/progressive.py --json FILE

A click model of two features (100,000 users, 10,000 items, rows 16 wide, a network of 64 and 32) trains on
batches, with `gmeta.callbacks.ProgressiveEvaluation` and without it, which is the peer. With dropout, the
step makes a forward pass more. All times are of processors, of all threads, which other work on the machine
hardly changes.

step          a step of training, with windows of 100,000 samples
window        the end of a window of a million samples of 100,000 users
"""

from __future__ import annotations

import time
from collections.abc import Callable

import gmeta
from gmeta.callbacks import ProgressiveEvaluation
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.metrics.progressive import ProgressiveMetrics
from gmeta.models import Model

import numpy as np
import tensorflow as tf
from harness import Result, interleave, parser, report

USERS, ITEMS, STEPS = 100_000, 10_000, 100


def made(dropout: float) -> Model:
    """Return a compiled model."""
    inputs = {name: tf.keras.Input([], name=name, dtype=tf.int64) for name in ("user", "item")}
    features = [FeatureConfig(name, dim=16) for name in inputs]
    vectors = EmbeddingCollection(features, optimizer=gmeta.optimizers.Adam(1e-3))(inputs)
    x = tf.concat([*vectors.values()], axis=-1)
    for units in (64, 32):
        x = tf.keras.layers.Dense(units, activation="relu")(x)
    x = tf.keras.layers.Dropout(dropout)(x) if dropout else x
    model = Model(inputs, tf.keras.layers.Dense(1)(x))
    model.compile("adam", tf.keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def trainer(batch: int, dropout: float, watched: bool) -> Callable[[int], object]:
    """Return a function that makes steps."""
    random, size = np.random.default_rng(0), batch * 200
    x = {"user": random.zipf(1.2, size) % USERS, "item": random.zipf(1.2, size) % ITEMS}
    y = (random.random(size) < 0.2).astype(np.float32)
    iterator = iter(tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).cache().repeat())
    model = made(dropout)
    callback = ProgressiveEvaluation(model, 100_000, users="user")
    model.make_train_function()
    if watched:
        callback.on_train_begin()

    def steps(_: int) -> None:
        for number in range(STEPS):
            model.train_function(iterator)
            if watched:
                callback.on_train_batch_end(number)

    return steps


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__).parse_args()
    results = []
    for batch in (64,) if options.smoke else (256, 1024, 4096):
        for dropout in (0.0, 0.2):
            found = interleave(
                {name: trainer(batch, dropout, name == "watched") for name in ("watched", "plain")},
                rounds=options.rounds,
                clock=time.process_time,
            )
            watched, plain = (1e3 * found[name] / STEPS for name in ("watched", "plain"))
            path = f"progressive/step/batch{batch}/dropout{dropout}"
            results.append(Result(path, watched, "ms", "without it", plain))
    rows = 10_000 if options.smoke else 1_000_000
    random, metrics = np.random.default_rng(0), ProgressiveMetrics(rows)
    columns = random.integers(0, 2, rows), random.random(rows)
    metrics.update(*(each[:-1] for each in columns), users=random.integers(0, USERS, rows - 1))
    start = time.process_time()
    metrics.update(*(each[-1:] for each in columns), users=[0])
    results.append(Result(f"progressive/window/rows{rows}", time.process_time() - start, "s"))
    report("Evaluation before training", results, options.json)


if __name__ == "__main__":
    main()

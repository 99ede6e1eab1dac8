"""Columns that a step reads on a GPU come there one step ahead, and no number depends on it.

Where ops compute follows from TensorFlow's registry of kernels, so the functions of a GPU run on a CPU here.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import gmeta
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.models import Model
from gmeta.ops import device
from gmeta.training import steps_ahead
from support.tables import sorted_records

SAMPLES, STEPS = 36, 5


class Reader(Model):
    """Reads columns of several dtypes, and one in a check on the host; `extra` only where it is observed."""

    def __init__(self):
        super().__init__()
        self.rows = EmbeddingCollection([FeatureConfig("user", dim=4)], seed=1)
        self.dense = tf.keras.layers.Dense(1, kernel_initializer=tf.keras.initializers.GlorotUniform(seed=1))
        self.total = tf.Variable(0.0, trainable=False)
        self.numbered = False

    def call(self, x, training=None):
        user = x["user"] + self.step_number % 3 if self.numbered else x["user"]
        vectors = self.rows({"user": user}, training=training)["user"]
        with tf.device("CPU:0"):
            checked = tf.debugging.assert_greater_equal(x["age"], 0.0)
            with tf.control_dependencies([checked]):
                age = tf.identity(x["age"])
        kind = tf.gather(tf.range(20.0), tf.maximum(x["kind"], 0)) + tf.cast(
            tf.where(x["kind"] < 0, 3, 0), tf.float32
        )
        parts = [age, tf.where(x["flag"], kind, 0.0), tf.cast(x["half"], tf.float32), x["scale"] * age]
        text = tf.cast(tf.strings.length(x["text"]), tf.float32)
        tags = tf.reduce_sum(tf.cast(x["tags"], tf.float32), axis=1)
        return self.dense(tf.concat([vectors, tf.stack([*parts, text, tags], axis=1)], axis=1))


def samples(case):
    random = np.random.default_rng(0)
    x = {
        "user": random.integers(0, 20, SAMPLES),
        "age": random.random(SAMPLES).astype(np.float32),
        "kind": random.integers(-3, 9, SAMPLES).astype(np.int32),
        "flag": random.random(SAMPLES) < 0.5,
        "half": random.normal(size=SAMPLES).astype(np.float16),
        "extra": random.normal(size=(SAMPLES, 2)).astype(np.float32),
        "text": np.array([str(7**n) for n in range(SAMPLES)]),
        "tags": tf.RaggedTensor.from_row_lengths(random.integers(0, 9, 2 * SAMPLES), np.full(SAMPLES, 2)),
    }
    labels = random.normal(size=(SAMPLES, 1)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, labels)).batch(8).enumerate()
    # A column without samples, a number a batch; micro-batches take one for each sample.
    form = tf.shape if case == "parts" else lambda labels: []

    def number(n, one):
        return {**one[0], "scale": tf.fill(form(one[1])[:1], 1.0 + tf.cast(n, tf.float32))}, one[1]

    return data.map(number)


class Observes(tf.keras.callbacks.Callback):
    """Makes the train function again while batches wait. The new one reads one more column."""

    def on_epoch_end(self, epoch, logs=None):
        total = self.model.total
        self.model.observe(lambda x, *_: total.assign_add(tf.reduce_sum(x["extra"]) * x["scale"]))


class Renumbers(tf.keras.callbacks.Callback):
    """Sets the count of steps, so that the next batch is fetched again."""

    def on_train_begin(self, logs=None):
        self.model.numbered = True

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.optimizer.iterations.assign_add(17)


def train(depth, case):
    tf.random.set_seed(3)
    model = Reader()
    model.numbered = case is Renumbers
    pipeline = gmeta.Pipeline(depth, micro_batches=2) if case == "parts" else gmeta.Pipeline(depth)
    model.compile(tf.keras.optimizers.Adam(0.05), "mse", pipeline=pipeline)
    callbacks = [case()] if isinstance(case, type) else []
    losses = model.fit(
        samples(case).repeat(), epochs=3, steps_per_epoch=STEPS, verbose=0, callbacks=callbacks
    ).history["loss"]
    records = sorted_records(model.rows.tables[0])
    return [np.array(losses), *model.get_weights(), *(np.asarray(part) for part in tf.nest.flatten(records))]


@pytest.fixture
def read(monkeypatch):
    """Act as on a GPU, and return the lists that say which columns each traced step reads there."""
    found, whether, read_copies = [], device._is_in_gpu_memory, steps_ahead._Columns.read_copies

    def is_there(tensor):
        made_there = not tf.executing_eagerly() and tensor.op.type == "GmetaToGpu"
        return made_there or whether(tensor)

    def note(self, data, copies):
        read_copies(self, data, copies)
        found.append(dict(zip([part.name for part in self._of(data)], self._read, strict=True)))

    for where in (device, steps_ahead):
        monkeypatch.setattr(where, "on_gpu", lambda: True)
    monkeypatch.setattr(steps_ahead, "built_with_cuda", lambda: True)
    monkeypatch.setattr(device, "_is_in_gpu_memory", is_there)
    monkeypatch.setattr(steps_ahead._Columns, "read_copies", note)
    return found


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("case", [None, "parts", Observes, Renumbers])
def test_columns_that_come_ahead_change_no_bit(case, depth, read):
    expected = train(0, case)
    assert not read
    for one, other in zip(train(depth, case), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    steps = [sum(each.values()) for each in read]
    assert 5 <= steps[0] < len(read[0]) - 1  # not the ids, the text's neighbours, nor what nobody reads
    assert steps == sorted(steps)
    assert (len(set(steps)) > 1) == (case is Observes)

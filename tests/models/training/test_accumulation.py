"""Gradient accumulation: k batches make the step of one k times larger batch."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model
from gmeta.optimizers import SGD, Adam

FEATURES = (
    FeatureConfig("user", TableConfig("user", 4, initializer=Normal(0.0, 0.5))),
    FeatureConfig("tags", TableConfig("tags", 4, initializer=Normal(0.0, 0.5)), combiner="mean"),
    FeatureConfig("wide", TableConfig("wide", 6, initializer=Normal(0.0, 0.5))),
)


def make(optimizer, dense, k=1, **options):
    x = {
        "user": tf.keras.Input([], name="user", dtype=tf.int64),
        "tags": tf.keras.Input([None], name="tags", dtype=tf.int64, ragged=True),
        "wide": tf.keras.Input([], name="wide", dtype=tf.int64),
    }
    vectors = EmbeddingCollection(FEATURES, optimizer=optimizer, name="collection")(x)
    hidden = tf.keras.layers.Dense(5, "tanh", kernel_initializer=tf.keras.initializers.GlorotUniform(seed=2))
    out = tf.keras.layers.Dense(1, kernel_initializer=tf.keras.initializers.GlorotUniform(seed=1))
    model = Model(x, out(hidden(tf.keras.layers.Concatenate()(list(vectors.values())))))
    model.compile(dense(), "mse", accumulate_steps=k, **options)
    return model


def samples(n, seed=0):
    rng = np.random.default_rng(seed)
    tags = [rng.integers(0, 6, rng.integers(0, 4)).tolist() for _ in range(n)]
    return {
        "user": rng.integers(0, 9, n),
        "tags": tf.ragged.constant(tags, dtype=tf.int64, ragged_rank=1),
        "wide": rng.integers(0, 50, n),
    }, rng.normal(size=n).astype(np.float32)


def batches(sizes, n):
    """One data set of n samples, in batches of these sizes."""
    x, y = samples(n)
    ends = np.cumsum(sizes)
    for end, size in zip(ends, sizes, strict=True):
        part = slice(int(end - size), int(end))
        yield {name: values[part] for name, values in x.items()}, y[part]


def train(model, sizes):
    for x, y in batches(sizes, sum(sizes)):
        model.train_on_batch(x, y)


def state(model):
    """The dense weights, and of each table its rows and slots in the order of their keys."""
    values = [weight.numpy() for weight in model.trainable_variables]
    for table in model.get_layer("collection").tables:
        records = table.export()
        order = np.argsort(records.keys)
        values += [records.keys.numpy()[order], records.rows.numpy()[order], records.slots.numpy()[order]]
        values.append(table.step().numpy())
    return values


def assert_same(a, b):
    for mine, other in zip(state(a), state(b), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-4, atol=2e-6)


OPTIMIZERS = pytest.mark.parametrize(
    ("sparse", "dense"),
    [
        (SGD(None), lambda: tf.keras.optimizers.SGD(0.1)),
        (Adam(None), lambda: tf.keras.optimizers.Adam(0.02)),
    ],
    ids=["sgd", "adam"],
)


@pytest.mark.shown_by("test_eagerly_too")
def test_k_batches_of_uneven_sizes_equal_one_large_batch():
    sparse, dense = Adam(None), lambda: tf.keras.optimizers.Adam(0.02)  # with SGD, test_eagerly_too
    large, small = make(sparse, dense), make(sparse, dense, k=3)
    train(large, [24, 15])
    train(small, [8, 12, 4, 1, 9, 5])
    assert_same(large, small)
    assert int(small.optimizer.iterations) == 2


@OPTIMIZERS
def test_eagerly_too(sparse, dense):
    large, small = (make(sparse, dense, k=k, run_eagerly=True) for k in (1, 2))
    train(large, [10])
    train(small, [7, 3])
    assert_same(large, small)


def test_rows_wait_for_the_kth_batch_and_only_touched_ones_move():
    model = make(SGD(0.5), lambda: tf.keras.optimizers.SGD(0.5), k=2)
    table = model.get_layer("collection").tables[1]
    first, second, _ = batches([4, 4, 4], 12)
    model.train_on_batch(*first)
    waiting = table.export()
    start = dict(zip(waiting.keys.numpy(), waiting.rows.numpy(), strict=True))
    assert int(table.step()) == 0
    stranger = 10_000
    table.lookup([stranger])
    untouched = table.lookup_keys([stranger], insert=False).numpy()
    model.train_on_batch(*second)
    after = table.export()
    assert int(table.step()) == 1
    for key, row in zip(after.keys.numpy(), after.rows.numpy(), strict=True):
        if key in start:
            assert not np.array_equal(row, start[key])
    np.testing.assert_array_equal(table.lookup_keys([stranger], insert=False), untouched)


@pytest.mark.parametrize("validate", [pytest.param(False, marks=pytest.mark.slow), True])  # quick: True
def test_fit_closes_the_window_at_the_end_of_an_epoch(validate):
    x, y = samples(20)
    large, small = (
        make(Adam(None), lambda: tf.keras.optimizers.Adam(0.02), k=k, run_eagerly=True) for k in (1, 2)
    )
    seen = []
    watch = tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: seen.append(int(small.optimizer.iterations))
    )
    settings = {"shuffle": False, "verbose": 0, "epochs": 2}
    if validate:
        settings["validation_data"] = (x, y)
    mine = small.fit(x, y, batch_size=4, callbacks=[watch], **settings)  # 5 batches: 2, 2 and 1
    theirs = large.fit(x, y, batch_size=8, **settings)  # 8, 8 and 4 samples
    assert_same(large, small)
    assert seen == [3, 6]
    if validate:
        np.testing.assert_allclose(mine.history["val_loss"], theirs.history["val_loss"], rtol=1e-4)


def test_an_open_window_is_closed_by_hand():
    model = make(SGD(None), lambda: tf.keras.optimizers.SGD(0.1), k=4, run_eagerly=True)
    model.apply_accumulated()  # nothing has come yet
    train(model, [5, 6])
    assert int(model.optimizer.iterations) == 0
    model.apply_accumulated()
    model.apply_accumulated()
    assert int(model.optimizer.iterations) == 1
    large = make(SGD(None), lambda: tf.keras.optimizers.SGD(0.1), run_eagerly=True)
    train(large, [11])
    assert_same(large, model)


class Interrupt(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise KeyboardInterrupt


def test_what_waits_when_fit_is_interrupted_enters_no_later_step():
    x, y = samples(16)
    mine, other = (
        make(Adam(None), lambda: tf.keras.optimizers.Adam(0.02), k=4, run_eagerly=True) for _ in range(2)
    )
    settings = {"batch_size": 4, "shuffle": False, "verbose": 0}
    with pytest.raises(KeyboardInterrupt):
        mine.fit({name: ids[::-1] for name, ids in x.items()}, -y, callbacks=[Interrupt()], **settings)
    assert not mine.is_accumulating
    mine.fit(x, y, **settings)
    other.fit(x, y, **settings)
    assert_same(mine, other)


def test_fit_names_what_a_loop_has_left_and_starts_without_it():
    mine, other = (
        make(SGD(None), lambda: tf.keras.optimizers.SGD(0.1), k=4, run_eagerly=True) for _ in range(2)
    )
    train(mine, [5, 6])
    x, y = samples(16)
    settings = {"batch_size": 4, "shuffle": False, "verbose": 0}
    with pytest.warns(UserWarning, match="starts without 2 accumulated batches.*call apply_accumulated"):
        mine.fit(x, y, **settings)
    other.fit(x, y, **settings)
    np.testing.assert_allclose(mine.predict(x, verbose=0), other.predict(x, verbose=0), rtol=2e-4)

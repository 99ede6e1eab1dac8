"""``mixed_float16``: dense layers in float16, rows in float32, and a loss scale that holds for both."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel, Model
from gmeta.optimizers import SGD
from support.drawn_batches import make_batch

START = Normal(0.0, 1.0)


@pytest.fixture(autouse=True)
def _mixed():
    before = tf.keras.mixed_precision.global_policy()
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    tf.keras.mixed_precision.set_global_policy(before)


def make(dense=True, factor=1.0, **options):
    ids = tf.keras.Input([], name="x", dtype=tf.int64)
    feature = FeatureConfig("x", TableConfig("x", 4, initializer=Normal(0.0, 1.0)))
    collection = EmbeddingCollection([feature], optimizer=SGD(None), name="collection")
    vectors = collection({"x": ids})["x"]
    # The bias comes after the factor: where that is huge, the rows' gradient overflows and the bias's
    # doesn't.
    y = tf.keras.layers.Lambda(lambda v: tf.reduce_sum(v * factor, axis=-1, keepdims=True))(vectors)
    if dense:
        y = tf.keras.layers.Dense(1, kernel_initializer="ones", trainable=True)(y)
    model = Model(ids, tf.keras.layers.Activation("linear", dtype="float32")(y))
    optimizer = tf.keras.optimizers.SGD(0.01)
    if tf.keras.mixed_precision.global_policy().name == "mixed_float16":
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=1024.0)
    model.compile(optimizer, "mse", **options)
    return model


def rows(model):
    return model.get_layer("collection").tables[0].lookup([1, 2, 3], insert=False).rows.numpy()


X, Y = np.array([1, 2, 3, 1]), np.array([1.0, -1.0, 0.5, 2.0], np.float32)


def test_vectors_are_float16_and_rows_float32():
    model = make()
    collection = model.get_layer("collection")
    ids = {"x": tf.constant([1], tf.int64)}
    assert collection(ids)["x"].dtype == tf.float16
    assert collection.lookup(ids).rows[0].dtype == tf.float32


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"accumulate_steps": 2}], ids=str)
@pytest.mark.parametrize("dense", [True, pytest.param(False, marks=pytest.mark.slow)])  # quick: True
@pytest.mark.shown_by(case="True-{}")
def test_rows_move_by_the_unscaled_gradient(options, dense):
    half = make(dense, **options)
    tf.keras.mixed_precision.set_global_policy("float32")
    full = make(dense)
    start = rows(full)
    np.testing.assert_array_equal(rows(half), start)
    full.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    half.fit(X, Y, batch_size=2 if "accumulate_steps" in options else 4, epochs=3, shuffle=False, verbose=0)
    assert np.abs(rows(full) - start).max() > 0.01
    np.testing.assert_allclose(rows(half), rows(full), atol=2e-3)
    assert float(half.optimizer.loss_scale) == 1024.0  # no step was left out


@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 1, "run_eagerly": True}], ids=str)
@pytest.mark.parametrize("dense", [True, False])
def test_a_step_whose_rows_gradient_overflows_changes_nothing_and_lowers_the_scale(options, dense):
    model = make(dense, factor=3000.0, **options)
    before, weights, scale = rows(model), model.get_weights(), float(model.optimizer.loss_scale)
    small = Y * 1e-3
    model.fit(X, small, batch_size=4, verbose=0)
    np.testing.assert_array_equal(rows(model), before)
    for mine, old in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(mine, old)
    assert float(model.optimizer.loss_scale) == scale / 2


def keras_stack():
    start = tf.keras.initializers.GlorotUniform  # with seeds: errors are of what is multiplied
    return tf.keras.Sequential(
        [
            tf.keras.layers.Dense(8, "relu", kernel_initializer=start(seed=1), name="fc"),
            tf.keras.layers.Dense(1, kernel_initializer=start(seed=2), name="out"),
        ]
    )


def dense_stack():
    return MLP({"fc": 8, "out": 1})


# Quick: dense_stack.
@pytest.mark.parametrize("network", [dense_stack, pytest.param(keras_stack, marks=pytest.mark.slow)])
def test_tasks_adapt_in_float16_close_to_float32(network):
    features = [
        FeatureConfig("user", TableConfig("user", 4, initializer=START)),
        FeatureConfig("item", TableConfig("item", 4, initializer=START)),
    ]
    inner, batch = InnerLoop(steps=2, learning_rate=0.05, adapt="all"), make_batch([3, 2])
    half = MetaModel(EmbeddingCollection(features), network(), inner=inner)
    tf.keras.mixed_precision.set_global_policy("float32")
    full = MetaModel(EmbeddingCollection(features), network(), inner=inner)
    for mine, other in zip(half.network.weights, full.network.weights, strict=True):
        mine.assign(other)
    for model in (half, full):
        optimizer = tf.keras.optimizers.SGD(0.01)
        if model is half:
            optimizer = tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=1024.0)
        model.compile(optimizer, "mse", run_eagerly=True)
    assert half(batch).dtype == tf.float32
    np.testing.assert_allclose(half(batch), full(batch), rtol=2**-8, atol=5e-3)  # roundings by 2^-11
    data = tf.data.Dataset.from_tensors(batch).repeat(5)
    losses = [model.fit(data, verbose=0).history["loss"][0] for model in (half, full)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=5e-3)
    for mine, other in zip(half.network.weights, full.network.weights, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-3)

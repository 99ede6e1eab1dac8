from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gmeta import initializers, ops, optimizers
from gmeta.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("table_device")

keras = tf.keras.optimizers
FTRL = {"l2_shrinkage": 0.03, "beta": 0.1}
PAIRS = {
    "sgd": (optimizers.SGD(0.05), keras.SGD(0.05)),
    "momentum": (optimizers.Momentum(0.01, 0.9), keras.SGD(0.01, 0.9)),
    "nesterov": (optimizers.Momentum(0.01, 0.9, nesterov=True), keras.SGD(0.01, 0.9, nesterov=True)),
    "adagrad": (optimizers.Adagrad(0.05), keras.Adagrad(0.05)),
    "adam": (optimizers.Adam(0.001), keras.Adam(0.001)),
    "adamw": (optimizers.AdamW(0.001, weight_decay=0.1), keras.AdamW(0.001, weight_decay=0.1)),
    "ftrl": (optimizers.Ftrl(0.05), keras.Ftrl(0.05)),
    "ftrl with everything": (
        optimizers.Ftrl(0.05, l1=0.01, l2=0.02, **FTRL),
        keras.Ftrl(
            0.05,
            l1_regularization_strength=0.01,
            l2_regularization_strength=0.02,
            l2_shrinkage_regularization_strength=FTRL["l2_shrinkage"],
            beta=FTRL["beta"],
        ),
    ),
}
LAZY_IN_KERAS = (
    "sgd",
    "adagrad",
)  # in the others a row without a gradient moves too; see the lazy forms below


@pytest.mark.parametrize(
    ("name", "every_row"), [*((name, True) for name in PAIRS), *((name, False) for name in LAZY_IN_KERAS)]
)
@pytest.mark.shown_by(case="cpu-adam-True")
def test_optimizers_equal_keras_over_200_steps(name, every_row):
    sparse, optimizer = PAIRS[name][0], PAIRS[name][1].from_config(PAIRS[name][1].get_config())
    optimizer.jit_compile = False  # what Keras compiles on a GPU takes no IndexedSlices
    random = np.random.default_rng(0)
    rows, dim = 20, 7
    table = ops.HashTable(dim, sparse, initializers.Normal(0, 1), seed=1)
    keys = np.arange(rows) * 1_000_003 - 7
    variable = tf.Variable(table.lookup_keys(keys))

    @tf.function
    def keras_step(grads: tf.Tensor, indices: tf.Tensor) -> None:
        gradient = tf.IndexedSlices(grads, indices, [rows, dim])
        # Keras' Ftrl takes dense gradients only.
        optimizer.apply_gradients([(tf.convert_to_tensor(gradient) if every_row else gradient, variable)])

    for _ in range(200):
        chosen = np.arange(rows) if every_row else random.choice(rows, 6, replace=False)
        grads = random.normal(size=(len(chosen), dim)).astype(np.float32)
        table.apply_gradients(keys[chosen], grads)
        keras_step(tf.constant(grads), tf.constant(chosen, tf.int32))
    np.testing.assert_allclose(table.lookup_keys(keys, insert=False), variable, rtol=0, atol=1e-6)


def test_rowwise_adagrad_equals_adagrad_on_rows_of_one():
    random = np.random.default_rng(0)
    tables = [
        ops.HashTable(1, kind(0.05), initializers.Normal(0, 1))
        for kind in (optimizers.RowWiseAdagrad, optimizers.Adagrad)
    ]
    keys = np.arange(5)
    for table in tables:
        table.lookup(keys)
    for _ in range(200):
        grads = random.normal(size=(5, 1)).astype(np.float32)
        for table in tables:
            table.apply_gradients(keys, grads)
    np.testing.assert_allclose(*(table.lookup_keys(keys) for table in tables), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adam", "adamw", "ftrl with everything"])
@pytest.mark.shown_by(case="cpu-adam")
def test_lazy_forms_equal_keras_with_rows_without_a_gradient_put_back(name):
    # Keras' own optimizer on a dense variable; rows without a gradient get their state of before back.
    random = np.random.default_rng(0)
    rows, dim = 12, 5
    sparse, optimizer = PAIRS[name][0], PAIRS[name][1].from_config(PAIRS[name][1].get_config())
    table = ops.HashTable(dim, sparse, initializers.Normal(0, 1), seed=1)
    keys = np.arange(rows)
    variable = tf.Variable(table.lookup_keys(keys))
    optimizer.build([variable])
    state = [variable, *(v for v in optimizer.variables if v.shape == variable.shape)]
    assert len(state) == 1 + len(sparse.slots)

    @tf.function
    def keras_step(grads: tf.Tensor, has_grad: tf.Tensor) -> None:
        before = [tf.identity(v) for v in state]
        optimizer.apply_gradients([(grads, variable)])
        for v, old in zip(state, before, strict=True):
            v.assign(tf.where(has_grad[:, None], v, old))

    for _ in range(200):
        chosen = random.choice(rows, 4, replace=False)
        grads = np.zeros((rows, dim), np.float32)
        grads[chosen] = random.normal(size=(4, dim))
        table.apply_gradients(chosen, grads[chosen])
        keras_step(tf.constant(grads), tf.constant(np.isin(keys, chosen)))
    np.testing.assert_allclose(table.lookup_keys(keys, insert=False), variable, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optimizers.Momentum(momentum=1.0),
        lambda: optimizers.AdamW(weight_decay=-0.1),
        lambda: optimizers.Ftrl(learning_rate=0.0),
        lambda: optimizers.Ftrl(learning_rate_power=0.5),
        lambda: optimizers.Ftrl(l1=-1.0),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_learning_rate_is_a_number_a_schedule_or_an_argument():
    grads = tf.ones([1, 1])
    schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [1.0, 10.0, 100.0])
    table = ops.HashTable(1, optimizers.SGD(schedule), initializers.Zeros())
    table.lookup([5])
    for expected in (-1.0, -11.0, -111.0):
        table.apply_gradients([5], grads)
        assert float(table.lookup([5]).rows[0, 0]) == expected
    table.apply_gradients([5], grads, learning_rate=tf.constant(0.5))
    assert float(table.lookup([5]).rows[0, 0]) == -111.5

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gmeta import ops

KERAS = {
    "sgd": tf.keras.optimizers.SGD,
    "adagrad": tf.keras.optimizers.Adagrad,
    "adam": tf.keras.optimizers.Adam,
}


# Keras' Adam decays the moments of rows without a gradient, so here every row has one. The lazy form is next.
@pytest.mark.parametrize(
    ("sparse", "every_row"),
    [
        (ops.SGD(0.05), True),
        (ops.SGD(0.05), False),
        (ops.Adagrad(0.05), True),
        (ops.Adagrad(0.05), False),
        (ops.Adam(0.001), True),
    ],
    ids=lambda value: getattr(value, "kind", "every row" if value else "some rows"),
)
def test_optimizers_equal_keras_over_200_steps(sparse, every_row):
    random = np.random.default_rng(0)
    rows, dim = 20, 7
    table = ops.HashTable(dim, sparse, ops.Normal(0, 1), seed=1)
    keys = np.arange(rows) * 1_000_003 - 7
    variable = tf.Variable(table.lookup_keys(keys))
    optimizer = KERAS[sparse.kind](sparse.learning_rate)

    @tf.function
    def keras_step(grads: tf.Tensor, indices: tf.Tensor) -> None:
        optimizer.apply_gradients([(tf.IndexedSlices(grads, indices, [rows, dim]), variable)])

    for _ in range(200):
        chosen = np.arange(rows) if every_row else random.choice(rows, 6, replace=False)
        grads = random.normal(size=(len(chosen), dim)).astype(np.float32)
        table.apply_gradients(keys[chosen], grads)
        keras_step(tf.constant(grads), tf.constant(chosen, tf.int32))
    np.testing.assert_allclose(table.lookup_keys(keys, insert=False), variable, rtol=0, atol=1e-6)


def test_lazy_adam_equals_keras_adam_with_lazy_moments():
    # Keras' own Adam on a dense variable; rows without a gradient get their state of before back.
    random = np.random.default_rng(0)
    rows, dim = 12, 5
    table = ops.HashTable(dim, ops.Adam(0.001), ops.Normal(0, 1), seed=1)
    keys = np.arange(rows)
    variable = tf.Variable(table.lookup_keys(keys))
    optimizer = tf.keras.optimizers.Adam(0.001)
    optimizer.build([variable])
    state = [variable, *(v for v in optimizer.variables if v.shape == variable.shape)]
    assert len(state) == 3

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


def test_learning_rate_is_a_number_a_schedule_or_an_argument():
    grads = tf.ones([1, 1])
    schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [1.0, 10.0, 100.0])
    table = ops.HashTable(1, ops.SGD(schedule), ops.Zeros())
    table.lookup([5])
    for expected in (-1.0, -11.0, -111.0):
        table.apply_gradients([5], grads)
        assert float(table.lookup([5]).rows) == expected
    table.apply_gradients([5], grads, learning_rate=tf.constant(0.5))
    assert float(table.lookup([5]).rows) == -111.5

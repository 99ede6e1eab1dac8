"""One optimizer's updates of all dense variables, compiled together, beside Keras' own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from gmeta.layers import record_lookups
from gmeta.training import joint_optimizer


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_gpu_updates_all_variables_in_one_computation(eager):
    """Keras compiles an update for each variable, which on a GPU leaves gaps between them."""
    found, calls = [], []
    for joined in (True, False):
        start = tf.keras.initializers.RandomUniform(seed=1)
        model = tf.keras.Sequential([tf.keras.layers.Dense(n, kernel_initializer=start) for n in (4, 1)])
        model.build([None, 3])
        optimizer = tf.keras.optimizers.Adam(0.1, weight_decay=0.01, clipnorm=1.0)
        optimizer.jit_compile = True  # as Keras sets it where there is a GPU
        joint = joint_optimizer.JointOptimizer(optimizer)

        def step(model=model, optimizer=optimizer, joint=joint if joined else None):
            with tf.GradientTape() as tape, record_lookups(tape) as lookups:
                loss = tf.reduce_mean(model(tf.reshape(tf.range(12.0), [4, 3])) ** 2)
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            if joint is None:
                optimizer.apply_gradients(zip(gradients, variables, strict=True))
            else:
                joint.step(gradients, variables, lookups)

        run = step if eager else tf.function(step)
        if not eager:
            ops = run.get_concrete_function().graph.get_operations()
            calls.append(sum(op.type == "StatefulPartitionedCall" for op in ops))
        for _ in range(3):
            run()
        assert int(optimizer.iterations) == 3
        found.append([variable.numpy() for variable in (*model.variables, *optimizer.variables)])
    assert calls == ([] if eager else [1, 4])
    assert "_distributed_apply_gradients_fn" not in vars(optimizer)
    for ours, of_keras in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, of_keras)


def test_threads_may_step_with_one_optimizer():
    optimizer = tf.keras.optimizers.SGD(1.0)
    optimizer.jit_compile = True
    weights = [tf.Variable(float(number)) for number in range(2)]
    optimizer.build(weights)

    def train(number):
        joint = joint_optimizer.JointOptimizer(optimizer)
        with record_lookups() as nothing:
            pass
        for _ in range(10):
            joint.step([tf.constant(1.0)], [weights[number]], nothing)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, range(2)))
    assert [float(weight) for weight in weights] == [-10.0, -9.0]

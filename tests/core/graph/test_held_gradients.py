"""Held gradients are the same ones, and none of them is computed with before what they wait for."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.graph import hold_gradients


def test_structures_come_back_as_they_were() -> None:
    """Numbers, vectors, slices and None, in a graph and without one."""

    def held(matrix: tf.Tensor, number: tf.Tensor, rows: tf.Tensor) -> list[object]:
        slices = tf.IndexedSlices(rows, tf.constant([4, 1]), tf.constant([5, 2]))
        return hold_gradients([[matrix, None, slices], number], [tf.constant(True)])

    given = tf.random.normal([3, 2]), tf.constant(7.0), tf.cast(tf.random.normal([2, 2]), tf.bfloat16)
    for run in (held, tf.function(held)):
        (matrix, nothing, slices), number = run(*given)
        assert nothing is None
        np.testing.assert_array_equal(slices.indices, [4, 1])
        np.testing.assert_array_equal(slices.dense_shape, [5, 2])
        for one, other in zip((matrix, number, slices.values), given, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def test_nothing_is_updated_before_the_verdict() -> None:
    """If what they wait for fails, no variable has changed."""
    variables = [tf.Variable(tf.zeros([2])), tf.Variable(0.0)]

    @tf.function
    def step(gradients: list[tf.Tensor], sound: tf.Tensor) -> None:
        verdict = tf.debugging.Assert(sound, ["not finite"])
        for variable, gradient in zip(variables, hold_gradients(gradients, [verdict]), strict=True):
            variable.assign_add(gradient)

    gradients = [tf.ones([2]), tf.constant(1.0)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        step(gradients, tf.constant(False))
    assert [float(tf.reduce_sum(each)) for each in variables] == [0.0, 0.0]
    step(gradients, tf.constant(True))
    assert [float(tf.reduce_sum(each)) for each in variables] == [2.0, 1.0]


def test_casts_of_gradients_do_not_wait() -> None:
    """TensorFlow's rewrites leave casts of 16-bit gradients before what the gradients wait for."""
    variable = tf.Variable(tf.zeros([4, 4]))

    @tf.function
    def step(gradient: tf.Tensor, sound: tf.Tensor) -> None:
        with tf.device("CPU:0"):  # only ops of known places are rewritten
            verdict = tf.debugging.Assert(sound, ["not finite"])
            (held,) = hold_gradients([tf.cast(gradient, tf.float32)], [verdict])
            variable.assign_add(2.0 * held)

    given = tf.ones([4, 4], tf.bfloat16), tf.constant(True)
    step(*given)
    concrete = step.get_concrete_function(*given)
    config = tf.compat.v1.ConfigProto()
    graph = tf.compat.v1.train.export_meta_graph(
        graph_def=concrete.graph.as_graph_def(), graph=concrete.graph
    )
    graph.collection_def["train_op"].node_list.value.extend([concrete.graph.get_operations()[-1].name])
    from tensorflow.python.grappler import tf_optimizer

    optimized = tf_optimizer.OptimizeGraph(config, graph)
    casts = [node for node in optimized.node if node.op == "Cast"]
    assert casts
    assert not any(name.startswith("^") for node in casts for name in node.input)
    sources = {node.name: node for node in optimized.node}
    assert all(sources[node.input[0]].op in ("Placeholder", "_Arg") for node in casts)

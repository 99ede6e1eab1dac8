"""Graphs with gradients of their own, which TensorFlow's registry would keep."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.graph import gradients_released


def trace(scale):
    """Return a function that calls silu in itself and in an inner one, and a reference to its graph."""
    inner = tf.function(tf.nn.silu)

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def function(x):
        return tf.nn.silu(inner(x)) * scale

    concrete = function.get_concrete_function()
    return concrete, weakref.ref(concrete.graph)


@pytest.mark.parametrize("named", [True, False], ids=["its graph", "all graphs"])
def test_a_graph_lives_as_long_as_its_function(named):
    scale = tf.Variable(2.0)
    graphs = [] if named else None
    x = np.array([0.5, -2.0], np.float32)
    with gradients_released(graphs):
        function, graph = trace(scale)
        if named:
            graphs.append(function.graph)
        with tf.GradientTape() as tape:
            y = function(tf.constant(x))
        assert tape.gradient(y, scale) is not None
    twice = tf.nn.silu(tf.nn.silu(x)) * 2
    np.testing.assert_allclose(function(tf.constant(x)), twice, rtol=1e-6)
    del function, tape, y
    graphs = graphs and graphs.clear()
    gc.collect()
    assert graph() is None


def test_other_graphs_keep_their_gradients():
    scale, x = tf.Variable(2.0), tf.constant([0.5, -2.0])
    graphs: list[tf.Graph] = []
    with gradients_released(graphs):
        function, _ = trace(scale)
        other, _ = trace(scale)  # as another thread might
        graphs.append(other.graph)
    with tf.GradientTape() as tape:
        y = function(x)
    np.testing.assert_allclose(tape.gradient(y, scale), tf.reduce_sum(y) / 2, rtol=1e-6)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(LookupError, match=r"No gradient defined for operation.*IdentityN"):
            other(x)

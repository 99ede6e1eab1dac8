"""What blocks add: the formula, its gradients and theirs, and the graph that a GPU is given."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.ops import hstu_layer as module
from gmeta.ops.hstu_layer import residual


def drawn(seed, *shape):
    return tf.constant(np.random.default_rng(seed).standard_normal(shape))


@given(rows=st.integers(0, 5), width=st.integers(1, 9), has_x=st.booleans(), has_offset=st.booleans())
def test_the_formula_and_its_gradients(rows, width, has_x, has_offset):
    x, change, of_y = (drawn(i, rows, width) for i in range(3))
    offset = drawn(3, width)
    with tf.GradientTape() as tape:
        tape.watch([x, change, offset])
        y = residual(x if has_x else None, change, offset if has_offset else None)
    np.testing.assert_array_equal(y, has_x * x + (change + has_offset * offset))
    of_x, of_change, of_offset = tape.gradient(y, [x, change, offset], of_y)
    np.testing.assert_array_equal(of_change, of_y)
    assert (of_x is None) == (not has_x)
    assert (of_offset is None) == (not has_offset)
    if has_x:
        np.testing.assert_array_equal(of_x, of_y)
    if has_offset:
        np.testing.assert_allclose(of_offset, tf.reduce_sum(of_y, axis=0), rtol=1e-14)


def test_the_gradient_of_sums_of_columns_reaches_each_row():
    x, of_sums = drawn(0, 3, 4), drawn(1, 4)
    found = module._gradient_of_sums(SimpleNamespace(inputs=[x]), of_sums)
    np.testing.assert_array_equal(found, [of_sums] * 3)


@pytest.mark.parametrize("has_x", [True, False])
@pytest.mark.parametrize("has_offset", [True, False])
def test_the_graph_of_a_gpu(monkeypatch, has_x, has_offset):
    """It is built where its kernels aren't."""
    monkeypatch.setattr(module, "has_row_kernels", lambda _: True)
    matrix, row = tf.TensorSpec([None, 16], tf.bfloat16), tf.TensorSpec([16], tf.bfloat16)

    @tf.function(input_signature=[matrix, matrix, row])
    def gradients(x, change, offset):
        with tf.GradientTape() as tape:
            tape.watch([x, change, offset])
            y = residual(x if has_x else None, change, offset if has_offset else None)
        return y, tape.gradient(y, [x, change, offset])

    graph = gradients.get_concrete_function()
    y, (of_x, of_change, of_offset) = graph.structured_outputs
    assert y.shape == of_change.shape == [None, 16]
    assert (of_x is not None) == has_x
    assert (None if of_offset is None else of_offset.shape) == ([16] if has_offset else None)
    types = [op.type for op in graph.graph.get_operations()]
    assert types.count("GmetaResidual") == 1
    assert types.count("GmetaColumnSums") == has_offset

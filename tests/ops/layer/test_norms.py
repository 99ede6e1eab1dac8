"""A norm that passes its input on: values, gradients and those of gradients, and the graph of a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from gmeta.ops import hstu_layer as module
from gmeta.ops.hstu_layer import layer_norm, norm_and_pass


def drawn(seed, *shape):
    return tf.constant(np.random.default_rng(seed).standard_normal(shape), tf.float32)


@pytest.mark.parametrize("weights", [[], [drawn(1, 5), drawn(2, 5)]], ids=["plain", "weighted"])
def test_what_is_passed_is_the_input(weights):
    x, of_normed, of_passed = (drawn(seed, 4, 5) for seed in (3, 4, 5))
    with tf.GradientTape() as tape:
        tape.watch(x)
        normed, passed = norm_and_pass(x, *weights)
    np.testing.assert_array_equal(normed, layer_norm(x, *weights))
    np.testing.assert_array_equal(passed, x)
    with tf.GradientTape() as of_norm:
        of_norm.watch(x)
        alone = layer_norm(x, *weights)
    found = tape.gradient([normed, passed], x, [of_normed, of_passed])
    np.testing.assert_allclose(found, of_norm.gradient(alone, x, of_normed) + of_passed, rtol=1e-6)


@pytest.mark.parametrize("passes", [False, True])
def test_gradients_of_the_gradient(passes):
    x, of_y, upstream = (drawn(seed, 4, 5) for seed in range(3))
    none, of_passed = tf.zeros([0]), drawn(4, 4, 5) if passes else tf.zeros([0])
    op = SimpleNamespace(inputs=[x, none, none, None, of_y, of_passed], get_attr=lambda _: 1e-6)
    found = module._second_gradient(op, upstream, none, none)
    with tf.GradientTape() as outer:
        outer.watch([x, of_y, of_passed])
        with tf.GradientTape() as inner:
            inner.watch(x)
            normed, passed = norm_and_pass(x)
        outputs, of = ([normed, passed], [of_y, of_passed]) if passes else ([normed], [of_y])
        first = inner.gradient(outputs, x, of)
    expected = outer.gradient(first, [x, of_y, of_passed], upstream)
    for place, want in zip((0, 4, 5), expected, strict=True):
        assert (found[place] is None) == (want is None)
        if want is not None:
            np.testing.assert_allclose(found[place], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_graph_of_a_gpu(monkeypatch, weighted):
    """It is built where its kernels aren't: gradients of what is passed are added by the norm's."""
    monkeypatch.setattr(module, "has_row_kernels", lambda _: True)
    weights = [tf.TensorSpec([16], tf.bfloat16)] * 2 if weighted else []

    @tf.function(input_signature=[tf.TensorSpec([None, 16], tf.bfloat16), *weights])
    def gradients(x, *weights):
        with tf.GradientTape() as tape:
            tape.watch([x, *weights])
            normed, passed = norm_and_pass(x, *weights)
            y = 2 * normed + passed
        return tape.gradient(y, [x, *weights])

    graph = gradients.get_concrete_function()
    assert [y.shape.as_list() for y in graph.structured_outputs] == [[None, 16], *[[16]] * (2 * weighted)]
    operations = graph.graph.get_operations()
    (gradient,) = (op for op in operations if op.type == "GmetaRowNormGradient")
    assert gradient.inputs[5].shape.as_list() == [None, 16]
    assert not any(op.type == "AddN" for op in operations)

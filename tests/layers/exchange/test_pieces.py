"""The pieces of a step's exchange, on one rank that asks itself."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.layers.exchange import pieces as exchange

KEYS = st.lists(st.integers(0, 9), min_size=1, max_size=12)
NUMBER = st.one_of(st.floats(-10, 10, width=32), st.sampled_from([0.0, -0.0, -1e-30, 1e20]))


@pytest.mark.parametrize("wire_dtype", [tf.float32, tf.float16, tf.bfloat16], ids=lambda t: t.name)
@given(keys=KEYS, data=st.data())
def test_keys_that_slices_leave_out_have_no_gradient_and_zeros_are_one(wire_dtype, keys, data):
    sent = exchange.send_keys([tf.constant(keys, tf.int64)])
    distinct = sent.routed.keys[0].numpy()
    indices = data.draw(st.lists(st.integers(0, len(distinct) - 1), max_size=6))
    values = np.array(
        data.draw(st.lists(st.tuples(NUMBER, NUMBER), min_size=len(indices), max_size=len(indices))),
        np.float32,
    ).reshape(-1, 2)
    slices = tf.IndexedSlices(
        tf.constant(values), tf.constant(indices, tf.int32), tf.constant([len(distinct), 2])
    )
    ((owned,),) = exchange.exchange_gradients([sent], [[slices]], wire_dtype=wire_dtype)
    sums = {}
    for index, value in zip(indices, values, strict=True):
        sums[distinct[index]] = sums.get(distinct[index], 0) + value
    assert set(owned.keys.numpy().tolist()) == set(sums)
    for key, found in zip(owned.keys.numpy(), owned.values.numpy(), strict=True):
        np.testing.assert_allclose(found, sums[key], rtol=2.0**-8, atol=np.abs(sums[key]).max() * 2.0**-39)


def test_a_dense_gradient_is_of_all_keys_whatever_its_zeros():
    sent = exchange.send_keys([tf.constant([4, 5, 6], tf.int64)])
    gradient = tf.constant([[-0.0, -0.0], [0.0, 0.0], [1.0, -0.0]])
    ((owned,),) = exchange.exchange_gradients([sent], [[gradient]])
    np.testing.assert_array_equal(owned.keys, sent.routed.keys[0])
    np.testing.assert_array_equal(owned.values, gradient)


def test_missing_gradients_are_looked_for_where_the_gradients_are():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 2])])
    def present(keys, values):
        return exchange.present(exchange.OwnedGradient(keys, values))

    graph = present.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    compared = [node.attr["T"].type for node in nodes if node.op in ("Equal", "NotEqual")]
    assert compared == [tf.uint32.as_datatype_enum] * 2  # a GPU has no kernel for int32 there

from __future__ import annotations

import threading

import pytest
import tensorflow as tf

from gmeta.core.graph import read_where_it_is, shapes_on_host
from gmeta.ops.table.finite import GradientCheck


def test_a_reduction_s_gradient_computes_its_shape_on_the_host():
    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def gradient(x):
        with shapes_on_host(), tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.reduce_mean(x * x, axis=1))
            found = tape.gradient(loss, x)
        return found

    operations = gradient.get_concrete_function().graph.get_operations()
    stitches = [op for op in operations if op.type == "DynamicStitch"]
    assert stitches
    assert all("CPU" in op.device for op in stitches)
    assert all("_class" not in op.node_def.attr for op in stitches)
    assert not any("CPU" in op.device for op in operations if op.type in ("Mul", "Mean"))
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    tf.debugging.assert_near(gradient(x), x)


def test_what_runs_at_once_is_left_alone():
    with shapes_on_host():
        assert int(tf.reduce_sum(tf.range(4))) == 6


def test_a_number_is_read_on_its_own_device():
    with tf.device("CPU:0"):
        plain, own = tf.Variable(3), read_where_it_is(tf.Variable(3))
    tf.config.set_soft_device_placement(False)
    try:
        with tf.device("CPU:9"):  # stands for a GPU
            with pytest.raises(tf.errors.InvalidArgumentError):
                plain.numpy()
            assert own.numpy() == 3
    finally:
        tf.config.set_soft_device_placement(True)
    own.assign(4)
    assert own.numpy() == 4


def test_gradients_with_finite_sums_of_squares_pass_before_the_search_for_bad_ones_ends():
    passed = threading.Event()

    def search(_):
        return "" if passed.wait(20) else "the search ended first"

    def note(passes):
        passed.set()
        return passes

    @tf.function
    def check(sound):
        bad = tf.numpy_function(search, [sound], tf.string, stateful=False)
        passes = GradientCheck(sound, tf.ensure_shape(bad, [])).passes()
        return bad, tf.numpy_function(note, [passes], tf.bool, stateful=False)

    bad, passes = check(tf.constant(True))
    assert (bad.numpy(), bool(passes)) == (b"", True)


@pytest.mark.parametrize("bad", ["", "table 'user'"])
def test_gradients_whose_squares_overflow_pass_if_the_search_finds_none(bad):
    assert bool(GradientCheck(tf.constant(False), tf.constant(bad)).passes()) == (bad == "")

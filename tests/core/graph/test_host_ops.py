from __future__ import annotations

import tensorflow as tf

from gmeta.core.graph import shapes_on_host


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

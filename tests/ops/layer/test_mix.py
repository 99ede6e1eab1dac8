"""Second gradients of the GPU's op for an HSTU layer, which plain TensorFlow computes anywhere."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from gmeta.ops import AttentionMask, RelativeBias
from gmeta.ops import hstu_layer as module
from gmeta.ops.attention_inputs import BUCKETS
from gmeta.ops.hstu_layer import hstu_mix
from gmeta.ops.table.portable_tables import portable_ops

OFFSETS = tf.constant([0, 3, 3, 10], tf.int64)
SETTINGS = {"heads": 2, "scale": 0.1, "alpha": 0.5, "epsilon": 1e-5}


def drawn(seed, *shape):
    return tf.constant(np.random.default_rng(seed).standard_normal(shape), tf.float64)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("weighted", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("production", [False, True], ids=["research", "production"])
def test_second_gradients(production, weighted, biased):
    width, visible = 2 * 4, AttentionMask().visible(OFFSETS)
    nothing = tf.zeros([0], tf.float64)
    gamma, beta = (drawn(1, width), drawn(2, width)) if weighted else (nothing, nothing)
    tables = (drawn(3, 2 * 9 - 1), drawn(4, BUCKETS)) if biased else (nothing, nothing)
    times = tf.constant([np.arange(10) ** 5 + 7, np.arange(10) ** 5], tf.int64)
    floats = [drawn(0, 10, 4 * width), gamma, beta, *tables]
    of_mixed = drawn(5, 10, width * (3 if production else 1))
    upstream = [drawn(6 + i, *x.shape) for i, x in enumerate(floats)]

    def first_gradients(floats, of_mixed):
        z, gamma, beta, *tables = floats
        settings = {name: SETTINGS[name] for name in ("heads", "scale", "alpha")}
        with tf.GradientTape() as tape:
            tape.watch(floats)
            mixed = hstu_mix(
                z,
                OFFSETS,
                visible,
                attention_dim=4,
                value_dim=4,
                form="production" if production else "research",
                norm_scale=gamma if weighted else None,
                norm_offset=beta if weighted else None,
                eps=SETTINGS["epsilon"],
                bias=RelativeBias(*tables, *times) if biased else None,
                **settings,
            )
        zero = tf.UnconnectedGradients.ZERO
        return [tf.convert_to_tensor(x) for x in tape.gradient(mixed, floats, of_mixed, zero)]

    with portable_ops(), tf.GradientTape() as tape:
        tape.watch([*floats, of_mixed])
        first = first_gradients(floats, of_mixed)
    exact = tape.gradient(first, [*floats, of_mixed], upstream, tf.UnconnectedGradients.ZERO)

    z, gamma, beta, *tables = floats
    results = [tf.zeros([0])] * 4  # of the forward op
    plan = time_map = tf.zeros([0], tf.uint8)
    inputs = [z, OFFSETS, visible, plan, gamma, beta, *tables, *times, time_map, nothing, *results, of_mixed]
    op = SimpleNamespace(inputs=inputs, get_attr={**SETTINGS, "production": production}.__getitem__)
    found = module._mix_second_gradient(op, *upstream)
    assert len(found) == len(inputs)
    for place, want in zip([0, 4, 5, 6, 7, 16], exact, strict=True):
        assert found[place].dtype == inputs[place].dtype
        want = tf.convert_to_tensor(want)
        np.testing.assert_allclose(
            found[place], want, rtol=2e-3, atol=2e-4 * (1 + np.abs(want).max(initial=0))
        )


@pytest.mark.parametrize("form", ["research", "production"])
def test_a_kernel_is_what_the_projection_is_made_with(form):
    x, kernel = drawn(0, 10, 6), drawn(1, 6, 32)
    visible = AttentionMask().visible(OFFSETS)
    settings = {"heads": 2, "attention_dim": 4, "value_dim": 4, "scale": 0.1, "form": form}
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, kernel])
        at_once = hstu_mix(x, OFFSETS, visible, kernel=kernel, **settings)
        apart = hstu_mix(x @ kernel, OFFSETS, visible, **settings)
    np.testing.assert_array_equal(at_once, apart)
    for one, other in zip(*(tape.gradient(y, [x, kernel]) for y in (at_once, apart)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_gradient_of_a_fused_projection_flows_by_what_is_not_activated():
    x, w, of_z = drawn(0, 10, 6), drawn(1, 6, 32), drawn(2, 10, 32)
    found = module._gradient_of_projection(SimpleNamespace(inputs=[x, w]), of_z, tf.zeros([10, 24]))
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        z = x @ w
    for one, other in zip(found, tape.gradient(z, [x, w], of_z), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize(("dim", "fused"), [(16, True), (12, False)])
def test_the_graph_of_a_gpu(monkeypatch, dim, fused):
    """It is built where its kernels aren't."""
    for name in ("on_gpu", "is_native"):
        monkeypatch.setattr(module, name, lambda *_: True)
    x, w = (tf.TensorSpec(shape, tf.bfloat16) for shape in ([10, dim], [dim, 512]))

    @tf.function(input_signature=[x, w])
    def gradients(x, w):
        visible = AttentionMask().visible(OFFSETS)
        settings = {"heads": 2, "attention_dim": 64, "value_dim": 64, "scale": 0.1}
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            mixed = hstu_mix(x, OFFSETS, visible, kernel=w, **settings)
        return mixed, tape.gradient(mixed, [x, w])

    graph = gradients.get_concrete_function()
    assert [y.shape for y in tf.nest.flatten(graph.structured_outputs)] == [[10, 128], x.shape, w.shape]
    (mix,) = (op for op in graph.graph.get_operations() if op.type == "GmetaHstuMix")
    product = mix.inputs[0].op
    if fused:
        assert product.type == "GmetaSiluProjection"
        assert mix.inputs[11] is product.outputs[1]
        assert [y.shape for y in product.outputs] == [[10, 512], [10, 384]]
    else:
        assert product.type == "MatMul"
        assert mix.inputs[11].shape == [0]

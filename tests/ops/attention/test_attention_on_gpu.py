"""HSTU attention, norms and layers on a GPU: their errors against float64 beside those of the plain form."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from gmeta.layers.sequence.hstu import HSTUBlock
from gmeta.ops import AttentionMask, Jagged, RelativeBias, hstu_attention
from gmeta.ops.attention_inputs import BUCKETS
from gmeta.ops.hstu_layer import hstu_mix, layer_norm, norm_and_pass, residual
from gmeta.ops.jagged_attention import bias_attention
from gmeta.ops.table.portable_tables import portable_ops

pytestmark = pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="needs a GPU")

LENGTHS = [5, 0, 1, 63, 64, 65, 300, 130]
MASKS = {
    "causal": (AttentionMask(), None, None),
    "full": (AttentionMask(causal=False), None, None),
    "window": (AttentionMask(window=40), None, None),
    "parts": (AttentionMask(window=70, full_tail=3), [2, 0, 1, 3, 0, 4, 1, 2], [1, 0, 0, 5, 2, 0, 17, 3]),
}


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def distance(found, exact):
    found, exact = (tf.cast(x, tf.float64).numpy() for x in (found, exact))
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def batch(mask):
    rule, contexts, targets = MASKS[mask]
    offsets = tf.constant(np.concatenate([[0], np.cumsum(LENGTHS)]), tf.int64)
    return offsets, rule.visible(offsets, contexts, targets)


def value_and_gradients(call, inputs, upstream):
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        out = call(*inputs)
    gradients = tape.gradient(out, inputs, tf.cast(upstream, out.dtype))
    return [out, *(tf.convert_to_tensor(x) for x in gradients)]


def check(call, arrays, upstream, dtype):
    """In dtype on the GPU: the same each time, at most twice as far from float64 as plain TensorFlow is."""
    inputs = [tf.constant(x, dtype) for x in arrays]
    found = value_and_gradients(call, inputs, upstream)
    again = value_and_gradients(call, inputs, upstream)
    with portable_ops():
        plain = value_and_gradients(call, inputs, upstream)
        exact = value_and_gradients(call, [tf.cast(x, tf.float64) for x in inputs], upstream)
    for one, two, near, true in zip(found, again, plain, exact, strict=True):
        assert one.dtype == dtype
        assert "GPU" in one.device
        assert distance(one, true) <= 2 * distance(near, true)
        np.testing.assert_array_equal(tf.cast(one, tf.float32), tf.cast(two, tf.float32))


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", ["silu", "softmax"])
def test_attention(form, mask, width, dtype):
    offsets, visible = batch(mask)
    heads = [drawn(seed, sum(LENGTHS), 2, width) for seed in range(4)]
    settings = {"scale": 1 / 50, "alpha": width**-0.5, "form": form}
    check(lambda q, k, v: hstu_attention(q, k, v, offsets, visible, **settings), heads[:3], heads[3], dtype)


def times():
    """When the tokens came, and when what they look for did."""
    at = np.cumsum(2 ** np.random.default_rng(5).integers(0, 25, sum(LENGTHS)))
    return tf.constant(at + 100), tf.constant(at)


def tables():
    """Of places, fewer than there are, and of times."""
    return [drawn(6, 2 * 200 - 1), drawn(7, BUCKETS)]


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("mask", ["causal", "parts"])
@pytest.mark.parametrize("form", ["silu", "softmax"])
def test_attention_with_a_bias(form, mask, width):
    offsets, visible = batch(mask)
    heads = [drawn(seed, sum(LENGTHS), 2, width) for seed in range(4)]

    def attend(q, k, v, *bias):
        settings = {"scale": 1 / 50, "alpha": width**-0.5, "form": form}
        return hstu_attention(q, k, v, offsets, visible, bias=RelativeBias(*bias, *times()), **settings)

    check(attend, [*heads[:3], *tables()], heads[3], tf.bfloat16)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("mask", ["causal", "parts"])
def test_attention_by_the_bias_alone(mask, width):
    offsets, visible = batch(mask)

    def attend(v, *bias):
        return bias_attention(v, offsets, visible, scale=1 / 50, bias=RelativeBias(*bias, *times()))

    check(
        attend, [drawn(0, sum(LENGTHS), 2, width), *tables()], drawn(3, sum(LENGTHS), 2, width), tf.bfloat16
    )


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("form", ["research", "production"])
@pytest.mark.parametrize(("heads", "width"), [(2, 64), (4, 128)])
def test_a_mix(heads, width, form, biased):
    offsets, visible = batch("parts")
    total, dim = sum(LENGTHS), heads * width
    arrays = [drawn(0, total, 4 * dim) / 2, 1 + drawn(1, dim) / 4, drawn(2, dim) / 4]
    check(
        lambda z, gamma, beta, *bias: hstu_mix(
            z,
            offsets,
            visible,
            heads=heads,
            attention_dim=width,
            value_dim=width,
            scale=1 / 50,
            alpha=width**-0.5,
            form=form,
            norm_scale=gamma,
            norm_offset=beta,
            bias=RelativeBias(*bias, *times()) if bias else None,
        ),
        arrays + (tables() if biased else []),
        drawn(3, total, dim * (3 if form == "production" else 1)),
        tf.bfloat16,
    )


@pytest.mark.parametrize("inner", [72, 70], ids=["fused", "apart"])
@pytest.mark.parametrize(("heads", "width"), [(2, 64), (4, 128)])
def test_a_mix_with_its_projection(heads, width, inner):
    offsets, visible = batch("parts")
    total, dim = sum(LENGTHS), heads * width
    settings = {"heads": heads, "attention_dim": width, "value_dim": width, "scale": 1 / 50}
    check(
        lambda x, w: hstu_mix(x, offsets, visible, kernel=w, **settings),
        [drawn(0, total, inner), drawn(1, inner, 4 * dim) / inner**0.5],
        drawn(2, total, dim),
        tf.bfloat16,
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (300, 136), (77, 1024), (40, 4096)])
def test_norm(rows, width, weighted):
    weights = [1 + drawn(1, width), drawn(2, width)] if weighted else []
    check(layer_norm, [3 + 2 * drawn(0, rows, width), *weights], drawn(3, rows, width), tf.bfloat16)


@pytest.mark.parametrize("weighted", [False, True])
def test_norm_and_pass(weighted):
    weights = [1 + drawn(1, 264), drawn(2, 264)] if weighted else []

    def both(*inputs):
        normed, passed = norm_and_pass(*inputs)
        return normed * 3 + passed

    check(both, [3 + 2 * drawn(0, 300, 264), *weights], drawn(3, 300, 264), tf.bfloat16)


@pytest.mark.parametrize("has_x", [True, False])
@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3000, 264), (20_000, 1024), (77, 4096)])
def test_residual(rows, width, dtype, has_x):
    x = [drawn(0, rows, width)] if has_x else []
    arrays = [*x, drawn(1, rows, width), drawn(2, width)]
    check(
        lambda *given: residual(*given) if has_x else residual(None, *given),
        arrays,
        1 + drawn(3, rows, width),
        dtype,
    )


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("form", ["research", "production"])
def test_gradients_of_gradients_are_those_of_the_plain_form(form, biased):
    offsets, visible = batch("causal")
    z = tf.constant(drawn(0, sum(LENGTHS), 4 * 64) / 2, tf.bfloat16)
    bias = RelativeBias(*(tf.constant(x, tf.float32) for x in tables()), *times()) if biased else None

    def second(z):
        with tf.GradientTape() as outer:
            outer.watch(z)
            with tf.GradientTape() as inner:
                inner.watch(z)
                settings = {"heads": 1, "attention_dim": 64, "value_dim": 64, "scale": 1 / 50, "form": form}
                out = hstu_mix(layer_norm(z), offsets, visible, bias=bias, **settings)
            (first,) = inner.gradient(out, [z])
            loss = tf.reduce_sum(first**2)
        return outer.gradient(loss, z)

    with portable_ops():
        exact, plain = second(tf.cast(z, tf.float64)), second(z)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # that it is plain is no shortcoming of the GPU's
        assert distance(second(z), exact) <= 2 * distance(plain, exact)


def test_a_block_computes_in_a_graph_what_it_does_without_one():
    """TensorFlow rounds sums less often in a graph, where it joins them."""
    block = HSTUBlock(
        heads=2,
        attention_dim=64,
        value_dim=64,
        max_length=300,
        bias_by_time=False,
        dtype=tf.keras.mixed_precision.Policy("mixed_bfloat16"),
    )
    offsets = batch("causal")[0]
    x = Jagged(tf.constant(drawn(0, sum(LENGTHS), 96), tf.bfloat16), offsets)
    eager = block(x).values
    assert distance(tf.function(block)(x).values, eager) < 2**-8


def test_what_has_no_kernel_is_computed_by_plain_tensorflow_with_one_warning():
    offsets, visible = batch("causal")
    q = tf.constant(drawn(0, sum(LENGTHS), 2, 24), tf.bfloat16)
    with pytest.warns(UserWarning, match="not 24 and 24"):
        found = hstu_attention(q, q, q, offsets, visible, scale=0.1)
    with portable_ops():
        np.testing.assert_array_equal(found, hstu_attention(q, q, q, offsets, visible, scale=0.1))


def test_offsets_that_cannot_be_make_nan():
    visible = batch("causal")[1]
    q = tf.ones([visible.shape[0], 1, 64], tf.bfloat16)
    wrong = tf.constant([0, 10**6, visible.shape[0]], tf.int64)
    out = hstu_attention(q, q, q, wrong, visible, scale=0.1)
    assert np.all(np.isnan(tf.cast(out, tf.float32)))

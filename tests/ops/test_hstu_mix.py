"""Second gradients of the GPU's op for an HSTU layer, which plain TensorFlow computes anywhere."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from gmeta.ops import AttentionMask, RelativeBias, hstu_mix
from gmeta.ops.portable import portable_ops
from gmeta.ops.relative_bias import BUCKETS

module = importlib.import_module("gmeta.ops.hstu_mix")  # whose name is also the function's
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
    inputs = [z, OFFSETS, visible, tf.zeros([0], tf.uint8), gamma, beta, *tables, *times, *results, of_mixed]
    op = SimpleNamespace(inputs=inputs, get_attr={**SETTINGS, "production": production}.__getitem__)
    found = module._second_gradient(op, *upstream)
    assert len(found) == len(inputs)
    for place, want in zip([0, 4, 5, 6, 7, 14], exact, strict=True):
        assert found[place].dtype == inputs[place].dtype
        want = tf.convert_to_tensor(want)
        np.testing.assert_allclose(
            found[place], want, rtol=2e-3, atol=2e-4 * (1 + np.abs(want).max(initial=0))
        )

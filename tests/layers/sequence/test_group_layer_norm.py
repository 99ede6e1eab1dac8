"""Layer norm by domain, against the equation a token at a time."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.layers.sequence.hstu import GroupLayerNorm
from support.layer_parity import check_layer
from support.reference.sequence_layers import group_layer_norm


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**20),
    total=st.integers(0, 9),
    dim=st.integers(2, 8),
    domains=st.integers(1, 4),
    short=st.booleans(),
)
def test_outputs_and_gradients_are_those_of_the_equation(seed, total, dim, domains, short):
    random = np.random.default_rng(seed)
    of = random.integers(0, domains, total).astype(np.int32 if short else np.int64)
    check_layer(
        lambda dtype: GroupLayerNorm(domains, dtype=dtype),
        lambda layer, x: layer(x, of),
        lambda x, weights: group_layer_norm(x, weights, of),
        random.normal(size=(total, dim)) + random.normal(),
        seed,
    )
    check_layer(  # one domain for all tokens
        lambda dtype: GroupLayerNorm(domains, dtype=dtype),
        lambda layer, x: layer(x, domains - 1),
        lambda x, weights: group_layer_norm(x, weights, np.full(total, domains - 1)),
        random.normal(size=(total, dim)),
        seed,
    )


def test_tokens_do_not_depend_on_each_other():
    layer = GroupLayerNorm(3)
    x, of = tf.random.stateless_normal([7, 8], [1, 2]), tf.constant([0, 2, 1, 1, 0, 2, 2])
    together = layer(x, of)
    np.testing.assert_allclose(layer(x[3:5], of[3:5]), together[3:5], rtol=1e-6, atol=1e-6)


def test_gradients_are_dense_and_of_the_domains_that_are_there():
    layer = GroupLayerNorm(3)
    with tf.GradientTape() as tape:
        out = layer(tf.random.stateless_normal([4, 8], [1, 2]), [0, 2, 2, 0])
        loss = tf.reduce_sum(out**2)
    for gradient in tape.gradient(loss, layer.trainable_weights):
        assert isinstance(gradient, tf.Tensor)
        assert (np.abs(gradient).max(1) > 0).tolist() == [True, False, True]


def test_a_saved_model_is_loaded_whole(tmp_path):
    x, of = tf.keras.Input([8]), tf.keras.Input([], dtype=tf.int64)
    model = tf.keras.Model([x, of], GroupLayerNorm(3, eps=1e-5, name="norm")(x, of))
    model.get_layer("norm").gamma.assign(np.random.default_rng(1).normal(size=(3, 8)))
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    inputs = [tf.random.stateless_normal([4, 8], [1, 2]), tf.constant([0, 1, 2, 1], tf.int64)]
    np.testing.assert_array_equal(loaded(inputs), model(inputs))
    assert loaded.get_layer("norm").get_config() == model.get_layer("norm").get_config()


def test_mixed_precision_takes_statistics_in_float32():
    x = 1000 + tf.random.stateless_normal([4, 64], [1, 2], stddev=8)
    of = [0, 1, 0, 1]
    half = tf.cast(x, tf.float16)
    found = GroupLayerNorm(2, dtype="mixed_float16")(half, of)
    assert found.dtype == tf.float16
    np.testing.assert_allclose(found, GroupLayerNorm(2)(tf.cast(half, tf.float32), of), atol=2e-3)


def test_domains_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        GroupLayerNorm(0)
    with pytest.raises(ConfigError, match=r"must be in \[0, 2\), got 2"):
        GroupLayerNorm(2)(tf.zeros([1, 4]), 2)
    for domain in (-1, 2):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"must be in \[0, 2\)"):
            GroupLayerNorm(2)(tf.zeros([1, 4]), [domain])


def test_gradients_of_many_tokens_are_whole_in_half_precision():
    layer = GroupLayerNorm(2, dtype="mixed_bfloat16")
    x = tf.constant([[1.0, -1.0]] * 1024)
    with tf.GradientTape() as tape:
        out = layer(x, tf.zeros([1024], tf.int32))
    _, beta = tape.gradient(out, [layer.gamma, layer.beta])
    np.testing.assert_array_equal(beta, [[1024, 1024], [0, 0]])

"""A vector of an own row and attributes: the sum in NumPy, and which rows training drops."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.layers.embedding.pooling import EntityVector


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 3), st.booleans())
def test_it_adds_up_what_it_is_given(shape, attributes, has_own):
    names = [f"attribute{number}" for number in range(attributes)]
    if not (has_own or names):
        return
    rng = np.random.default_rng(0)
    vectors = {name: rng.normal(size=(*shape, 3)).astype(np.float32) for name in ["own", *names]}
    layer = EntityVector("own" if has_own else None, names, dropout=0.7)
    expected = sum(vectors[name] for name in ([*names, "own"] if has_own else names))
    np.testing.assert_allclose(layer(vectors), expected, rtol=1e-6, atol=1e-6)


def test_training_drops_whole_own_rows_and_scales_none_up():
    layer = EntityVector("film", ["genre"], dropout=0.3)
    vectors = {"film": tf.ones([200, 50, 4]), "genre": tf.fill([200, 50, 4], 10.0)}
    found = layer(vectors, training=True).numpy()
    assert set(np.unique(found)) == {10.0, 11.0}
    np.testing.assert_array_equal(found.min(axis=-1), found.max(axis=-1))
    assert np.mean(found == 10.0) == pytest.approx(0.3, abs=0.02)  # 10,000 draws: five deviations


def test_a_config_makes_it_again():
    layer = EntityVector("film", ["genre"], dropout=0.4, seed=7)
    again = EntityVector.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"own": None}, "must name features"),
        ({"own": "a", "attributes": ["a"]}, "each once"),
        ({"own": "a", "dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
    ],
)
def test_what_it_cant_be_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        EntityVector(**given)


def test_a_missing_feature_is_named():
    with pytest.raises(ConfigError, match="no vectors of genre; there are film"):
        EntityVector("film", ["genre"])({"film": tf.zeros([2, 3])})

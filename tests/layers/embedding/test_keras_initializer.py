"""Rows start from Keras' initializers where gmeta has an equal one; the others are refused with ours."""

import pytest
import tensorflow as tf

from gmeta import initializers
from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig

KERAS = tf.keras.initializers


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("uniform", initializers.Uniform(-0.05, 0.05)),
        ("zeros", initializers.Zeros()),
        ("ones", initializers.Constant(1.0)),
        (KERAS.RandomUniform(-0.1, 0.2), initializers.Uniform(-0.1, 0.2)),
        (KERAS.RandomNormal(0.5, 0.1), initializers.Normal(0.5, 0.1)),
        (KERAS.TruncatedNormal(stddev=0.1), initializers.TruncatedNormal(0.0, 0.1)),
        (KERAS.Constant(3.0), initializers.Constant(3.0)),
        (initializers.Normal(0.0, 1.0), initializers.Normal(0.0, 1.0)),
    ],
)
def test_an_equal_initializer_takes_the_place(given, expected):
    feature = FeatureConfig("x", TableConfig("x", 4, initializer=given))
    assert feature.table.initializer == expected
    again = EmbeddingCollection.from_config(EmbeddingCollection([feature]).get_config())
    assert again.features[0].table.initializer == expected


@pytest.mark.parametrize("given", ["glorot_uniform", "no such", KERAS.Orthogonal(), tf.zeros, 3, None])
def test_others_are_refused_with_ours(given):
    says = r"table 'x': rows can't start from .*gmeta.initializers: Uniform"
    with pytest.raises(ConfigError, match=says):
        FeatureConfig("x", TableConfig("x", 4, initializer=given))


def test_a_seed_is_refused_with_its_place():
    with pytest.raises(ConfigError, match=r"RandomNormal\(seed=3\).*EmbeddingCollection\(seed"):
        FeatureConfig("x", TableConfig("x", 4, initializer=KERAS.RandomNormal(seed=3)))


def test_a_constant_of_several_numbers_is_refused():
    with pytest.raises(ConfigError, match="single numbers"):
        FeatureConfig("x", TableConfig("x", 4, initializer=KERAS.Constant([1.0, 2.0, 3.0, 4.0])))

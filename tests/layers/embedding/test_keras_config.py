"""Layers made again from their configs."""

import json

import pytest
import tensorflow as tf

from gmeta import initializers, optimizers, policies
from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.layers.embedding.feature_config import from_config, to_config

SCHEDULE = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)


def test_a_collection_is_made_again_from_json():
    layer = EmbeddingCollection(
        [
            FeatureConfig(
                "user",
                TableConfig(
                    "user",
                    4,
                    initializer=initializers.TruncatedNormal(0.5, 2.0),
                    eviction=policies.TTL(steps=9),
                ),
            ),
            FeatureConfig("seen", TableConfig("item", 4), combiner="sqrtn", max_length=3),
            FeatureConfig(
                "rare",
                TableConfig("rare", 4, admission=policies.CountAdmission(3, filter=policies.Bloom(100, 0.1))),
            ),
            FeatureConfig(
                "half", TableConfig("half", 4, precision=policies.TwoPrecisions(8, 1000, "nearest"))
            ),
            FeatureConfig("own", TableConfig("own", 4, optimizer=optimizers.SGD(0.1))),
        ],
        optimizer=optimizers.Adagrad(0.5, initial_accumulator_value=0.25),
        seed=7,
        name="mine",
    )
    again = EmbeddingCollection.from_config(json.loads(json.dumps(layer.get_config())))
    assert again.features == layer.features
    assert again.tables[0].optimizer == layer.tables[0].optimizer
    assert again.tables[-1].optimizer == optimizers.SGD(0.1)
    assert (again.seed, again.name, again.dtype) == (7, "mine", layer.dtype)


def test_a_feature_of_before_tables_had_configs_is_read():
    written = {
        "kind": "FeatureConfig",
        "name": "seen",
        "dim": 4,
        "pooling": "mean",
        "table": "item",
        "initializer": to_config(initializers.Normal(0.0, 1.0)),
        "admission": to_config(policies.CountAdmission(3)),
        "eviction": None,
        "precision": None,
        "max_length": 3,
        "hash": True,
    }
    table = TableConfig(
        "item", 4, initializer=initializers.Normal(0.0, 1.0), admission=policies.CountAdmission(3)
    )
    expected = FeatureConfig("seen", table, combiner="mean", max_length=3, hash=True)
    assert from_config(json.loads(json.dumps(written))) == expected
    assert from_config(json.loads(json.dumps({**written, "table": None}))).table.name == "seen"


@pytest.mark.parametrize("rate", [None, 0.25])
def test_rates(rate):
    assert from_config(to_config(optimizers.SGD(rate))) == optimizers.SGD(rate)


def test_a_keras_schedule_comes_back():
    again = from_config(json.loads(json.dumps(to_config(optimizers.SGD(SCHEDULE)))))
    assert float(again.learning_rate(10)) == pytest.approx(0.05)


def test_what_cannot_be_written_down_is_refused():
    with pytest.raises(ConfigError, match=r"can't be written .*LearningRateSchedule"):
        to_config(optimizers.SGD(lambda step: 0.1))


@pytest.mark.parametrize("kind", ["HashTable", "os", "nothing", None])
def test_a_config_that_names_no_setting_is_refused(kind):
    with pytest.raises(ConfigError, match="isn't a setting"):
        from_config({"kind": kind})

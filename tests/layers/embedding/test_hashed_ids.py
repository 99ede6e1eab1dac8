"""Features that take text and any 64-bit numbers."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta import layers, models
from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.preprocess.plan.column_values import hash_text

TABLE = TableConfig("item", 4)
TEXTS = ["sku/1", "sku/4", "sku/1", ""]


def collection(**settings):
    return EmbeddingCollection(
        [
            FeatureConfig("item", TABLE, **settings),
            FeatureConfig("tags", TABLE, combiner="mean", **settings),
        ]
    )


def as_numbers(texts):
    return np.array([hash_text(text) for text in texts], np.int64)


def test_a_text_and_its_prepared_number_read_the_same_row():
    embeddings = collection(hash=True)
    tags = tf.ragged.constant([["a", "b"], [], ["sku/1"], ["c"]])
    flat = [text.decode() for text in tags.flat_values.numpy()]
    numbers = tags.with_flat_values(tf.constant(as_numbers(flat)))
    of_text = embeddings({"item": tf.constant(TEXTS), "tags": tags})
    of_numbers = embeddings({"item": as_numbers(TEXTS), "tags": numbers})
    for name in ("item", "tags"):
        np.testing.assert_array_equal(of_text[name], of_numbers[name])
    assert min(as_numbers(TEXTS)) < 0  # one that no table takes as it is


def test_numbers_that_fit_read_the_rows_that_they_read_without_hashing():
    ids = {"item": tf.constant([0, 7, 2**61 - 1]), "tags": tf.ragged.constant([[1], [2], [3]])}
    np.testing.assert_array_equal(collection(hash=True)(ids)["item"], collection()(ids)["item"])


def test_without_hash_text_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'item' got strings: FeatureConfig\('item', .*hash=True"):
        collection()({"item": tf.constant(TEXTS), "tags": tf.ragged.constant([[1]] * 4)})


def test_a_config_keeps_hash():
    again = EmbeddingCollection.from_config(collection(hash=True).get_config())
    assert all(feature.hash for feature in again.features)


def test_a_keras_model_trains_on_text_and_predicts_the_same_from_numbers():
    embeddings = EmbeddingCollection([FeatureConfig("item", dim=4, hash=True)])
    item = tf.keras.Input([], name="item", dtype=tf.string)
    head = tf.keras.layers.Dense(1)
    model = models.Model({"item": item}, head(embeddings({"item": item})["item"]))
    model.compile("adam", "mse")
    texts = np.array(TEXTS * 4)
    model.fit({"item": texts}, np.arange(16.0), epochs=2, verbose=0)
    assert int(embeddings.tables[0].size()) == 3
    of_numbers = head(embeddings({"item": as_numbers(TEXTS)}, training=False)["item"])
    np.testing.assert_allclose(model.predict({"item": np.array(TEXTS)}, verbose=0), of_numbers, rtol=1e-6)


def test_a_meta_model_adapts_and_predicts_by_text():
    features = [
        FeatureConfig("item", dim=4, hash=True),
        FeatureConfig("tags", dim=4, combiner="mean", hash=True),
    ]
    network = tf.keras.Sequential([tf.keras.layers.Dense(1, name="out")])
    model = models.MetaModel(layers.EmbeddingCollection(features), network)
    model.compile("adam", "mse")
    texts = {"item": ["a", "b"], "tags": [["x", "y"], []]}
    numbers = {
        "item": as_numbers(["a", "b"]),
        "tags": [as_numbers(["x", "y"]).tolist(), []],
    }
    fast = [model.adapt(each, [1.0, 2.0], steps=2) for each in (texts, numbers)]
    answers = [
        np.asarray(model.predict(each, weights=of)) for each, of in zip((texts, numbers), fast, strict=True)
    ]
    np.testing.assert_array_equal(*answers)

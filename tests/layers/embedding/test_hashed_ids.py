"""Features that take text and any 64-bit numbers."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta import checkpoint, layers, models, ops
from gmeta.core.errors import ConfigError
from gmeta.export import export_model
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


UNSIGNED = np.array(
    [7, 0x9E3779B97F4A7C15, 0xF39CC0605CEDC835, 2**62 + 99], np.uint64
)  # as hashes of other systems
SIGNED = UNSIGNED.view(np.int64)


def in_rows(values):
    return tf.RaggedTensor.from_row_lengths(values, [1, 2, 0, 1])


def padded(values):
    return np.stack([values, np.array([-1, 4, -1, 5]).astype(values.dtype)], axis=1)


def sparse(values):
    return tf.sparse.SparseTensor([[0, 0], [1, 0], [1, 1], [3, 0]], values, [4, 2])


@pytest.mark.parametrize("form", [in_rows, padded, sparse], ids=lambda form: form.__name__)
def test_unsigned_ids_read_the_rows_of_signed_ones_of_the_same_bits(form):
    embeddings = collection(hash=True)
    found, expected = (embeddings({"item": ids, "tags": form(ids)}) for ids in (UNSIGNED, SIGNED))
    for name in ("item", "tags"):
        np.testing.assert_array_equal(found[name], expected[name])
    small = {"item": UNSIGNED[:1], "tags": UNSIGNED[:1, np.newaxis]}
    np.testing.assert_array_equal(collection()(small)["item"], found["item"][:1])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"feature 'item': id -.*hash=True"):
        collection()({"item": UNSIGNED, "tags": in_rows(SIGNED)})


@pytest.mark.parametrize("dtype", [tf.int64, tf.uint64])
def test_a_model_of_unsigned_ids_trains_and_is_served(tmp_path, dtype):
    embeddings = EmbeddingCollection([FeatureConfig("item", dim=4, combiner="sum", hash=True)])
    item = tf.keras.Input([None], name="item", dtype=dtype, ragged=True)
    model = models.Model({"item": item}, tf.keras.layers.Dense(1)(embeddings({"item": item})["item"]))
    model.compile("adam", "mse")
    model.fit({"item": in_rows(UNSIGNED)}, np.ones(4), verbose=0)
    assert int(embeddings.tables[0].size()) == 4
    expected = model.predict({"item": in_rows(SIGNED)}, verbose=0)
    export_model(model, tmp_path / "1", text_ids=False)
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_default"]
    wire = in_rows(SIGNED).to_tensor(-1)
    np.testing.assert_allclose(served(item=wire)["output"], expected, rtol=1e-6)


@pytest.mark.parametrize("ids", [UNSIGNED, tf.constant(UNSIGNED)], ids=["array", "tensor"])
def test_ops_take_unsigned_ids_by_their_bits(ids):
    np.testing.assert_array_equal(ops.unique(ids).keys, SIGNED)
    np.testing.assert_array_equal(ops.hash_ids(ids, 61), ops.hash_ids(SIGNED, 61))
    assert ops.count_collisions(ids) == 0
    table = ops.HashTable(2)
    np.testing.assert_array_equal(table.lookup(ids).keys, SIGNED)
    table.apply_gradients(ids, np.ones([4, 2], np.float32))
    assert int(table.statistics().updates) == 4
    assert table.contains(SIGNED).numpy().all()
    with pytest.raises(ConfigError, match=r"numpy\.array\(ids, numpy\.uint64\)"):
        table.lookup(UNSIGNED.tolist())


def test_vectors_of_unsigned_keys_are_imported_by_their_bits(tmp_path):
    for name, keys in (("unsigned", UNSIGNED), ("signed", SIGNED)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "keys.npy", keys)
        np.save(tmp_path / name / "values.npy", np.eye(4, dtype=np.float32))
    found = []
    for name in ("unsigned", "signed"):
        embeddings = collection(hash=True)
        checkpoint.import_table(embeddings, "item", tmp_path / name)
        found.append(embeddings({"item": SIGNED, "tags": in_rows(SIGNED)})["item"])
    np.testing.assert_array_equal(*found)
    np.testing.assert_array_equal(found[0], np.eye(4))

"""Exported models take the text of ids that features hash, and answer as the trained model does."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta import initializers, models, ops
from gmeta.export.saved_model import export_model
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from support.serving import ask, padded

FEATURES = (
    FeatureConfig("item", TableConfig("item", 4, initializer=initializers.Normal(0, 1)), hash=True),
    FeatureConfig(
        "tags", TableConfig("tags", 4, initializer=initializers.Normal(0, 1)), combiner="mean", hash=True
    ),
)
ITEMS = np.array(["sku/1", "Zürich", "never seen"])
TAGS = tf.ragged.constant([["red", "x" * 70], [], ["音楽"]])
SENT = padded({"item": np.array([text.encode() for text in ITEMS], object), "tags": TAGS})


def numbers(texts):
    """What `gmeta prepare` stores of text."""
    if isinstance(texts, tf.RaggedTensor):
        return texts.with_flat_values(ops.hash_text(texts.flat_values))
    return ops.hash_text(texts)


def functional(dtype):
    inputs = {
        "item": tf.keras.Input([], name="item", dtype=dtype),
        "tags": tf.keras.Input([None], name="tags", dtype=dtype, ragged=True),
    }
    vectors = EmbeddingCollection(FEATURES)(inputs)
    return models.Model(inputs, tf.keras.layers.Dense(1)(tf.concat([*vectors.values()], axis=-1)))


def trained(model, inputs):
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")
    model.fit(tf.data.Dataset.from_tensors((inputs, tf.constant([1.0, 2.0, 3.0]))).repeat(3), verbose=0)
    return model


# Quick: tf.string, and test_clients_may_send_the_prepared_numbers.
@pytest.mark.parametrize("dtype", [tf.string, pytest.param(tf.int64, marks=pytest.mark.slow)])
def test_a_functional_model_answers_text_whatever_it_was_trained_on(tmp_path, dtype):
    text = dtype == tf.string
    inputs = {"item": tf.constant(ITEMS), "tags": TAGS}
    inputs = inputs if text else {name: numbers(value) for name, value in inputs.items()}
    model = trained(functional(dtype), inputs)
    exported = export_model(model, tmp_path / "1")
    assert exported.signatures["serving_default"] == {"item": "string [null]", "tags": "string [null, null]"}
    answer = ask(tmp_path / "1", "serving_default", SENT)
    np.testing.assert_allclose(answer["output"], model(inputs), rtol=1e-5, atol=1e-6)


def test_clients_may_send_the_prepared_numbers(tmp_path):
    inputs = {"item": numbers(ITEMS), "tags": numbers(TAGS)}
    model = trained(functional(tf.int64), inputs)
    export_model(model, tmp_path / "1", text_ids=False)
    answer = ask(tmp_path / "1", "serving_default", padded(inputs))
    np.testing.assert_allclose(answer["output"], model(inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.shown_by("cli/test_own_data.py::test_stock_tensorflow_adapts_to_a_new_user_from_strings")
def test_a_meta_model_adapts_to_text(tmp_path):
    network = tf.keras.Sequential([tf.keras.layers.Dense(1, name="out")])
    model = models.MetaModel(EmbeddingCollection(FEATURES), network)
    model.compile("adam", "mse")
    export_model(model, tmp_path / "1")
    labels = np.array([1.0, 2.0, 0.0], np.float32)
    deltas = ask(tmp_path / "1", "adapt", {**SENT, "label": labels})["weights_bytes"]
    answer = ask(tmp_path / "1", "predict_with", {**SENT, "weights_bytes": deltas})
    samples = {"item": ITEMS, "tags": TAGS}
    fast = model.adapt(samples, labels)
    found = np.asarray(model.predict(samples, weights=fast)).reshape(-1)
    np.testing.assert_allclose(answer["rating"], found, rtol=1e-5, atol=1e-6)


def test_an_empty_text_fills_up_a_dense_matrix(tmp_path):
    tags = tf.keras.Input([3], name="tags", dtype=tf.int64)
    vectors = EmbeddingCollection(FEATURES[1:])({"tags": tags})["tags"]
    model = models.Model({"tags": tags}, tf.keras.layers.Dense(1)(vectors))
    export_model(model, tmp_path / "1")
    sent = np.array([[b"red", b"", b"new"], [b"", b"", b""]], object)
    ragged = tf.ragged.constant([["red", "new"], []])
    answer = ask(tmp_path / "1", "serving_default", {"tags": sent})["output"]
    filled = np.array([[*ops.hash_text(["red", "new"]).numpy(), -1], [-1, -1, -1]])
    np.testing.assert_allclose(answer, model({"tags": tf.constant(filled)}), rtol=1e-5, atol=1e-6)
    by_hand = model.layers[-1](EmbeddingCollection(FEATURES[1:])({"tags": ragged})["tags"])
    np.testing.assert_allclose(answer, by_hand, rtol=1e-5, atol=1e-6)

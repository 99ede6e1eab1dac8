"""MeLU through the native table, the joint lookup and Keras, against the golden fixture, in float32."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.meta import InnerLoop
from gmeta.models import melu
from gmeta.ops.table.hash_table import Records
from support.public_data import FEATURES, INNER_LEARNING_RATE, golden_maml

pytestmark = pytest.mark.data


@pytest.fixture(scope="module")
def golden():
    return golden_maml()


@pytest.fixture(scope="module")
def batch(golden):
    batch = golden.task_batch()
    values, row_splits = batch["features"].pop("genre")
    features = {name: tf.constant(ids) for name, ids in batch["features"].items()}
    features["genre"] = tf.RaggedTensor.from_row_splits(values, row_splits)
    return {**batch, "features": features, "label": tf.constant(batch["label"], tf.float32)}


def keys_of(model, name, ids):
    """The keys that a feature's ids have in the merged table."""
    (merged,) = model.collection.merged
    feature = next(f for f in merged.features if f.name == name)
    return np.asarray(ids, np.int64) | merged.key_prefix(feature)


def golden_model(golden, order, steps):
    model = melu(inner=InnerLoop(steps=steps, learning_rate=INNER_LEARNING_RATE, order=order))
    for name, variable in model.network.fast_weights().items():
        variable.assign(golden.dense[name])
    (table,) = model.collection.tables
    rows = np.concatenate([golden.tables[name] for name in FEATURES]).astype(np.float32)
    keys = np.concatenate([keys_of(model, name, np.arange(len(golden.tables[name]))) for name in FEATURES])
    zeros = np.zeros(len(keys), np.int64)
    table.import_(Records(keys, rows, np.zeros((len(keys), 64), np.float32), zeros, zeros, np.int64(0)))
    model.compile(optimizer="sgd", loss="mse")
    return model


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_predictions(golden, batch, steps):
    predictions = golden_model(golden, order=2, steps=steps)(batch)
    np.testing.assert_allclose(predictions, golden.predictions(steps), rtol=1e-4)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("steps", [1, 5])
def test_loss_and_every_gradient(golden, batch, order, steps):
    model = golden_model(golden, order, steps)
    found = model.compute_gradients(batch)
    np.testing.assert_allclose(found.loss, golden.loss(order, steps), rtol=1e-4)
    dense_expected, tables_expected = golden.gradients(order, steps)
    for variable, gradient in zip(model.network.trainable_variables, found.dense, strict=True):
        name = next(n for n, v in model.network.fast_weights().items() if v is variable)
        expected = dense_expected[name]
        np.testing.assert_allclose(gradient, expected, atol=1e-4 * np.abs(expected).max(), err_msg=name)
    (rows,) = found.lookups.named(found.rows)
    by_key = dict(zip(rows.keys().numpy(), rows.values.numpy(), strict=True))
    for name in FEATURES:
        expected = tables_expected[name]
        gradient = np.stack(
            [by_key.pop(key, np.zeros(32)) for key in keys_of(model, name, np.arange(len(expected)))]
        )
        np.testing.assert_allclose(gradient, expected, atol=1e-4 * np.abs(expected).max(), err_msg=name)
    assert not by_key, "gradients of keys that no feature has"

"""The inner and outer loop against an independent implementation, in float64, through plain callables."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.meta.adaptation import adapt, per_task
from gmeta.meta.inner_loop import reduce_tasks, task_means
from support.public_data import DENSE, FEATURES, INNER_LEARNING_RATE, golden_maml

pytestmark = pytest.mark.data


@pytest.fixture(scope="module")
def golden():
    return golden_maml()


def embed(batch, tables):
    """(rows, features * 32): gathered and, for the genres, averaged."""
    values, row_splits = batch["features"]["genre"]
    genres = tf.RaggedTensor.from_row_splits(values, row_splits)
    vectors = {name: tf.gather(tables[name], batch["features"][name]) for name in FEATURES if name != "genre"}
    vectors["genre"] = tf.reduce_mean(tf.gather(tables["genre"], genres), axis=1)
    return tf.concat([vectors[name] for name in FEATURES], axis=-1)


def network(x, weights):
    for layer in DENSE:
        x = tf.matmul(x, weights[f"{layer}/kernel"]) + weights[f"{layer}/bias"][:, tf.newaxis]
        x = x if layer == DENSE[-1] else tf.nn.relu(x)
    return x[..., 0]


def adapted_predictions(batch, dense, tables, steps, order):
    x = embed(batch, tables)

    def squared_errors(part, weights):
        return (
            network(tf.gather(x, batch[part]["index"]), weights) - batch["label"][batch[part]["index"]]
        ) ** 2

    weights = adapt(
        lambda w: task_means(squared_errors("support", w), batch["support"]["mask"]),
        per_task(dense, len(batch["task"])),
        steps=steps,
        learning_rate=INNER_LEARNING_RATE,
        order=order,
    )
    loss = reduce_tasks(squared_errors("query", weights), batch["query"]["mask"])
    return network(tf.gather(x, batch["query"]["index"]), weights), loss


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_predictions(golden, steps):
    predictions, _ = adapted_predictions(golden.task_batch(), golden.dense, golden.tables, steps, order=2)
    np.testing.assert_allclose(predictions, golden.predictions(steps), rtol=1e-9)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("steps", [1, 5])
def test_losses_and_every_gradient(golden, order, steps):
    dense = {name: tf.Variable(value) for name, value in golden.dense.items()}
    tables = {name: tf.Variable(value) for name, value in golden.tables.items()}
    with tf.GradientTape() as tape:
        _, loss = adapted_predictions(golden.task_batch(), dense, tables, steps, order)
    np.testing.assert_allclose(loss, golden.loss(order, steps), rtol=1e-9)
    for ours, theirs in zip(
        tape.gradient(loss, (dense, tables)), golden.gradients(order, steps), strict=True
    ):
        for name, expected in theirs.items():
            gradient = tf.convert_to_tensor(ours[name])
            np.testing.assert_allclose(
                gradient, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max(), err_msg=name
            )

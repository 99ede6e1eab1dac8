"""MetaModel on small batches of its own: what a step computes, and that tasks don't see each other."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel
from gmeta.optimizers import SGD
from support.drawn_batches import drawn_alone as alone
from support.drawn_batches import make_batch


def make_model(steps=1, order=2, outer_samples="query", evaluation_steps=None, optimizer=None):
    start = Normal(0.0, 1.0)
    model = MetaModel(
        EmbeddingCollection(
            [
                FeatureConfig("user", TableConfig("user", 4, initializer=start)),
                FeatureConfig("item", TableConfig("item", 4, initializer=start)),
            ],
            optimizer=SGD(learning_rate=None),
        ),
        MLP({"fc": 8, "out": 1}, adapt=["out"]),
        inner=InnerLoop(steps=steps, learning_rate=0.05, order=order, evaluation_steps=evaluation_steps),
        outer_samples=outer_samples,
    )
    model.compile(optimizer=optimizer or tf.keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"])
    return model


def gradients(model, batch):
    found = model.compute_gradients(batch)
    (rows,) = found.lookups.named(found.rows)
    return found.loss, found.dense, rows.values, rows.keys()


def rows_by_key(rows, keys):
    return dict(zip(keys.numpy(), rows.numpy(), strict=True))


@pytest.mark.parametrize("order", [1, 2])
def test_a_batch_of_tasks_equals_the_mean_of_tasks_alone(order):
    model, batch = make_model(steps=3, order=order), make_batch([1, 4, 2], pad=3)
    loss, dense, *rows = gradients(model, batch)
    parts = [gradients(model, alone(batch, task)) for task in range(3)]
    np.testing.assert_allclose(loss, np.mean([part[0] for part in parts]), rtol=1e-5)
    for k, gradient in enumerate(dense):
        expected = np.mean([part[1][k] for part in parts], axis=0)
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    expected = {}
    for _, _, *of_task in parts:
        for key, gradient in rows_by_key(*of_task).items():
            expected[key] = expected.get(key, 0) + gradient / 3
    found = rows_by_key(*rows)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        np.testing.assert_allclose(found[key], gradient, rtol=1e-4, atol=1e-6)


def test_predictions_do_not_depend_on_neighbours_or_padding():
    model, batch = make_model(steps=2), make_batch([3, 1, 5], pad=4)
    together = model(batch)
    for task in range(3):
        np.testing.assert_allclose(model(alone(batch, task))[0], together[task], rtol=1e-5, atol=1e-6)


@pytest.mark.shown_by("test_a_batch_of_tasks_equals_the_mean_of_tasks_alone")
def test_a_batch_of_32_tasks_equals_32_batches_of_one():
    model, batch = make_model(steps=3), make_batch(list(np.random.default_rng(0).integers(1, 9, 32)))
    together = model(batch)
    loss, dense, *rows = gradients(model, batch)
    parts = [gradients(model, alone(batch, task)) for task in range(32)]
    for task in range(32):
        np.testing.assert_allclose(model(alone(batch, task))[0], together[task], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss, np.mean([part[0] for part in parts]), rtol=1e-5)
    for k, gradient in enumerate(dense):
        expected = np.mean([part[1][k] for part in parts], axis=0)
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    total = {}
    for _, _, *of_task in parts:
        for key, gradient in rows_by_key(*of_task).items():
            total[key] = total.get(key, 0) + gradient / 32
    for key, gradient in rows_by_key(*rows).items():
        np.testing.assert_allclose(gradient, total[key], rtol=1e-4, atol=1e-6)


def test_second_order_gradients_match_finite_differences():
    model, batch = make_model(steps=2), make_batch([3, 2])
    _, dense, rows, keys = gradients(model, batch)
    (table,) = model.collection.tables
    step = 1e-2

    def loss():
        return float(gradients(model, batch)[0])

    kernel = model.network.trainable_variables[0]
    nudge = tf.constant(np.random.default_rng(1).choice([-step, step], kernel.shape), kernel.dtype)
    kernel.assign_add(nudge)
    above = loss()
    kernel.assign_sub(2 * nudge)
    slope = above - loss()
    kernel.assign_add(nudge)
    np.testing.assert_allclose(slope, 2 * float(tf.reduce_sum(dense[0] * nudge)), rtol=2e-2)

    # The same for embedding rows, by updates of the table itself: SGD at rate 1 subtracts what it is given.
    nudge = tf.constant(np.random.default_rng(2).choice([-step, step], rows.shape), tf.float32)
    table.apply_gradients(keys, -nudge, learning_rate=1.0)
    above = loss()
    table.apply_gradients(keys, 2 * nudge, learning_rate=1.0)
    slope = above - loss()
    np.testing.assert_allclose(slope, 2 * float(tf.reduce_sum(rows * nudge)), rtol=2e-2)


def test_a_step_makes_one_lookup_for_support_and_query_together():
    model, batch = make_model(), make_batch([3, 2])
    (table,) = model.collection.tables
    model.compute_gradients(batch)
    counts = table.statistics()
    distinct = {(name, raw) for name, ids in batch["features"].items() for raw in ids.numpy()}
    assert int(counts.hits) + int(counts.misses) == len(distinct)


def test_without_inner_steps_and_over_all_samples_it_is_joint_training():
    model, batch = make_model(steps=0, outer_samples="all"), make_batch([3, 2])
    loss, dense, *_ = gradients(model, batch)
    lookup = model.collection.lookup(batch["features"])
    with tf.GradientTape() as tape:
        predictions = model.network(model.collection.concat(lookup)[tf.newaxis])[0, :, 0]
        expected = tf.reduce_mean((predictions - batch["label"]) ** 2)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for ours, theirs in zip(dense, tape.gradient(expected, model.network.trainable_variables), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_tasks_without_query_samples_change_nothing():
    model, batch = make_model(), make_batch([3, 2])
    batch["query"]["mask"] = tf.zeros([2, 2])
    loss, dense, rows, _ = gradients(model, batch)
    for gradient in (loss, *dense, rows):
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))


def test_fit_learns_and_evaluate_stores_nothing():
    model = make_model(optimizer=tf.keras.optimizers.Adam(1e-2))
    batch = make_batch([4, 3, 5, 2])
    data = tf.data.Dataset.from_tensors(batch)
    history = model.fit(data, epochs=40, verbose=0).history
    assert history["loss"][-1] < 0.3 * history["loss"][0]
    (table,) = model.collection.tables
    size = int(table.size())
    strange = {**batch, "features": {**batch["features"], "item": batch["features"]["item"] + 1000}}
    measured = model.evaluate(tf.data.Dataset.from_tensors(strange), verbose=0, return_dict=True)
    assert set(measured) == {"loss", "mae"}
    assert int(table.size()) == size


def test_evaluation_reports_the_exact_mean_over_samples_of_uneven_batches():
    model = make_model(evaluation_steps=2)
    batches = [make_batch([3, 2]), make_batch([4], query=5, seed=1)]
    data = tf.data.Dataset.from_generator(lambda: batches, output_signature=signature())
    measured = model.evaluate(data, verbose=0, return_dict=True)
    errors = np.concatenate(
        [np.ravel(model(b) - tf.gather(b["label"], b["query"]["index"])) for b in batches]
    )
    np.testing.assert_allclose(measured["loss"], np.mean(errors**2), rtol=1e-5)
    np.testing.assert_allclose(measured["mae"], np.mean(np.abs(errors)), rtol=1e-5)


def signature():
    part = {"index": tf.TensorSpec([None, None], tf.int64), "mask": tf.TensorSpec([None, None])}
    ids = tf.TensorSpec([None], tf.int64)
    return {
        "features": {"user": ids, "item": ids},
        "label": tf.TensorSpec([None]),
        "task": ids,
        "support": part,
        "query": part,
    }


def test_the_tables_learn_at_the_keras_optimizers_rate():
    model, batch = make_model(optimizer=tf.keras.optimizers.SGD(0.0)), make_batch([3, 2])
    lookup = model.collection.lookup(batch["features"])
    model.train_step(batch)
    np.testing.assert_array_equal(model.collection.lookup(batch["features"]).rows[0], lookup.rows[0])
    model.optimizer.learning_rate = 0.5
    model.train_step(batch)
    assert not np.array_equal(model.collection.lookup(batch["features"]).rows[0], lookup.rows[0])


def test_data_that_doesnt_tell_its_length_makes_no_step_at_its_end():
    batches = [make_batch([2, 3], seed=seed) for seed in range(5)]
    model = make_model(optimizer=tf.keras.optimizers.Adam(0.01))
    spec = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), batches[0])
    data = tf.data.Dataset.from_generator(lambda: batches, output_signature=spec)
    model.fit(data, epochs=1, verbose=0)
    model.fit(data, epochs=1, verbose=0)
    assert int(model.optimizer.iterations) == 10


def test_a_loss_object_serves_as_its_name_does():
    batch = make_batch([3, 2])
    named, made = make_model(), make_model()
    made.compile(optimizer="sgd", loss=tf.keras.losses.MeanSquaredError())
    np.testing.assert_array_equal(gradients(named, batch)[0], gradients(made, batch)[0])


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="'support'"):
        make_model(outer_samples="support")
    with pytest.raises(ConfigError, match="loss must be"):
        make_model().compile(loss=None)


def two_labels(batch):
    return {**batch, "label": tf.stack([batch["label"]] * 2, axis=-1)}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"collection": [FeatureConfig("user", dim=4)]},
            "must be a gmeta.layers.EmbeddingCollection, got list",
        ),
        ({"network": None}, "network must be a Keras layer or model, got NoneType"),
        ({"network": tf.keras.layers.Dense}, "network must be a Keras layer or model, got the class Dense"),
        ({"inner": "maml"}, r"inner must be a gmeta\.meta\.InnerLoop, .*, got 'maml'"),
    ],
)
def test_what_it_cannot_be_made_of_is_refused(parts, message):
    whole = {"collection": EmbeddingCollection([FeatureConfig("user", dim=4)]), "network": MLP({"out": 1})}
    with pytest.raises(ConfigError, match=message):
        MetaModel(**{**whole, **parts})


@pytest.mark.parametrize(
    "network", [tf.keras.layers.Dense(1), tf.keras.layers.Lambda(lambda x: x, name="same")]
)
@pytest.mark.shown_by(case="network0")
def test_a_network_without_trainable_weights_needs_an_inner_loop_of_rows_or_none(network):
    network.trainable = False
    model = MetaModel(EmbeddingCollection([FeatureConfig("item", dim=1)]), network)
    with pytest.raises(ConfigError, match="has no trainable weights for the 1 inner steps"):
        model.compile("sgd", "mse")
    for inner in (InnerLoop(adapt="embeddings"), InnerLoop(steps=0)):
        model.compile("sgd", "mse", inner=inner)
        assert np.isfinite(model.train_on_batch(make_batch([1, 2])))
        assert int(model.optimizer.iterations) == 1


def test_labels_and_losses_that_do_not_fit_the_outputs_are_refused():
    model = make_model()
    with pytest.raises(
        ConfigError, match="labels have 2 values a sample and the network has 1 output: mean_sq"
    ):
        model.train_step(two_labels(make_batch([3, 2])))
    model.compile(loss=lambda y_true, y_pred: tf.reduce_mean((y_true - y_pred) ** 2))
    with pytest.raises(ConfigError, match=r"<lambda> must give a value for each sample, .* the shape \(\)"):
        model.train_step(make_batch([3, 2]))


def test_data_that_is_not_of_tasks_is_refused_by_what_it_has():
    batch = make_batch([3, 2])
    message = "batches of tasks, as gmeta.io.tasks gives them: .*; got a dict of user, item"
    for use in ("__call__", "train_step", "test_step", "predict_step"):
        with pytest.raises(ConfigError, match=message):
            getattr(make_model(), use)(batch["features"])
    with pytest.raises(ConfigError, match="got tuple"):
        make_model().train_step((batch["features"], batch["label"]))


def test_an_error_while_fit_is_traced_is_the_error_itself():
    batch = make_batch([3, 2])
    batch["features"].pop("item")
    with pytest.raises(ConfigError, match=r"^feature 'item' is missing from the input; it has user$"):
        make_model().fit(tf.data.Dataset.from_tensors(batch), verbose=0)


def test_tasks_are_predicted_by_a_compiled_model_alone():
    model = MetaModel(EmbeddingCollection([FeatureConfig("user", dim=4)]), MLP({"out": 1}))
    with pytest.raises(ConfigError, match="compile the model first"):
        model.predict(tf.data.Dataset.from_tensors(make_batch([3])), verbose=0)

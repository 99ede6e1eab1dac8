"""CBML: what tasks start from in plain NumPy, gradients by finite differences, and what the gate is worth."""

import doctest
import importlib

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models.zoo.cbml_model import CBML, ParameterGate, SelfAttention, SoftClusters
from support.drawn_batches import alone, dataset, opposed_tasks, task_batch

FEATURES = [
    FeatureConfig(name, TableConfig(name, 4, initializer=Normal(0.0, 0.5))) for name in ("user", "item")
]


def drawn(variables, seed=0):
    """Weights that are nowhere zero, so that each counts."""
    rng = np.random.default_rng(seed)
    for variable in variables:
        variable.assign(rng.normal(size=variable.shape) / np.sqrt(max(variable.shape[0], 1)))


def softmax(x):
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def attended(block, x):
    """`SelfAttention` of one task's real samples, (samples, in) -> (dim,)."""

    def dense(x, layer):
        kernel, *bias = (weight.numpy() for weight in layer.weights)
        return x @ kernel + (bias[0] if bias else 0)

    def norm(x, layer):
        gamma, beta = (weight.numpy() for weight in layer.weights)
        centred = x - x.mean(axis=-1, keepdims=True)
        return gamma * centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + layer.epsilon) + beta

    x = dense(x, block._tokens)
    query, key, value = (dense(x, layer) for layer in (block._query, block._key, block._value))
    x = norm(x + softmax(query @ key.T / np.sqrt(block.dim)) @ value, block._norms[0])
    hidden = np.maximum(dense(x, block._hidden), 0)
    return norm(x + dense(hidden, block._out), block._norms[1]).mean(axis=0)


def clustered(layer, e):
    """`SoftClusters` of one task."""
    centres, kernels, biases = (weight.numpy() for weight in (layer.centres, layer.kernels, layer.biases))
    p = softmax(-((e - centres) ** 2).sum(axis=1) / (2 * layer.scale**2 * len(e)))
    return p, sum(p[k] * np.tanh(e @ kernels[k] + biases[k]) for k in range(layer.clusters))


def test_tasks_start_from_what_the_formula_says():
    model = CBML.of(FEATURES, items=["item"], hidden=[5], clusters=3, dim=6, scale=2.0)
    drawn([*model.attention[0].trainable_variables, *model.attention[1].trainable_variables])
    drawn([*model.soft_clusters.trainable_variables, *model.gate.trainable_variables], seed=1)
    batch = task_batch([3, 1, 5], pad=2)
    lookup = model.collection.lookup(batch["features"])
    view, vectors = model.learner.view(batch, lookup), model.collection.concat(lookup).numpy()
    found, assignments = model.learner.start_weights(view), model.learner.assignments(view)
    for task in range(3):
        rows = batch["support"]["index"][task].numpy()[batch["support"]["mask"][task].numpy() > 0]
        label = batch["label"].numpy()[rows][:, None]
        user, item = vectors[rows][:, :4], vectors[rows][:, 4:]
        e = np.concatenate(
            [
                attended(block, np.concatenate([part, label], axis=1))
                for block, part in zip(model.attention, (item, user), strict=True)
            ]
        )
        p, h = clustered(model.soft_clusters, e)
        np.testing.assert_allclose(assignments[task], p, rtol=1e-4, atol=1e-6)
        for name, weight in model.learner.adapted_weights().items():
            kernel, bias = model.gate._kernels[name].numpy(), model.gate._biases[name].numpy()
            gate = 1 / (1 + np.exp(-(np.concatenate([e, h]) @ kernel + bias)))
            expected = weight.numpy() * gate.reshape(weight.shape)
            np.testing.assert_allclose(found[name][task], expected, rtol=1e-4, atol=1e-6, err_msg=name)


def test_gradients_match_finite_differences(float64):
    """Of gated weights, with respect to samples and all that is trained, along drawn directions."""
    attention, clusters, gate = SelfAttention(4), SoftClusters(3), ParameterGate()
    rng = np.random.default_rng(2)
    x, weight = tf.Variable(rng.normal(size=(2, 5, 3))), tf.Variable(rng.normal(size=(2, 3)))
    mask = tf.constant([[1.0, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    target = tf.constant(rng.normal(size=(2, 2, 3)))

    def loss():
        e = attention(x, mask)
        told = tf.concat([e, clusters(e)[1]], axis=-1)
        gate.build_for({"fc/kernel": weight}, 8)
        return tf.reduce_sum((gate(told, {"fc/kernel": weight})["fc/kernel"] - target) ** 2)

    loss()
    drawn([v for layer in (attention, clusters, gate) for v in layer.trainable_variables])
    variables = [x, weight, *(v for layer in (attention, clusters, gate) for v in layer.trainable_variables)]
    with tf.GradientTape() as tape:
        value = loss()
    for variable, gradient in zip(variables, tape.gradient(value, variables), strict=True):
        nudge = rng.normal(size=variable.shape) * 1e-5
        variable.assign_add(nudge)
        up = loss()
        variable.assign_sub(2 * nudge)
        slope = (up - loss()) / 2
        variable.assign_add(nudge)
        expected = tf.reduce_sum(gradient * nudge)
        np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-13, err_msg=variable.name)


def test_tasks_do_not_depend_on_neighbours_or_padding():
    model = CBML.of(FEATURES, items=["item"], hidden=[8], inner=InnerLoop(steps=2, learning_rate=0.1))
    drawn(model.gate.trainable_variables)
    model.compile("adam", "mse")
    batch = task_batch([3, 1, 5], pad=4)
    poisoned = {**batch, "label": tf.concat([batch["label"], [1e6]], 0)}
    end = tf.cast(tf.size(batch["label"]), tf.int64)
    mask, index = batch["support"]["mask"], batch["support"]["index"]
    poisoned["support"] = {
        "mask": mask,
        "index": tf.where(mask > 0, index, end),
    }  # padding is far out
    poisoned["features"] = {name: tf.concat([ids, [77]], 0) for name, ids in batch["features"].items()}
    together = model(poisoned)
    for task in range(3):
        np.testing.assert_allclose(model(alone(batch, task))[0], together[task], rtol=1e-5, atol=1e-6)


def test_a_task_without_support_has_a_start():
    model = CBML.of(FEATURES, items=["item"], hidden=[4])
    batch = task_batch([3, 2])
    batch["support"]["mask"] = tf.constant([[1.0, 1, 1], [0, 0, 0]])
    view = model.learner.view(batch, model.collection.lookup(batch["features"]))
    np.testing.assert_array_equal(model.learner.task_embeddings(view)[1], tf.zeros([64]))
    assert all(np.isfinite(value).all() for value in model.learner.start_weights(view).values())


@pytest.mark.shown_by("test_gradients_match_finite_differences")
def test_the_gate_alone_learns_tasks_that_contradict_each_other():
    """Without an inner step: what the support says reaches the query through the gate."""
    model = CBML.of(FEATURES, items=["item"], hidden=[16], clusters=2, dim=8, inner=InnerLoop(steps=0))
    model.compile(tf.keras.optimizers.Adam(0.02), "mse")
    model.fit(dataset(opposed_tasks(30)), epochs=6, verbose=0)
    assert model.history.history["loss"][0] > 0.85
    test = opposed_tasks(4, seed=9)
    losses = [float(tf.reduce_mean((model(batch) - view_labels(batch)) ** 2)) for batch in test]
    assert np.mean(losses) < 0.3


def view_labels(batch):
    return tf.gather(batch["label"], batch["query"]["index"])


def test_weights_that_another_inner_loop_adapts_are_gated_too():
    model = CBML.of(FEATURES, items=["item"], hidden=[4], inner=InnerLoop(adapt=["linear_out"]))
    assert sorted(model.gate._kernels) == ["linear_out/bias", "linear_out/kernel"]
    model.compile("adam", "mse", inner=InnerLoop(adapt="all"))
    assert sorted(model.gate._kernels) == sorted(model.learner.adapted_weights())
    model.compile("adam", "mse", run_eagerly=True)
    before = [variable.numpy() for variable in model.trainable_variables]
    model.train_step(task_batch([3, 2]))
    changed = [(a != v.numpy()).any() for a, v in zip(before, model.trainable_variables, strict=True)]
    assert all(changed)


@pytest.mark.parametrize("items", [[], ["item", "user"], ["film"]])
def test_items_must_be_some_of_the_features(items):
    with pytest.raises(ConfigError, match="items must name some of the features user, item"):
        CBML.of(FEATURES, items=items)


def test_what_it_cannot_train_is_refused():
    with pytest.raises(ConfigError, match="which Reptile doesn't differentiate"):
        CBML.of(FEATURES, items=["item"], inner=InnerLoop("reptile"))
    with pytest.raises(ConfigError, match="clusters=0"):
        CBML.of(FEATURES, items=["item"], clusters=0)
    named = {name: tf.keras.Input([4], name=name) for name in ("user", "item")}
    network = tf.keras.Model(named, tf.keras.layers.Dense(1)(tf.concat(list(named.values()), axis=1)))
    with pytest.raises(ConfigError, match="side by side"):
        CBML(EmbeddingCollection(FEATURES), network, items=["item"])


def test_under_mixed_precision_the_gate_stays_whole():
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model, batch = CBML.of(FEATURES, items=["item"], hidden=[4]), task_batch([3, 2])
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    model.compile("adam", "mse", run_eagerly=True)
    view = model.learner.view(batch, model.collection.lookup(batch["features"]))
    assert {value.dtype for value in model.learner.start_weights(view).values()} == {tf.float32}
    assert np.isfinite(model.train_step(batch)["loss"])


def test_a_keras_file_holds_it_whole(tmp_path):
    model, batch = CBML.of(FEATURES, items=["item"], hidden=[4], clusters=3, dim=4), task_batch([3, 2])
    model.compile("adam", "mse", run_eagerly=True)
    model.train_step(batch)
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(tf.keras.models.load_model(tmp_path / "model.keras")(batch), model(batch))


def test_examples():
    names = {"MLP": MLP, "FeatureConfig": FeatureConfig}
    module = importlib.import_module("gmeta.models.zoo.cbml_model")
    assert doctest.testmod(module, extraglobs=names).failed == 0

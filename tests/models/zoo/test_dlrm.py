"""MAML-DLRM: its forward pass in plain NumPy, gradients by finite differences, and what adapting is worth."""

import doctest
import importlib

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.meta.adaptation import adapt, per_task
from gmeta.models.zoo.dlrm_model import DLRMNetwork, dlrm
from support.drawn_batches import alone, dataset, opposed_tasks, task_batch

FEATURES = [
    FeatureConfig(name, TableConfig(name, 4, initializer=Normal(0.0, 0.5)))
    for name in ("user", "item", "shop")
]


def reference(weights, vectors, floats, head):
    """The formula of `dlrm`, a sample at a time."""

    def perceptron(x, layers, last=lambda x: np.maximum(x, 0)):
        for number, layer in enumerate(layers, 1):
            x = x @ weights[f"{layer}/kernel"] + weights[f"{layer}/bias"]
            x = last(x) if number == len(layers) else np.maximum(x, 0)
        return x

    outputs = []
    for sample in range(len(vectors[0])):
        own, first = [each[sample] for each in vectors], [each[sample] for each in vectors]
        if floats:
            bottom = perceptron(np.array([column[sample] for column in floats]), ["bottom1", "bottom2"])
            own, first = [bottom, *own], [bottom]
        products = [own[i] @ own[j] for i in range(len(own)) for j in range(i)]
        logit = perceptron(np.concatenate([*first, products]), ["top1", "top2", "head"], last=lambda x: x)
        outputs.append(1 / (1 + np.exp(-logit)) if head == "ctr" else logit)
    return np.array(outputs)


@pytest.mark.parametrize("head", ["ctr", "rating"])
@pytest.mark.parametrize("floats", [(), ("price", "age")])
def test_the_network_equals_its_formula(float64, floats, head):
    names = [feature.name for feature in FEATURES]
    network = DLRMNetwork(names, 4, floats=floats, bottom=[6], top=[7, 5], head=head, outputs=2)
    rng = np.random.default_rng(0)
    for variable in network.trainable_variables:  # biases too, which start at 0
        variable.assign(rng.normal(size=variable.shape))
    vectors = [rng.normal(size=(9, 4)) for _ in FEATURES]
    columns = [rng.normal(size=9) for _ in floats]
    weights = {name: value.numpy() for name, value in network.task_weights().items()}
    inputs = dict(zip([*names, *floats], [*vectors, *columns], strict=True))
    np.testing.assert_allclose(network(inputs), reference(weights, vectors, columns, head), rtol=1e-12)


def test_outer_gradients_match_finite_differences(float64):
    """Of the query loss after two steps, along drawn directions of each weight and input."""
    network = DLRMNetwork(["user", "item"], 4, floats=["price"], bottom=[5], top=[6], head="ctr")
    rng = np.random.default_rng(1)
    made = {"user": (3, 8, 4), "item": (3, 8, 4), "price": (3, 8)}
    x = {name: tf.constant(rng.normal(size=shape)) for name, shape in made.items()}
    labels = tf.constant(rng.integers(0, 2, (3, 8, 1)).astype(float))
    start = {name: tf.constant(rng.normal(size=v.shape) / 2) for name, v in network.task_weights().items()}

    def losses(weights, x, samples):
        found = network({name: values[:, samples] for name, values in x.items()}, weights)
        return tf.reduce_mean((found - labels[:, samples]) ** 2, axis=[1, 2])

    @tf.function
    def outer(start, x):
        def support(weights):
            return losses(weights, x, slice(0, 5))

        adapted = adapt(support, per_task(start, 3), steps=2, learning_rate=0.5)
        return tf.reduce_mean(losses(adapted, x, slice(5, 8)))

    @tf.function
    def slopes(start, x):
        with tf.GradientTape() as tape:
            tape.watch([start, x])
            value = outer(start, x)
        return tape.gradient(value, {**start, **x})

    for name, gradient in slopes(start, x).items():
        nudge = tf.constant(rng.normal(size=gradient.shape)) * 1e-5
        up, down = (
            outer(
                *(
                    {each: v + sign * nudge if each == name else v for each, v in part.items()}
                    for part in (start, x)
                )
            )
            for sign in (1, -1)
        )
        np.testing.assert_allclose(
            (up - down) / 2, tf.reduce_sum(gradient * nudge), rtol=1e-5, atol=1e-14, err_msg=name
        )


def test_tasks_do_not_depend_on_neighbours_or_padding():
    model = dlrm(FEATURES, floats=["price"], inner=InnerLoop(steps=1, learning_rate=0.5), seed=1)
    model.compile("adam", "binary_crossentropy")
    batch = task_batch([3, 1, 5], ids={"user": 4, "item": 5, "shop": 3}, floats=["price"], pad=4)
    together = model(batch)
    assert 0 < float(tf.reduce_min(together)) < float(tf.reduce_max(together)) < 1
    for task in (0, 2):
        np.testing.assert_allclose(model(alone(batch, task))[0], together[task], rtol=1e-5, atol=1e-6)


def fitted_error(steps):
    features = [FeatureConfig("user", dim=8), FeatureConfig("item", dim=8)]
    inner = InnerLoop(steps=steps, learning_rate=0.3)
    model = dlrm(features, top=[16], head="rating", inner=inner)
    model.compile(tf.keras.optimizers.Adam(0.01), "mse")
    model.fit(dataset(opposed_tasks(30)), epochs=6, verbose=0)
    return float(tf.reduce_mean([model.test_step(batch)["loss"] for batch in opposed_tasks(4, seed=9)]))


# Quick: test_cbml.py, test_the_gate_alone_learns_tasks_that_contradict_each_other, and the gradients
# above.
@pytest.mark.slow
def test_it_learns_tasks_that_contradict_each_other():
    plain, adapting = fitted_error(steps=0), fitted_error(steps=1)
    assert plain > 0.85
    assert adapting < 0.5


def test_embedding_rows_adapt_too():
    inner = InnerLoop(steps=1, learning_rate=0.5, adapt="all")
    model = dlrm(FEATURES, inner=inner)
    model.compile("adam", "binary_crossentropy")
    batch = task_batch([3, 2], ids={"user": 4, "item": 5, "shop": 3})
    assert "embeddings" in " ".join(
        model.learner.adapt(
            model.learner.view(batch, model.collection.lookup(batch["features"])), steps=1
        ).parameters
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"features": [FeatureConfig("user", dim=4), FeatureConfig("item", dim=8)]},
            r"one width, got .* \[4, 8\]",
        ),
        (
            {"features": [FeatureConfig("user", dim=4), FeatureConfig("item", ("item", "group"), dim=4)]},
            r"one width, got .* \[4, 8\]",
        ),
        ({"features": [FeatureConfig("user", dim=4)]}, "no pair of vectors"),
        ({"features": FEATURES, "head": "clicks"}, "head must be 'ctr' or 'rating', got 'clicks'"),
        ({"features": FEATURES, "floats": ["item"]}, "item can't be a feature and a float column"),
    ],
)
def test_what_makes_no_dlrm_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        dlrm(**settings)


def test_a_feature_of_several_tables_takes_part_if_it_is_as_wide():
    item = FeatureConfig("item", ("item", "group"), dim=4, join="sum")
    model = dlrm([FeatureConfig("user", dim=4), item])
    model.compile("adam", "binary_crossentropy")
    model.train_step(task_batch([3, 2], ids={"user": 4, "item": 5}))
    (table,) = model.collection.tables
    assert {int(key) >> 61 for key in table.export().keys} == {0, 1, 2}  # the user's, and the item's two


def test_a_keras_file_holds_it_whole(tmp_path):
    model = dlrm(FEATURES, floats=["price"], bottom=[5], top=[6])
    batch = task_batch([3, 2], ids={"user": 4, "item": 5, "shop": 3}, floats=["price"])
    model.compile("adam", "binary_crossentropy", run_eagerly=True)
    model.train_step(batch)
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(tf.keras.models.load_model(tmp_path / "model.keras")(batch), model(batch))


def test_examples():
    assert doctest.testmod(importlib.import_module("gmeta.models.zoo.dlrm_model")).failed == 0

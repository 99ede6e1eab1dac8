"""DCN-v2: its formula in plain NumPy, what crosses are worth, and files of Keras."""

import doctest
import importlib

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import DCN
from gmeta.models.zoo.dcn_model import CrossLayers, DCNNetwork


def draw(layer, rng):
    """Give all weights values, biases too, which start at 0."""
    for variable in layer.trainable_variables:
        variable.assign(rng.normal(size=variable.shape))


def crossed(first, kernels, biases):
    """Equation (2), a sample and a layer at a time."""
    outputs = []
    for start in first:
        x = start
        for kernel, bias in zip(kernels, biases, strict=True):
            x = np.array([start[i] * (x @ kernel[:, i] + bias[i]) + x[i] for i in range(len(x))])
        outputs.append(x)
    return np.array(outputs)


@pytest.mark.parametrize("rank", [None, 2, 9])
def test_cross_layers_equal_their_formula(float64, rank):
    layer, rng = CrossLayers(3, rank=rank), np.random.default_rng(0)
    x = rng.normal(size=(4, 5))
    layer(x)
    draw(layer, rng)
    parts = [[each.numpy() for each in kernels] for kernels in layer.kernels]
    assert [len(each) for each in parts] == [2 if rank == 2 else 1] * 3  # a rank above the width is none
    kernels = [np.linalg.multi_dot(each) if len(each) > 1 else each[0] for each in parts]
    np.testing.assert_allclose(layer(x), crossed(x, kernels, [b.numpy() for b in layer.biases]), rtol=1e-10)


@pytest.mark.parametrize("head", ["ctr", "rating"])
@pytest.mark.parametrize("structure", ["parallel", "stacked"])
@pytest.mark.parametrize("hidden", [[], [7, 3]])
def test_the_network_equals_its_formula(float64, head, structure, hidden):
    network = DCNNetwork(
        ["user", "item"], floats=["price"], cross=2, hidden=hidden, structure=structure, head=head, outputs=2
    )
    rng = np.random.default_rng(0)
    inputs = {"user": rng.normal(size=(6, 3)), "item": rng.normal(size=(6, 2)), "price": rng.normal(size=6)}
    network(inputs)
    draw(network, rng)
    joined = np.concatenate([inputs["user"], inputs["item"], inputs["price"][:, None]], axis=1)
    cross = network.cross
    found = crossed(joined, [k[0].numpy() for k in cross.kernels], [b.numpy() for b in cross.biases])
    deep = joined if structure == "parallel" else found
    for kernel, bias in network.dense[:-1]:
        deep = np.maximum(deep @ kernel.numpy() + bias.numpy(), 0)
    if structure == "parallel":
        deep = np.concatenate([found, deep], axis=1) if hidden else found
    kernel, bias = network.dense[-1]
    want = deep @ kernel.numpy() + bias.numpy()
    np.testing.assert_allclose(network(inputs), 1 / (1 + np.exp(-want)) if head == "ctr" else want, rtol=1e-9)


def collection():
    tables = [TableConfig(name, 4, initializer=Normal(0.0, 0.5)) for name in ("user", "item")]
    return EmbeddingCollection([FeatureConfig(table.name, table) for table in tables])


def samples(rows=512):
    """Labels of pairs that agree or not, which no sum of a user's and an item's weights knows."""
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, 8, rows), rng.integers(0, 8, rows)
    price = rng.normal(size=rows).astype(np.float32)
    labels = ((user % 2) == (item % 2)).astype(np.float32)
    return {"user": user, "item": item, "price": price}, labels[:, None]


@pytest.mark.shown_by("test_the_network_equals_its_formula")
def test_crosses_learn_what_weights_of_ids_cannot():
    tf.random.set_seed(0)
    inputs, labels = samples()
    model = DCN(collection(), floats=["price"], cross=2, hidden=())
    model.compile(tf.keras.optimizers.Adam(0.03), "binary_crossentropy", metrics=["AUC"])
    model.fit(inputs, labels, batch_size=64, epochs=12, verbose=0)
    assert model.evaluate(inputs, labels, verbose=0, return_dict=True)["auc"] > 0.99


def test_a_saved_model_predicts_the_same(tmp_path):
    inputs, labels = samples(64)
    model = DCN(collection(), floats=["price"], rank=2, structure="stacked", dropout=0.1)
    model.compile("adam", "binary_crossentropy", run_eagerly=True)
    model.fit(inputs, labels, verbose=0)
    model.save(tmp_path / "dcn.keras")
    again = tf.keras.models.load_model(tmp_path / "dcn.keras")
    np.testing.assert_allclose(again.predict(inputs, verbose=0), model.predict(inputs, verbose=0), rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": "softmax"}, "head must be 'ctr' or 'rating', got 'softmax'"),
        ({"structure": "wide"}, "structure must be 'parallel' or 'stacked', got 'wide'"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
        ({"cross": 0}, "layers"),
        ({"floats": ["item"]}, "item can't be a feature and a float column"),
    ],
)
def test_settings_out_of_their_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        DCN(collection(), **settings)


def test_the_examples_are_right():
    module = importlib.import_module("gmeta.models.zoo.dcn_model")
    assert doctest.testmod(module, extraglobs={"FeatureConfig": FeatureConfig}).failed == 0

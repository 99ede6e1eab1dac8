"""Numbers come to one scale inside the network, and answers leave it on the labels'."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel
from gmeta.models.zoo.dlrm_model import DLRMNetwork
from gmeta.models.zoo.factor_model import ScaledNumbers

SCALES = {"price": (100.0, 20.0), "age": (40.0, 10.0)}


def network(kind="stack", answer=None):
    inner = MLP({"fc": 5, "out": 1}) if kind == "stack" else DLRMNetwork(["item"], 4, floats=["price", "age"])
    return ScaledNumbers(inner, ["item"], [4], SCALES, answer)


def inputs(price, age=40.0):
    return {"item": tf.ones([1, 1, 4]), "price": tf.constant([[price]]), "age": tf.constant([[age]])}


@pytest.mark.parametrize("kind", ["stack", "dlrm"])
def test_the_network_gets_deviations_from_the_mean(kind):
    made = network(kind)
    scaled = {"item": tf.ones([1, 1, 4]), "price": tf.constant([[1.5]]), "age": tf.constant([[0.0]])}
    given = tf.concat([scaled["item"], [[[1.5, 0.0]]]], -1) if kind == "stack" else scaled
    np.testing.assert_allclose(made(inputs(130.0)), made.network(given), rtol=1e-6)


def test_what_is_far_off_or_no_number_moves_little():
    made = network()
    np.testing.assert_array_equal(made(inputs(1e9)), made(inputs(100.0 + 5 * 20.0)))
    np.testing.assert_array_equal(made(inputs(float("nan"))), made(inputs(100.0)))


def test_answers_are_on_the_scale_of_labels_and_weights_can_be_handed_in():
    made = network(answer=(50.0, 8.0))
    plain = ScaledNumbers(made.network, ["item"], [4], SCALES)
    np.testing.assert_allclose(made(inputs(90.0)), 50 + 8 * plain(inputs(90.0)), rtol=1e-6)
    zeros = {name: tf.zeros_like(weight) for name, weight in made.task_weights().items()}
    np.testing.assert_allclose(made(inputs(90.0), zeros), [[[50.0]]])


def test_a_model_saves_and_loads_it(tmp_path):
    collection = EmbeddingCollection([FeatureConfig("item", dim=4)])
    model = MetaModel(collection, network(answer=(50.0, 8.0)), inner=InnerLoop(steps=1))
    model.compile("adam", "mse")
    again = MetaModel.from_config(model.get_config())
    assert again.network.get_config() == model.network.get_config()
    assert model.network.get_config()["answer"] == [50.0, 8.0]

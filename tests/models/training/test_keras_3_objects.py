"""Objects of Keras 3, which lies beside Keras 2: each is refused by one line that names its counterpart."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from gmeta.core.errors import KerasError
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.models import MetaModel, Model

DATA = {"item": [1, 2, 3, 4]}
LABELS = [[0.0], [1.0], [0.0], [1.0]]


class Two(Model):
    """An embedding, and a layer of whichever Keras."""

    def __init__(self, layer) -> None:
        super().__init__(name="two")
        self.collection, self.layer = EmbeddingCollection([FeatureConfig("item", dim=2)]), layer

    def call(self, inputs):
        return self.layer(self.collection(inputs)["item"])


class Told(keras.callbacks.Callback):
    """A callback of a user's own."""


def model() -> Two:
    return Two(tf.keras.layers.Dense(1))


def refusal(caught: pytest.ExceptionInfo[KerasError]) -> str:
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"optimizer": keras.optimizers.Adam()}, "optimizers.Adam"),
        ({"loss": keras.losses.BinaryCrossentropy()}, "losses.BinaryCrossentropy"),
        ({"loss": "mse", "metrics": ["mae", keras.metrics.AUC()]}, "metrics.AUC"),
        ({"loss": "mse", "weighted_metrics": {"a": [keras.metrics.Mean()]}}, "metrics.Mean"),
        ({"optimizer": keras.optimizers.Adam}, "optimizers.Adam"),
    ],
)
def test_compile_refuses_it(given: dict, name: str) -> None:
    with pytest.raises(KerasError) as caught:
        model().compile(**given)
    assert refusal(caught) == (
        f"two: compile: keras.{name} is of Keras 3, but gmeta needs Keras 2: use tf.keras.{name}"
    )


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_a_callback_is_refused(call: str) -> None:
    compiled = model()
    compiled.compile("sgd", "mse")
    labels = {} if call == "predict" else {"y": tf.constant(LABELS)}
    data = {"x": {"item": tf.constant(DATA["item"])}, **labels}
    with pytest.raises(KerasError) as caught:
        getattr(compiled, call)(**data, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()])
    counterpart = "callbacks.TerminateOnNaN"
    assert refusal(caught) == (
        f"{call}: keras.{counterpart} is of Keras 3, but gmeta needs Keras 2: use tf.keras.{counterpart}"
    )


def test_a_class_of_the_users_own_is_told_what_to_derive_from() -> None:
    compiled = model()
    compiled.compile("sgd", "mse")
    with pytest.raises(KerasError) as caught:
        compiled.fit(x={"item": tf.constant(DATA["item"])}, y=tf.constant(LABELS), callbacks=Told())
    assert refusal(caught) == (
        "fit: Told, a keras.callbacks.Callback, is of Keras 3, but gmeta needs Keras 2: "
        "derive it from tf.keras.callbacks.Callback"
    )


def test_a_layer_of_a_subclassed_model_is_refused() -> None:
    with pytest.raises(KerasError) as caught:
        Two(keras.layers.Dense(1)).compile("sgd", "mse")
    assert refusal(caught) == (
        "two.layer: keras.layers.Dense is of Keras 3, but gmeta needs Keras 2: use tf.keras.layers.Dense"
    )


def test_a_layer_within_a_layer_is_refused() -> None:
    outer = tf.keras.layers.Layer(name="outer")
    outer.parts = [keras.layers.Dense(1)]
    with pytest.raises(KerasError, match=r"^outer\.parts: keras\.layers\.Dense is of Keras 3"):
        Two(outer).compile("sgd", "mse")


def test_a_network_to_adapt_is_refused() -> None:
    collection = EmbeddingCollection([FeatureConfig("item", dim=2)])
    with pytest.raises(KerasError) as caught:
        MetaModel(collection, keras.Sequential([keras.layers.Dense(1)]))
    assert refusal(caught) == (
        "network: keras.models.Sequential is of Keras 3, but gmeta needs Keras 2: "
        "use tf.keras.models.Sequential"
    )


def test_inputs_of_a_functional_model_are_refused() -> None:
    given = keras.Input([3])
    with pytest.raises(KerasError) as caught:
        Model(given, keras.layers.Dense(1)(given))
    assert refusal(caught) == (
        "Model: a tensor of keras.Input is of Keras 3, but gmeta needs Keras 2: "
        "use tf.keras.Input and tf.keras.layers"
    )


def test_an_input_of_a_collection_is_refused() -> None:
    collection = EmbeddingCollection([FeatureConfig("item", dim=2)])
    with pytest.raises(KerasError, match=r"^feature 'item': a tensor of keras\.Input is of Keras 3"):
        collection({"item": keras.Input([], dtype="int64")})

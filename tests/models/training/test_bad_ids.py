"""Ids that no row can have end fit, evaluate and predict in one line; padding is accepted there."""

import itertools
import random

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.models import MetaModel, Model
from support.cells import slow_but


class Scores(Model):
    def __init__(self, **settings):
        super().__init__()
        self.embeddings = EmbeddingCollection([FeatureConfig("user", dim=4, **settings)])
        self.head = tf.keras.layers.Dense(1)

    def call(self, inputs, training=False):
        return self.head(self.embeddings(inputs, training=training)["user"])


def functional():
    user = tf.keras.Input([], name="user", dtype=tf.int64)
    vectors = EmbeddingCollection([FeatureConfig("user", dim=4)])({"user": user})["user"]
    return Model({"user": user}, tf.keras.layers.Dense(1)(vectors))


def compiled(model, **settings):
    model.compile("adam", "mse", **settings)
    return model


def run(model, what, ids):
    data = {"user": np.array(ids)}
    if what == "predict":
        return model.predict(data, verbose=0)
    in_order = {"shuffle": False} if what == "fit" else {}
    return getattr(model, what)(data, np.zeros(len(ids), np.float32), verbose=0, **in_order)


# Quick: each call and each id of a subclassed model, and one of a functional one.
@pytest.mark.parametrize(
    ("make", "what", "bad"),
    slow_but(
        [
            (Scores, "fit", -1),
            (Scores, "evaluate", 2**62),
            (Scores, "predict", -7),
            (functional, "fit", 2**62),
        ],
        itertools.product([Scores, functional], ["fit", "evaluate", "predict"], [-1, -7, 2**62]),
    ),
)
def test_an_id_out_of_range_is_one_line_of_ours(make, what, bad):
    with pytest.raises(ConfigError) as raised:
        run(compiled(make()), what, [3, bad])
    said = str(raised.value)
    assert said.startswith(f"feature 'user': id {bad} at position 1 of 2 is outside [0, ")
    assert "hash=True" in said
    assert "\n" not in said
    assert ("stands for no id" in said) == (bad == -1)
    assert isinstance(raised.value, tf.errors.InvalidArgumentError)
    assert raised.value.__suppress_context__


@pytest.mark.parametrize("make", [Scores, functional])
@pytest.mark.parametrize("what", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize(("ids", "found"), [([1.5, 2.0], "float"), (["a", "b"], "str")])
def test_an_id_of_a_wrong_type_is_one_line_with_the_name(make, what, ids, found):
    with pytest.raises(ConfigError, match=f"'user'.*{found}") as raised:
        run(compiled(make()), what, ids)
    assert "\n" not in str(raised.value)
    if found == "str":
        assert "hash=True" in str(raised.value)


def test_padding_trains_and_measures_as_ragged_ids_do():
    padded, ragged = np.array([[1, 2], [3, -1], [-1, -1]]), tf.ragged.constant([[1, 2], [3], []])
    found = []
    for ids in (padded, ragged):
        random.seed(1)
        model = compiled(Scores(combiner="mean"), run_eagerly=True)
        data = tf.data.Dataset.from_tensors(({"user": tf.cast(ids, tf.int64)}, tf.ones([3])))
        model.fit(data, epochs=3, verbose=0)
        found.append([model.evaluate(data, verbose=0), *model.predict(data, verbose=0).ravel()])
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.shown_by(case="False")
def test_a_meta_model_adapts_and_predicts_from_padded_ids(text):
    feature = FeatureConfig("tags", dim=4, combiner="mean", hash=text)
    model = MetaModel(
        EmbeddingCollection([feature]), tf.keras.Sequential([tf.keras.layers.Dense(1, name="out")])
    )
    model.compile("adam", "mse")
    lists = [["a", "b"], ["c"], []] if text else [[1, 2], [3], []]
    fill = "" if text else -1
    padded = {"tags": np.array([[*row, fill, fill][:2] for row in lists])}
    answers = []
    for given in ({"tags": lists}, padded):
        fast = model.adapt(given, [1.0, 2.0, 3.0], steps=2)
        answers.append(np.asarray(model.predict(given, weights=fast)))
    np.testing.assert_allclose(*answers, rtol=1e-6)


def test_a_meta_model_refuses_float_and_negative_ids_by_name():
    feature = FeatureConfig("tags", dim=4, combiner="mean")
    model = MetaModel(
        EmbeddingCollection([feature]), tf.keras.Sequential([tf.keras.layers.Dense(1, name="out")])
    )
    model.compile("adam", "mse")
    for ids, said in ((np.array([[1.5]]), "float64"), (np.array([[-2]]), "the id -2")):
        with pytest.raises(ConfigError, match=f"'tags'.*{said}"):
            model.predict({"tags": ids})

"""Losses, layers, rewards and hooks of users ask tensors in `if` and `while`, whatever of gmeta calls them.

What a graph computes is compared with what the model computes eagerly, where Python's `if` works by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta import Pipeline
from gmeta.callbacks import AdaptationCurve, StepTimes
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import FlatRetriever, GenerativeRetriever, MetaModel, Model
from gmeta.preprocess import semantic_ids
from gmeta.reinforcement import PolicyTraining, Rollouts
from support.drawn_batches import make_batch
from support.softmax_policy import SoftmaxPolicy


def halved(x: tf.Tensor) -> tf.Tensor:
    """Halve a tensor while its largest number is above 0.01: Python's branches on tensors."""
    if tf.size(x) == 0:
        return x
    while tf.reduce_max(tf.abs(x)) > 0.01:
        x = x / 2
    return x


class Halves(tf.keras.layers.Layer):
    def call(self, x: tf.Tensor) -> tf.Tensor:
        return halved(x)


class Backbone(HSTU):
    """A backbone whose tokens are halved."""

    def call(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return super().call(x._replace(values=halved(x.values)), *args, **kwargs)


def loss(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    errors = tf.reduce_mean((labels - outputs) ** 2, axis=-1)
    if tf.reduce_mean(outputs) > 0:
        errors = 2 * errors
    return errors


def reward(batch: Any, items: tf.Tensor) -> tf.Tensor:
    right = tf.cast(items == batch["next"][:, tf.newaxis], tf.float32)
    if tf.reduce_sum(right) > 0:
        return 2 * right
    return right + 1


def maml(**compiled: Any) -> tuple[Any, Any]:
    hidden = tf.keras.layers.Dense(4, kernel_initializer="ones", name="fc")
    network = tf.keras.Sequential(
        [hidden, Halves(), tf.keras.layers.Dense(1, kernel_initializer="ones", name="out")]
    )
    collection = EmbeddingCollection([FeatureConfig(name, dim=4) for name in ("user", "item")])
    model = MetaModel(collection, network, inner=InnerLoop(steps=1, learning_rate=0.1, adapt=["out"]))
    model.compile("sgd", loss, **compiled)
    return model, tf.data.Dataset.from_tensors(make_batch([3, 2])).repeat(3)


def retriever(kind: Any, **compiled: Any) -> tuple[Any, Any]:
    codes = semantic_ids(np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32), levels=2, codes=3)
    sizes = {"blocks": 1, "heads": 1, "attention_dim": 4, "value_dim": 4, "bias_by_time": False}
    if kind is FlatRetriever:
        model = kind(Backbone(max_length=20, **sizes), codes, dim=4, max_length=6, beam=10, ks=[5])
    else:
        collection = EmbeddingCollection([FeatureConfig("item", TableConfig("item", 4))])
        model = kind(
            collection,
            Backbone(max_length=6, **sizes),
            codes,
            max_length=6,
            width=4,
            negatives=8,
            beam=10,
            ks=[5],
        )
    model.compile("sgd", **compiled)
    items = tf.RaggedTensor.from_row_lengths(tf.constant([3, 7, 5, 2, 2, 9, 11], tf.int64), [3, 2, 2])
    return model, tf.data.Dataset.from_tensors({"item": items}).repeat(3)


def policy(**compiled: Any) -> tuple[Any, Any]:
    inner = SoftmaxPolicy(EmbeddingCollection([FeatureConfig("user", TableConfig("user", 32))]))
    model = PolicyTraining(inner, reward, rollouts=Rollouts(group=4), user="user", k=1, updates=2)
    model.compile("sgd", **compiled)
    users = tf.range(8, dtype=tf.int64)
    return model, tf.data.Dataset.from_tensors({"user": users, "next": users * 5 % 9}).repeat(3)


def ordinary(**compiled: Any) -> tuple[Any, Any]:
    x = {"user": tf.keras.Input([], name="user", dtype=tf.int64)}
    vectors = Halves()(EmbeddingCollection([FeatureConfig("user", dim=4)])(x)["user"])
    model = Model(x, tf.keras.layers.Dense(1, kernel_initializer="ones")(vectors))
    model.compile("sgd", loss, **compiled)
    users = tf.range(8, dtype=tf.int64)
    data = ({"user": users}, tf.cast(users % 3, tf.float32)[:, tf.newaxis])
    return model, tf.data.Dataset.from_tensors(data).repeat(3)


MODELS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "ordinary": ordinary,
    "maml": maml,
    "generative": lambda **compiled: retriever(GenerativeRetriever, **compiled),
    "flat": lambda **compiled: retriever(FlatRetriever, **compiled),
    "policy": policy,
}


def results(kind: str, *callbacks: Any, **compiled: Any) -> list[float]:
    random.seed(1)  # Keras draws seeds from it
    tf.random.set_seed(1)
    model, data = MODELS[kind](**compiled)
    history = model.fit(data, verbose=0, callbacks=list(callbacks)).history["loss"]
    told = model.evaluate(data, verbose=0, return_dict=True)
    return [*history, *told.values()]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.shown_by(case="ordinary")
def test_fit_and_evaluate_convert_what_users_wrote(kind: str) -> None:
    np.testing.assert_allclose(results(kind), results(kind, run_eagerly=True), rtol=1e-5)


@pytest.mark.parametrize("kind", ["ordinary", "maml"])
@pytest.mark.parametrize(
    "pipeline", [Pipeline(depth=1), Pipeline(depth=0, micro_batches=2)], ids=["ahead", "micro"]
)
@pytest.mark.shown_by(case="ahead-ordinary")
def test_pipelines_convert_what_users_wrote(kind: str, pipeline: Pipeline) -> None:
    np.testing.assert_allclose(
        results(kind, pipeline=pipeline), results(kind, run_eagerly=True, pipeline=pipeline), rtol=1e-5
    )


@pytest.mark.parametrize("kind", ["ordinary", "maml"])
@pytest.mark.shown_by(case="ordinary")
def test_step_times_measure_what_users_wrote(kind: str) -> None:
    np.testing.assert_allclose(results(kind, StepTimes()), results(kind, run_eagerly=True), rtol=1e-5)


def test_tasks_are_adapted_and_predicted_through_what_users_wrote() -> None:
    (graph, data), (eager, _) = maml(), maml(run_eagerly=True)
    np.testing.assert_allclose(graph.predict(data, verbose=0), eager.predict(data, verbose=0), rtol=1e-5)
    batch = make_batch([3, 2])
    inside = tf.function(lambda: graph.predict_after(batch, [0, 1]))()
    for steps, expected in eager.predict_after(batch, [0, 1]).items():
        np.testing.assert_allclose(inside[steps], expected, rtol=1e-5)


@pytest.mark.shown_by("test_tasks_are_adapted_and_predicted_through_what_users_wrote")
def test_curves_measure_tasks_through_what_users_wrote() -> None:
    (graph, data), (eager, _) = maml(), maml(run_eagerly=True)
    curves = [AdaptationCurve(data, steps=(0, 1)) for _ in range(2)]
    for model, curve in zip((graph, eager), curves, strict=True):
        model.fit(data, verbose=0, callbacks=[curve])
    for steps, expected in curves[1].values.items():
        assert curves[0].values[steps] == pytest.approx(expected, rel=1e-5)

"""A learner without a Keras model: gradients, adaptation and predictions are those of `MetaModel`."""

import doctest

import numpy as np
import pytest

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaGRM, MetaModel, Model, TaskLearner
from gmeta.models.meta import task_learner
from gmeta.models.meta.adapter import Adapter
from gmeta.models.meta.outer_rules import outer_gradients
from support.drawn_batches import make_batch


def parts():
    features = [
        FeatureConfig(name, TableConfig(name, 4, initializer=Normal(0.0, 1.0))) for name in ("user", "item")
    ]
    return EmbeddingCollection(features), MLP({"fc": 6, "out": 1}, seed=3)


@pytest.mark.parametrize("algorithm", ["maml", "anil", "meta-sgd", "reptile"])
def test_gradients_are_those_of_the_model(algorithm):
    inner, batch = InnerLoop(algorithm, steps=2, learning_rate=0.05), make_batch([2, 5, 1])
    learner = TaskLearner(*parts(), inner, "mse")
    variables = [*learner.network.trainable_variables, *learner.inner_rates.trainable_variables]
    lookup = learner.collection.lookup(batch["features"], insert=True)
    found = outer_gradients(learner, learner.tasks_of(batch), lookup, variables)
    model = MetaModel(*parts(), inner=inner)
    model.compile("sgd", "mse", form="plain")
    expected = model.compute_gradients(batch)
    np.testing.assert_allclose(found.measured.loss, expected.loss, rtol=1e-6)
    for one, other in zip((*found.dense, *found.rows), (*expected.dense, *expected.rows), strict=True):
        if one is None or other is None:
            assert one is other
        else:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_an_adapter_is_what_the_model_adapts_by():
    inner = InnerLoop(steps=2, learning_rate=0.05, adapt="all")
    adapter = Adapter(TaskLearner(*parts(), inner, "mse", name="meta_model"))
    model = MetaModel(*parts(), inner=inner)
    model.compile("sgd", "mse")
    support, labels, query = {"user": [1, 1], "item": [3, 4]}, [1.0, 0.0], {"user": [1], "item": [3]}
    fast, expected = adapter.adapt(support, labels), model.adapt(support, labels)
    assert fast.fingerprint == expected.fingerprint
    for name, delta in expected.deltas.items():
        np.testing.assert_allclose(fast.deltas[name], delta, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        adapter.predict(query, fast), model.predict(query, weights=expected), rtol=1e-5
    )


def test_a_learner_without_a_loss_says_so():
    with pytest.raises(ConfigError, match="compile the model first"):
        Adapter(TaskLearner(*parts())).adapt({"user": [1], "item": [3]}, [1.0])


def test_one_train_step_serves_all_models():
    """`MetaModel` overrides how gradients are computed, and nothing else of a training step."""
    assert MetaModel.train_step is MetaGRM.train_step is Model.train_step


def test_examples():
    assert doctest.testmod(task_learner).failed == 0

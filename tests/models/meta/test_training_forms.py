"""The forms in which a training step may compute the inner loop, each against the plainest one."""

import random

import numpy as np
import pytest
import tensorflow as tf

from gmeta.initializers.distributions import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig
from gmeta.meta import Adam, InnerLoop, Momentum
from gmeta.models import MetaModel
from gmeta.models.meta.learner import outer_gradients as meta_gradients
from gmeta.models.meta.learner.dual_steps import steps_among_samples
from gmeta.testing.data.drawn_tasks import make_batch

DUAL = {
    "maml": InnerLoop(steps=3, learning_rate=0.05),
    "fomaml": InnerLoop("fomaml", steps=2, learning_rate=0.05),
    "boil": InnerLoop("boil", steps=1, learning_rate=0.05),
    "momentum": InnerLoop(steps=3, learning_rate=0.05, optimizer=Momentum(0.7, nesterov=True)),
    "learned rates": InnerLoop(steps=2, learning_rate=0.05, learn_learning_rate="layer"),
}
NOT_DUAL = {
    "no steps": InnerLoop(steps=0),
    "anil": InnerLoop("anil"),
    "rows adapt": InnerLoop(adapt="all"),
    "adam": InnerLoop(optimizer=Adam()),
    "clipped": InnerLoop(clip_norm=1.0),
    "limited": InnerLoop(clip_value=1.0),
    "recomputed": InnerLoop(recompute=True),
    "meta-sgd": InnerLoop("meta-sgd"),
}


class OwnStart(MetaModel):
    """A model that asks for the weights."""

    def start_weights(self, view):
        return {name: 2 * value for name, value in super().start_weights(view).items()}


def make_model(inner, cls=MetaModel, network=None, **kwargs):
    features = [FeatureConfig(name, 4, initializer=Normal(0.0, 1.0)) for name in ("user", "item")]
    model = cls(
        EmbeddingCollection(features),
        network or MLP({"fc": 6, "out": 1}, seed=3),
        inner=inner,
        **kwargs,
    )
    model.compile("sgd", "mse", ["mae"])
    return model


def keras_network():
    random.seed(4)
    layers = [tf.keras.layers.Dense(5, "tanh", name="fc"), tf.keras.layers.Dense(1, name="out")]
    return tf.keras.Sequential(layers)


def everything(model, batch):
    model.reset_metrics()
    outer, _ = model.gradients(batch)
    dense = [g for g in outer.dense if g is not None]
    return [outer.loss, *dense, *outer.rows, *(metric.result() for metric in model.compiled_metrics.metrics)]


def assert_same(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("samples", ["query", "all"])
@pytest.mark.parametrize("name", DUAL)
def test_steps_among_samples_are_those_of_weights(name, samples, monkeypatch):
    model, batch = make_model(DUAL[name], outer_samples=samples), make_batch([5, 1, 3], query=3)
    assert steps_among_samples(model)
    found = everything(model, batch)
    monkeypatch.setattr(meta_gradients, "steps_among_samples", lambda model: False)
    assert_same(found, everything(model, batch))


@pytest.mark.parametrize("name", NOT_DUAL)
def test_what_needs_weights_steps_among_weights(name):
    assert not steps_among_samples(make_model(NOT_DUAL[name]))


def test_a_network_of_keras_steps_among_weights():
    assert not steps_among_samples(make_model(InnerLoop(), network=keras_network()))


def test_a_derived_model_gets_its_weights():
    """Whose start has to count, although the settings are those of the dual form."""
    batch, inner = make_batch([3, 2]), InnerLoop(steps=2, learning_rate=0.05)
    model, plain = make_model(inner, OwnStart), make_model(inner)
    assert steps_among_samples(plain)
    for variable in plain.network.trainable_variables:
        variable.assign(2 * variable)
    assert_same([model.gradients(batch)[0].loss], [plain.gradients(batch)[0].loss])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("sizes", [[4], [2, 7], [1, 9, 3, 1, 6]], ids=str)
def test_two_groups_are_as_one(sizes, optimizer, monkeypatch):
    model = make_model(InnerLoop(steps=2, learning_rate=0.05, optimizer=optimizer))
    batch = make_batch(sizes, pad=2)
    # A sample of weight 0 before others is no padding, and a task may have nothing but padding.
    weights = batch["support"]["mask"].numpy()
    weights[0, 0], weights[-1] = 0, 0
    weights[0, 1] = 0.5
    batch["support"]["mask"] = tf.constant(weights)
    found = everything(model, batch)
    monkeypatch.setattr(meta_gradients, "in_two_groups", lambda view, outputs: outputs(view))
    assert_same(found, everything(model, batch))


def test_groups_pad_to_their_own_longest(monkeypatch):
    model, seen = make_model(InnerLoop(steps=2)), []
    taken = meta_gradients.dual_outputs

    def watched(model, view, part):
        seen.append((view.index("support").shape.as_list(), view.batch["task"].numpy().tolist()))
        return taken(model, view, part)

    monkeypatch.setattr(meta_gradients, "dual_outputs", watched)
    model.gradients(make_batch([2, 9, 3, 1], pad=4))
    assert seen == [([2, 2], [3, 0]), ([2, 9], [2, 1])]

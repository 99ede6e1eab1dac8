"""The forms in which a training step may compute the inner loop, each against the plainest one."""

import itertools
import random

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import Adam, InnerLoop, Momentum
from gmeta.models import MetaModel, TaskLearner
from gmeta.models.meta import outer_rules
from gmeta.models.meta.outer_rules import choose_form
from support.cells import slow_but
from support.drawn_batches import make_batch

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


class OwnStart(TaskLearner):
    """A learner that begins elsewhere."""

    def start_weights(self, view):
        return {name: 2 * value for name, value in super().start_weights(view).items()}


def make_model(inner, network=None, form="auto", **kwargs):
    features = [
        FeatureConfig(name, TableConfig(name, 4, initializer=Normal(0.0, 1.0))) for name in ("user", "item")
    ]
    model = MetaModel(
        EmbeddingCollection(features),
        network or MLP({"fc": 6, "out": 1}, seed=3),
        inner=inner,
        **kwargs,
    )
    model.compile("sgd", "mse", ["mae"], form=form)
    return model


def keras_network():
    random.seed(4)
    layers = [tf.keras.layers.Dense(5, "tanh", name="fc"), tf.keras.layers.Dense(1, name="out")]
    return tf.keras.Sequential(layers)


def everything(model, batch):
    model.reset_metrics()
    outer = model.compute_gradients(batch)
    dense = [g for g in outer.dense if g is not None]
    return [outer.loss, *dense, *outer.rows, outer.logs["loss"], outer.logs["mae"]]


def assert_same(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-6)


# Quick: each loop, and each choice of samples.
@pytest.mark.parametrize(
    ("name", "samples"),
    slow_but(
        lambda name, samples: (samples == "all") == (name == "maml"),
        itertools.product(DUAL, ["query", "all"]),
    ),
)
@pytest.mark.shown_by(case="maml-all")
def test_dual_steps_are_those_of_weights(name, samples):
    model, batch = make_model(DUAL[name], outer_samples=samples), make_batch([5, 1, 3], query=3)
    assert "dual" in choose_form(model.learner)
    for form in ("auto", "dual"):
        model.compile("sgd", "mse", ["mae"], form=form)
        found = everything(model, batch)
        model.compile("sgd", "mse", ["mae"], form="plain")
        assert_same(found, everything(model, batch))


@pytest.mark.parametrize("name", NOT_DUAL)
def test_what_needs_weights_is_not_dual(name):
    model = make_model(NOT_DUAL[name])
    assert "dual" not in choose_form(model.learner)
    with pytest.raises(ConfigError, match=r"form='dual' can't be: .*; leave it 'auto'"):
        model.compile("sgd", "mse", form="dual")


def test_a_network_of_keras_is_computed_plainly():
    model = make_model(InnerLoop(), network=keras_network())
    assert choose_form(model.learner) == "plain"
    with pytest.raises(ConfigError, match=r"the network is a TaskNetwork and not a gmeta\.layers\.MLP"):
        choose_form(model.learner, "dual in groups")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"inner": InnerLoop(adapt="all")}, "rows adapt"),
        ({"inner": InnerLoop(), "outer_samples": "all"}, "over support and query"),
    ],
)
def test_groups_that_can_not_be_are_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        make_model(form="grouped", **settings)


def test_a_form_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match=r"form must be 'auto', 'plain', .*got 'fast'"):
        make_model(InnerLoop(), form="fast")


def test_a_derived_learner_is_computed_plainly_and_saved(tmp_path):
    """Whose start has to count, although the settings are those of the dual form."""
    batch, inner = make_batch([3, 2]), InnerLoop(steps=2, learning_rate=0.05)
    model, plain = make_model(inner, learner=OwnStart), make_model(inner)
    assert "dual" in choose_form(plain.learner)
    assert choose_form(model.learner) == "plain"
    with pytest.raises(ConfigError, match=r"OwnStart is computed in the forms plain, got form='dual'"):
        model.compile("sgd", "mse", form="dual")
    before = {variable.ref(): variable.numpy() for variable in plain.network.trainable_variables}
    for variable in plain.network.trainable_variables:
        variable.assign(2 * before[variable.ref()])
    assert_same([model.compute_gradients(batch).loss], [plain.compute_gradients(batch).loss])
    model.save(tmp_path / "model.keras")
    with pytest.raises(ConfigError, match=r"learner 'OwnStart' isn't known here"):
        tf.keras.models.load_model(tmp_path / "model.keras")
    other = tf.keras.models.load_model(tmp_path / "model.keras", custom_objects={"OwnStart": OwnStart})
    assert type(other.learner) is OwnStart
    assert_same([other.compute_gradients(batch).loss], [plain.compute_gradients(batch).loss])


def test_a_learner_that_keras_knows_is_found_again(tmp_path):
    class Halved(TaskLearner):
        def start_weights(self, view):
            return {name: 0.5 * value for name, value in super().start_weights(view).items()}

    kind = tf.keras.saving.register_keras_serializable(f"test_{tmp_path.name}")(Halved)
    make_model(InnerLoop(), learner=kind).save(tmp_path / "model.keras")
    assert type(tf.keras.models.load_model(tmp_path / "model.keras").learner) is Halved


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    "sizes", [[4], pytest.param([2, 7], marks=pytest.mark.slow), [1, 9, 3, 1, 6]], ids=str
)
@pytest.mark.shown_by(case="[1, 9, 3, 1, 6]-sgd")
def test_two_groups_are_as_one(sizes, optimizer):
    model = make_model(InnerLoop(steps=2, learning_rate=0.05, optimizer=optimizer))
    batch = make_batch(sizes, pad=2)
    # A sample of weight 0 before others is no padding, and a task may have nothing but padding.
    weights = batch["support"]["mask"].numpy()
    weights[0, 0], weights[-1] = 0, 0
    weights[0, 1] = 0.5
    batch["support"]["mask"] = tf.constant(weights)
    for form in ("grouped", *(["dual in groups"] if optimizer == "sgd" else [])):
        model.compile("sgd", "mse", ["mae"], form=form)
        found = everything(model, batch)
        model.compile("sgd", "mse", ["mae"], form="plain")
        assert_same(found, everything(model, batch))


def test_groups_pad_to_their_own_longest(monkeypatch):
    model, seen = make_model(InnerLoop(steps=2), form="dual in groups"), []
    taken = outer_rules.dual_outputs

    def watched(learner, view, part):
        seen.append((view.index("support").shape.as_list(), view.batch["task"].numpy().tolist()))
        return taken(learner, view, part)

    monkeypatch.setattr(outer_rules, "dual_outputs", watched)
    model.compute_gradients(make_batch([2, 9, 3, 1], pad=4))
    assert seen == [([2, 2], [3, 0]), ([2, 9], [2, 1])]

"""The factor model: its formula in NumPy, its closed form, its priors, and what it says of new items."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.meta import InnerLoop
from gmeta.models import factor_ridge
from gmeta.models.zoo import factor_model
from gmeta.models.zoo.factor_model import FactorNetwork, FactorSettings
from gmeta.optimizers import SGD
from support.drawn_batches import task_batch

IDS = {"film": 6, "genre": 4, "age": 3}


def test_the_network_equals_its_formula(float64):
    network = FactorNetwork(
        "film", ["genre"], ["age", "job"], floats=["year"], dim=3, mean=3.5, deviation=1.2
    )
    rng = np.random.default_rng(0)
    for variable in network.trainable_variables:
        variable.assign(rng.normal(size=variable.shape))
    x = {name: rng.normal(size=(7, 5)) for name in ("film", "genre")}
    x |= {name: rng.normal(size=(7, 4)) for name in ("age", "job")} | {"year": rng.normal(size=7)}
    centre, floats, head = (value.numpy() for value in network.task_weights().values())
    item = x["film"] + x["genre"] + centre + np.outer(x["year"], floats[0])
    features = np.concatenate([1 + item[:, 1:2], item[:, 2:]], axis=1)
    user = x["age"] + x["job"] + head[:, 0]
    expected = 3.5 + 1.2 * (item[:, 0] + (features * user).sum(axis=1))
    np.testing.assert_allclose(network(x)[:, 0], expected, rtol=1e-12)


def test_one_step_is_ridge_regression_of_the_support():
    model = factor_ridge(
        "film", ["genre"], user=["age"], samples=100, mean=3.0, settings=FactorSettings(dim=2)
    )
    model.compile("adam", "mse")
    batch = task_batch([5, 3], ids=IDS, seed=3)
    lookup = model.collection.lookup(batch["features"])
    rng = np.random.default_rng(1)
    model.collection.apply_gradients(
        lookup, [tf.constant(rng.normal(size=rows.shape), tf.float32) for rows in lookup.rows], 0.5
    )
    predicted = model(batch).numpy()
    vectors = model.collection(batch["features"], training=False)
    item = (vectors["film"] + vectors["genre"]).numpy().astype(np.float64)
    features = np.concatenate([1 + item[:, 1:2], item[:, 2:]], axis=1)
    offset = 3.0 + item[:, 0] + (features * vectors["age"].numpy()).sum(axis=1)
    rates = model.learner.inner_rates
    prior, noise = rates.prior().numpy().astype(np.float64), float(rates.noise())
    labels = batch["label"].numpy()
    for task in range(2):
        mask = batch["support"]["mask"][task].numpy() > 0
        rows, asked = batch["support"]["index"][task].numpy()[mask], batch["query"]["index"][task].numpy()
        x, y = features[rows], labels[rows] - offset[rows]
        # A squared error's curvature is 2: sum (y - x h)^2 / noise + sum h^2 / (2 prior).
        head = np.linalg.solve(x.T @ x * 2 / noise + np.diag(1 / prior), x.T @ y * 2 / noise)
        np.testing.assert_allclose(predicted[task], offset[asked] + features[asked] @ head, rtol=0, atol=1e-4)


def test_rows_have_the_priors_of_their_role():
    settings = FactorSettings(dim=2, noise=0.4, own_bias=0.5, factors=0.002, user=0.02)
    model = factor_ridge("film", ["genre"], user=["age"], samples=50, deviation=2.0, settings=settings)
    priors = {feature.name: feature.table.optimizer.prior for feature in model.collection.features}
    assert priors["film"].variance == (0.5, 0.01, 0.01, 0.01)
    assert priors["genre"].variance == (0.003, 0.002, 0.002, 0.002)
    assert priors["age"].variance == (0.02, 0.02, 0.02)
    assert {prior.scale for prior in priors.values()} == {1.0}  # the loss is a negative log-likelihood
    plain = InnerLoop("ridge")
    model = factor_ridge("film", samples=500, deviation=2.0, inner=plain, settings=FactorSettings(noise=0.4))
    [table] = model.collection.tables
    assert table.optimizer.prior.scale == 2 * 0.4 * 4
    assert {prior.samples for prior in priors.values()} == {50}


def test_attributes_speak_for_new_items():
    """Films of genre 0 are liked by all and those of genre 1 by none; half of the films are new."""
    rng = np.random.default_rng(0)

    def batches(films: int, count: int) -> list[dict]:
        found = []
        for seed in range(count):
            batch = task_batch([6] * 8, ids={"film": 20, "genre": 2, "age": 2}, seed=seed)
            film = batch["features"]["film"] + films
            batch["features"] |= {"film": film, "genre": film % 2}
            noise = rng.normal(size=len(film)).astype(np.float32)
            batch["label"] = tf.where(film % 2 == 0, 4.0, 2.0) + 0.3 * noise
            found.append(batch)
        return found

    model = factor_ridge(
        "film", ["genre"], user=["age"], samples=900, mean=3.0, settings=FactorSettings(bias=1.0)
    )
    model.compile(tf.keras.optimizers.Adam(0.03), "mse")
    for _ in range(3):
        for batch in batches(0, 12):
            model.train_on_batch(batch)
    new = batches(1000, 1)[0]
    error = tf.reduce_mean(tf.abs(model(new) - tf.gather(new["label"], new["query"]["index"])))
    assert float(error) < 0.45


def test_a_keras_file_holds_it_whole(tmp_path):
    model = factor_ridge(
        "film", ["genre"], user=["age"], samples=50, floats={"year": (2000.0, 9.0)}, hash=["film"]
    )
    batch = task_batch([3, 2], ids=IDS, floats=["year"])
    model.compile("adam", "mse", run_eagerly=True)
    model.train_step(batch)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(batch), model(batch))
    assert [f.table.optimizer for f in loaded.collection.features] == [
        f.table.optimizer for f in model.collection.features
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attributes": ["film"]}, "film has two roles"),
        ({"user": ["age"], "floats": {"age": (0.0, 1.0)}}, "age has two roles"),
        ({"hash": ["shop"]}, "hash names shop"),
        ({"samples": 0}, "samples must be above 0"),
        ({"settings": FactorSettings(dim=0)}, "dim"),
    ],
)
def test_what_makes_no_model_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        factor_ridge("film", **{"samples": 10, **settings})
    with pytest.raises(ConfigError, match="dropout must lie in"):
        FactorSettings(dropout=1.0)


def test_own_rows_are_left_out_where_attributes_can_speak_for_items():
    for attributes, kept in ((["genre"], 0.5), ([], 1.0)):
        model = factor_ridge("film", attributes, samples=10, settings=FactorSettings(dropout=0.5))
        vectors = {name: tf.ones([1000, 10]) for name in ("film", *attributes)}
        seen = model.network.vector(vectors, training=True).numpy()[:, 0] - len(attributes)
        assert seen.mean() == pytest.approx(kept, abs=0.1)


def test_rows_may_have_a_rate_of_their_own():
    model = factor_ridge("film", samples=10, learning_rate=0.5)
    assert [table.optimizer.learning_rate for table in model.collection.tables] == [0.5]
    assert SGD not in {type(table.optimizer) for table in model.collection.tables}


def test_examples():
    assert doctest.testmod(factor_model).failed == 0

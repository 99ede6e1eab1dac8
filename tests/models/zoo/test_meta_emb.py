"""MetaEmb: its loss in plain NumPy, gradients by finite differences, and what generated rows are worth."""

import doctest
import importlib

import numpy as np
import pytest
import tensorflow as tf

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel
from gmeta.models.zoo.dlrm_model import dlrm
from gmeta.models.zoo.meta_emb import GENERATED, MetaEmb
from support.drawn_batches import alone, dataset, task_batch

IDS = {"ad": 50, "category": 6, "user": 5}
FEATURES = [
    FeatureConfig("ad", TableConfig("ad", 3, initializer=Normal(0.0, 0.5))),
    FeatureConfig("category", TableConfig("category", 4, initializer=Normal(0.0, 1.0))),
    FeatureConfig("user", TableConfig("user", 2, initializer=Normal(0.0, 0.5))),
]


def make_base(layers=None):
    network = MLP(layers or {"out": 1})
    model = MetaModel(EmbeddingCollection(FEATURES), network, inner=InnerLoop(steps=0), outer_samples="all")
    model.compile("adam", "mse")
    return model


def make_model(base=None, steps=1, rate=0.3, **options):
    inner = InnerLoop(steps=steps, learning_rate=rate)
    model = MetaEmb(base or make_base(), "ad", attributes=["category"], inner=inner, seed=3, **options)
    model.compile(tf.keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    return model


def item_batch(sizes, query=3, seed=0, pad=0):
    """Tasks that are ads: a task's samples have one ad and one category."""
    batch = task_batch(sizes, query, ids=IDS, seed=seed, pad=pad)
    whole, rng = np.asarray(sizes) + query, np.random.default_rng(seed)
    for name in ("ad", "category"):
        batch["features"][name] = tf.constant(np.repeat(rng.integers(0, IDS[name], len(sizes)), whole))
    return batch


def rows_of(batch, part, task):
    real = batch[part]["mask"][task].numpy() > 0
    return batch[part]["index"][task].numpy()[real]


@pytest.mark.parametrize("cold_weight", [0.0, 0.1, 1.0])
def test_the_loss_equals_algorithm_1(cold_weight):
    model, batch = make_model(cold_weight=cold_weight), item_batch([3, 1, 4], pad=2)
    kernel, bias = (variable.numpy() for variable in model.network.network.weights)
    vectors = model.collection.concat(model.collection.lookup(batch["features"], insert=False)).numpy()
    labels, losses = batch["label"].numpy(), []

    def step(row, rows):
        """Mean loss of an ad's samples with a row for its id, and the gradient of that row."""
        x = np.concatenate([np.tile(row, (len(rows), 1)), vectors[rows][:, 3:]], axis=1)
        error = (x @ kernel + bias)[:, 0] - labels[rows]
        return (error**2).mean(), (2 * error[:, None] * kernel[:3, 0]).mean(axis=0)

    for task in range(3):
        support, query = (rows_of(batch, part, task) for part in ("support", "query"))
        row = 0.2 * np.tanh(vectors[support[0]][3:7] @ model.generator.weights[0].numpy())
        cold, slope = step(row, support)
        warm, _ = step(row - 0.3 * slope, query)
        losses.append(cold_weight * cold + (1 - cold_weight) * warm)
    np.testing.assert_allclose(model.compute_gradients(batch).loss, np.mean(losses), rtol=1e-5)


@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_match_finite_differences(steps):
    """In float32, as tables are; the loss is smooth, so its third derivative sets the error."""
    model, batch = make_model(steps=steps), item_batch([3, 2])
    (kernel,), (gradient,) = model.trainable_variables, model.compute_gradients(batch).dense
    nudge = tf.constant(np.random.default_rng(1).choice([-0.02, 0.02], kernel.shape), tf.float32)
    kernel.assign_add(nudge)
    up = model.compute_gradients(batch).loss
    kernel.assign_sub(2 * nudge)
    slope = (up - model.compute_gradients(batch).loss) / 2
    np.testing.assert_allclose(slope, tf.reduce_sum(gradient * nudge), rtol=1e-2)


def test_tasks_do_not_depend_on_neighbours_or_padding():
    model, batch = make_model(steps=2), item_batch([3, 1, 5], pad=4)
    together = model(batch)
    for task in range(3):
        np.testing.assert_allclose(model(alone(batch, task))[0], together[task], rtol=1e-5, atol=1e-6)


def test_generated_rows_are_those_that_tasks_start_from():
    model, batch = make_model(), item_batch([3, 2])
    categories = tf.stack([batch["features"]["category"][rows_of(batch, "query", t)[0]] for t in (0, 1)])
    view = model.learner.view(batch, model.collection.lookup(batch["features"], insert=False))
    np.testing.assert_allclose(
        model.generate({"category": categories}), model.learner.start_weights(view)[GENERATED]
    )


def preference(batch):
    """Users like an ad by the hidden quality of its category, which an ad's trained row would say."""
    hidden = np.array([-1.0, 0.9, -0.5, 0.4, 1.0, -0.8])
    return {**batch, "label": tf.constant(hidden[batch["features"]["category"].numpy()], tf.float32)}


@pytest.mark.shown_by("test_gradients_match_finite_differences")
def test_new_ads_are_predicted_cold_and_better_warm():
    base = make_base()
    kernel, bias = base.network.weights  # a base that has learnt to trust the ad's row alone
    kernel.assign([[1.0], [-0.5], [0.7], *[[0.0]] * 6])
    bias.assign([0.0])
    test = [preference(item_batch([4] * 8, seed=100 + n)) for n in range(3)]
    before = np.mean([base.test_step(batch)["loss"] for batch in test])
    model = make_model(base, rate=0.1, scale=1.0)
    model.fit(dataset([preference(item_batch([4] * 8, seed=n)) for n in range(20)]), epochs=5, verbose=0)
    errors = {0: [], 1: []}
    for batch in test:
        labels = tf.gather(batch["label"], batch["query"]["index"])
        for steps, found in model.predict_after(batch, [0, 1]).items():
            errors[steps].append(float(tf.reduce_mean((found - labels) ** 2)))
    assert before > 0.5
    assert np.mean(errors[0]) < 0.1
    assert np.mean(errors[1]) < np.mean(errors[0])


def test_nothing_but_the_generator_is_trained():
    base, batch = make_base({"fc": 4, "out": 1}), item_batch([3, 2])
    base.train_step(batch)  # which gives ids their rows
    model = make_model(base)
    weights = [weight.numpy() for weight in base.network.weights]
    tables = [table.export() for table in base.collection.tables]
    before = model.generator.weights[0].numpy()
    model.train_step(batch)
    assert (model.generator.weights[0].numpy() != before).any()
    for weight, kept in zip(base.network.weights, weights, strict=True):
        np.testing.assert_array_equal(weight, kept)
    for table, kept in zip(base.collection.tables, tables, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, tuple(table.export()), tuple(kept))


def test_a_base_of_named_inputs_gets_generated_rows_by_name():
    features = [FeatureConfig(name, TableConfig(name, 4, initializer=Normal(0.0, 1.0))) for name in IDS]
    base = dlrm(features, head="rating")
    model = MetaEmb(base, "ad", attributes=["category"], inner=InnerLoop(learning_rate=0.1))
    batch = item_batch([3, 2])
    lookup = model.collection.lookup(batch["features"], insert=False)
    view = model.learner.view(batch, lookup)
    start = model.learner.start_weights(view)
    vectors = {name: values.numpy() for name, values in model.collection.embed(lookup).items()}
    for task in range(2):
        rows = rows_of(batch, "query", task)
        inputs = {name: values[rows] for name, values in vectors.items()}
        inputs["ad"] = np.tile(start[GENERATED][task], (len(rows), 1))
        expected = base.network({name: tf.constant(each) for name, each in inputs.items()})
        np.testing.assert_allclose(
            model.learner.task_outputs(view, "query", start)[task], expected, rtol=1e-5
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"feature": "film"}, "the model has no film, but ad, category, user"),
        ({"feature": "ad", "attributes": ["price"]}, "the model has no price"),
        ({"feature": "ad", "attributes": ["ad"]}, "must be generated from other features"),
        ({"feature": "ad", "cold_weight": 1.5}, "cold_weight must be from 0 to 1, got 1.5"),
        ({"feature": "ad", "inner": InnerLoop(adapt=["out"])}, "adapts its generated row alone"),
        ({"feature": "ad", "inner": InnerLoop("reptile")}, "by maml, fomaml or meta-sgd"),
        ({"feature": "ad", "inner": "maml"}, "inner must be a gmeta.meta.InnerLoop"),
        (
            {"feature": "ad", "base": tf.keras.Sequential()},
            "base must be a trained MetaModel, got Sequential",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        MetaEmb(**{"base": make_base(), **settings})


def test_a_feature_of_several_ids_tells_no_task():
    features = [FeatureConfig("ad", dim=4), FeatureConfig("tags", dim=4, combiner="mean")]
    base = MetaModel(EmbeddingCollection(features), MLP({"out": 1}))
    with pytest.raises(ConfigError, match="'tags' has several ids per sample"):
        MetaEmb(base, "tags")


def test_a_base_that_reads_more_than_vectors_is_refused():
    base = dlrm([FeatureConfig("ad", dim=4), FeatureConfig("user", dim=4)], floats=["price"])
    with pytest.raises(ConfigError, match="and nothing else, but takes ad, user, price"):
        MetaEmb(base, "ad")


def test_one_ad_is_warmed_up_by_its_first_samples():
    model, batch = make_model(steps=2), item_batch([4])
    support, query = (rows_of(batch, part, 0) for part in ("support", "query"))
    x = [{n: tf.gather(ids, rows) for n, ids in batch["features"].items()} for rows in (support, query)]
    fast = model.adapt(x[0], tf.gather(batch["label"], support))
    expected = model.predict_after(batch, [0, 2])
    np.testing.assert_allclose(model.predict(x[1], weights=fast), expected[2][0], rtol=1e-5)
    np.testing.assert_allclose(model.predict(x[1]), expected[0][0], rtol=1e-5)  # cold
    assert fast.deltas[GENERATED].shape == (3,)


def test_a_learned_rate_is_trained_too():
    model = MetaEmb(make_base(), "ad", attributes=["category"], inner=InnerLoop("meta-sgd"))
    model.compile("adam", "mse", run_eagerly=True)
    (rate,) = (v for v in model.trainable_variables if "generated" in v.name)
    before = rate.numpy()
    model.train_step(item_batch([3, 2]))
    assert (rate.numpy() != before).all()


def test_a_keras_file_holds_it_whole(tmp_path):
    model, batch = make_model(), item_batch([3, 2])
    model.train_step(batch)
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(tf.keras.models.load_model(tmp_path / "model.keras")(batch), model(batch))


def test_examples():
    names = {"meta": meta, "EmbeddingCollection": EmbeddingCollection, "MLP": MLP}
    module = importlib.import_module("gmeta.models.zoo.meta_emb")
    assert doctest.testmod(module, extraglobs={**names, "FeatureConfig": FeatureConfig}).failed == 0

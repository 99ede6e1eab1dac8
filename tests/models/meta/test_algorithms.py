"""What each algorithm adapts and by what it learns, through tables and Keras."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import Adam, InnerLoop
from gmeta.metrics import NDCG
from gmeta.models import MetaModel
from gmeta.optimizers import SGD
from support.cells import slow_but
from support.drawn_batches import drawn_alone as alone
from support.drawn_batches import make_batch

INNER = {
    "maml": InnerLoop(steps=2, learning_rate=0.05),
    "fomaml": InnerLoop("fomaml", steps=2, learning_rate=0.05),
    "anil": InnerLoop("anil", steps=2, learning_rate=0.05),
    "boil": InnerLoop("boil", steps=2, learning_rate=0.05),
    "meta-sgd": InnerLoop("meta-sgd", steps=2, learning_rate=0.05, adapt="all"),
    "reptile": InnerLoop("reptile", steps=3, learning_rate=0.05),
    "all": InnerLoop(steps=2, learning_rate=0.05, adapt="all"),
    "embeddings": InnerLoop(steps=2, learning_rate=0.05, adapt=["embeddings"]),
    "adam": InnerLoop(steps=2, learning_rate=0.01, adapt="all", optimizer=Adam(), clip_norm=5.0),
    "ridge": InnerLoop("ridge"),
    "ridge all": InnerLoop("ridge", steps=2, learning_rate=0.05, adapt="all"),
    "recompute": InnerLoop(steps=2, learning_rate=0.05, adapt="all", recompute=True),
    "recompute layers": InnerLoop("meta-sgd", steps=2, learning_rate=0.05, recompute=True),
}


def make_model(inner, reduction="sample", **compiled):
    start = Normal(0.0, 1.0)
    features = [
        FeatureConfig("user", TableConfig("user", 4, initializer=start)),
        FeatureConfig("item", TableConfig("item", 3, initializer=start)),  # a table of its own
        FeatureConfig("tags", TableConfig("tags", 4, initializer=start), combiner="mean"),
    ]
    model = MetaModel(
        EmbeddingCollection(features, optimizer=SGD(learning_rate=None)),
        MLP({"fc": 6, "out": 1}, seed=3),
        inner=inner,
        reduction=reduction,
    )
    compiled.setdefault("metrics", ["mae"])
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", **compiled)
    return model


def tagged(batch):
    rows = len(batch["label"])
    lengths = np.arange(rows) % 3
    tags = tf.RaggedTensor.from_row_lengths(np.arange(lengths.sum()) % 5, lengths)
    return {**batch, "features": {**batch["features"], "tags": tags}}


def task_of(batch, task):
    """One task as a batch of its own, ragged feature and all."""
    one = alone({**batch, "features": {n: batch["features"][n] for n in ("user", "item")}}, task)
    real = batch["support"]["mask"][task] > 0
    index = tf.concat([batch["support"]["index"][task][real], batch["query"]["index"][task]], axis=0)
    return {**one, "features": {**one["features"], "tags": tf.gather(batch["features"]["tags"], index)}}


def by_key(model, batch):
    """The outer loss, dense gradients, and row gradients of all tables by key."""
    outer = model.compute_gradients(batch)
    rows = {
        (model.collection.tables.index(each.of), int(key)): gradient
        for each in outer.lookups.named(outer.rows)
        for key, gradient in zip(each.keys().numpy(), each.values.numpy(), strict=True)
    }
    return float(outer.loss), outer.dense, rows


@functools.cache
def each_alone(name):
    """Of each task as a batch of its own, whose mean over samples is that over tasks."""
    model, batch = make_model(INNER[name]), tagged(make_batch([3, 1, 4], pad=2))
    return [by_key(model, task_of(batch, task)) for task in range(3)]


# Quick: every loop with a mean over samples, and one with that over tasks.
@pytest.mark.parametrize(
    ("name", "reduction"),
    slow_but(
        lambda name, reduction: reduction == "sample" or name == "maml",
        itertools.product(INNER, ["sample", "task"]),
    ),
)
@pytest.mark.shown_by(case="all-sample")
def test_many_tasks_are_the_mean_of_each_alone(name, reduction):
    batch = tagged(make_batch([3, 1, 4], pad=2))
    loss, dense, rows = by_key(make_model(INNER[name], reduction), batch)
    parts = each_alone(name)
    # Reptile learns from all samples of a task, the others from its two query samples.
    sizes = np.array([5, 3, 6]) if name == "reptile" and reduction == "sample" else np.ones(3)
    share = sizes / sizes.sum()
    if name != "reptile":
        np.testing.assert_allclose(loss, np.dot(share, [part[0] for part in parts]), rtol=1e-5)
    for k, gradient in enumerate(dense):
        alone_ = [part[1][k] for part in parts]
        if gradient is None:
            assert alone_ == [None] * 3
            continue
        expected = sum(weight * part for weight, part in zip(share, alone_, strict=True))
        np.testing.assert_allclose(gradient, expected, rtol=2e-4, atol=2e-6)
    expected = {}
    for weight, part in zip(share, parts, strict=True):
        for key, gradient in part[2].items():
            expected[key] = expected.get(key, 0) + weight * gradient
    assert rows.keys() == expected.keys()
    for key, gradient in expected.items():
        np.testing.assert_allclose(rows[key], gradient, rtol=2e-4, atol=2e-6)


ADAPTED = {
    "maml": {"fc/kernel", "fc/bias", "out/kernel", "out/bias"},
    "anil": {"out/kernel", "out/bias"},
    "boil": {"fc/kernel", "fc/bias"},
    "embeddings": {"embeddings/user+tags", "embeddings/item"},
    "all": {"fc/kernel", "fc/bias", "out/kernel", "out/bias", "embeddings/user+tags", "embeddings/item"},
}


@pytest.mark.parametrize("name", ADAPTED)
def test_what_an_algorithm_adapts(name):
    model, batch = make_model(INNER[name]), tagged(make_batch([3, 2]))
    view = model.learner.view(batch, model.collection.lookup(batch["features"], insert=False))
    before = model.learner.adapt(view, steps=0).parameters
    after = model.learner.adapt(view, steps=1).parameters
    assert {key for key in after if np.any(after[key] - before[key])} == ADAPTED[name]


def test_overlapping_rows_are_adapted_and_the_others_are_as_prefetched():
    model, batch = make_model(INNER["embeddings"]), tagged(make_batch([3, 2], query=3))
    lookup = model.collection.lookup(batch["features"], insert=False)
    view = model.learner.view(batch, lookup)
    rows = model.learner.adapt(view, steps=2).parameters["embeddings/item"]
    owners, sources = view.copies.owners[1].numpy(), view.copies.sources[1].numpy()
    item = batch["features"]["item"].numpy()
    keys = lookup.keys[1].numpy()
    seen, moved = 0, 0
    for copy, owner, source in zip(rows.numpy(), owners, sources, strict=True):
        support = item[batch["support"]["index"][owner].numpy()[batch["support"]["mask"][owner].numpy() > 0]]
        fetched = lookup.rows[1].numpy()[source]
        if keys[source] in support:
            moved += 1
            assert np.abs(copy - fetched).max() > 1e-4
        else:
            seen += 1
            np.testing.assert_array_equal(copy, fetched)
    assert seen > 0
    assert moved > 0


def two_lookup_maml(model, batch):
    """MAML with adapted rows as it is written without a joint lookup: each task looks up support, adapts
    a dictionary of rows, then looks up the query, whose rows it replaces where it has adapted them."""
    collection, network = model.collection, model.network
    weights = {name: tf.convert_to_tensor(v) for name, v in network.task_weights().items()}
    total, count = 0.0, 0
    for task in range(len(batch["task"])):
        one = task_of(batch, task)
        parts = {}
        for part in ("support", "query"):
            index = one[part]["index"][0]
            ids = {name: tf.gather(values, index) for name, values in one["features"].items()}
            parts[part] = collection.lookup(ids, insert=False), tf.gather(one["label"], index)
        support, labels = parts["support"]
        rows, own = [tf.identity(r) for r in support.rows], dict(weights)
        for _ in range(model.inner.steps):
            with tf.GradientTape() as tape:
                tape.watch((rows, own))
                x = collection.concat(support._replace(rows=tuple(rows)))
                loss = tf.reduce_mean((network(x[None], own)[0, :, 0] - labels) ** 2)
            of_rows, of_own = tape.gradient(loss, (rows, own))
            rows = [r - 0.05 * tf.convert_to_tensor(g) for r, g in zip(rows, of_rows, strict=True)]
            own = {name: value - 0.05 * of_own[name] for name, value in own.items()}
        query, labels = parts["query"]
        merged = []
        for table, fetched in enumerate(query.rows):
            known = {int(key): row for key, row in zip(support.keys[table].numpy(), rows[table], strict=True)}
            merged.append(
                np.stack(
                    [known.get(int(k), r) for k, r in zip(query.keys[table].numpy(), fetched, strict=True)]
                )
            )
        x = collection.concat(query._replace(rows=tuple(map(tf.constant, merged))))
        total += float(tf.reduce_sum((network(x[None], own)[0, :, 0] - labels) ** 2))
        count += len(labels)
    return total / count


def test_one_joint_lookup_is_exactly_maml_with_two():
    model, batch = make_model(INNER["all"]), tagged(make_batch([3, 1, 4], query=3))
    outer = model.compute_gradients(batch)
    np.testing.assert_allclose(outer.loss, two_lookup_maml(model, batch), rtol=1e-5)


def test_reptile_with_one_step_is_joint_training():
    model = make_model(InnerLoop("reptile", steps=1, learning_rate=0.05))
    batch = tagged(make_batch([3, 2]))
    _, dense, rows = by_key(model, batch)
    joint = MetaModel(model.collection, model.network, inner=InnerLoop(steps=0), outer_samples="all")
    joint.compile("sgd", "mse")
    _, expected, expected_rows = by_key(joint, batch)
    for ours, theirs in zip(dense, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)  # a difference of weights, over 0.05
    for key, gradient in expected_rows.items():
        np.testing.assert_allclose(rows[key], gradient, rtol=1e-3, atol=1e-5)


def test_an_epochs_loss_is_the_mean_over_query_samples_for_reptile_too():
    model = make_model(INNER["reptile"])
    model.optimizer.learning_rate = 0.0
    batches = [tagged(make_batch([9, 8])), tagged(make_batch([1], query=5, seed=1))]  # 4 and 5 query samples
    losses = [float(model.compute_gradients(batch).loss) for batch in batches]
    model.reset_metrics()
    for batch in batches:
        logs = model.train_step(batch)
    np.testing.assert_allclose(logs["loss"], np.average(losses, weights=[4, 5]), rtol=1e-5)


def test_meta_sgd_learns_a_rate_of_each_number():
    model, batch = make_model(INNER["meta-sgd"], run_eagerly=True), tagged(make_batch([3, 2]))
    rates = model.inner_rates.trainable_variables
    assert sorted(tuple(rate.shape) for rate in rates) == [(1,), (3,), (4,), (6,), (6, 1), (11, 6)]
    model.fit(tf.data.Dataset.from_tensors(batch), epochs=2, verbose=0)
    assert all(float(tf.reduce_max(tf.abs(rate - 0.05))) > 1e-7 for rate in rates)
    by_layer = make_model(InnerLoop(learn_learning_rate="layer", learning_rate=0.05, adapt="all"))
    assert sorted(v.name for v in by_layer.inner_rates.trainable_variables) == [
        "rate/embeddings/item:0",
        "rate/embeddings/user.tags:0",
        "rate/fc:0",
        "rate/out:0",
    ]


def test_compile_takes_an_inner_loop_and_metrics_of_tasks():
    batch = tagged(make_batch([3, 2], query=3))
    positive = {**batch, "label": tf.abs(batch["label"])}
    model = make_model(INNER["anil"])
    model.compile("adam", "mse", ["mae", NDCG(2)], inner=InnerLoop(steps=1, evaluation_steps=3))
    logs = model.evaluate(tf.data.Dataset.from_tensors(positive), verbose=0, return_dict=True)
    metric = NDCG(2)
    predictions = model.predict_after(positive, [0, 3])
    metric.update_state(tf.gather(positive["label"], positive["query"]["index"]), predictions[3])
    np.testing.assert_allclose(logs[metric.name], metric.result(), rtol=1e-6)
    np.testing.assert_allclose(predictions[3], model(positive), rtol=1e-6)
    assert not np.allclose(predictions[0], predictions[3])


def test_a_reduction_that_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="'batch'"):
        make_model(InnerLoop(), reduction="batch")

"""Heads that adapt to users over a trunk that is computed once: against loops over users, step by step."""

import numpy as np
import pytest
import tensorflow as tf

import gmeta
from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import GRM, MetaGRM
from gmeta.optimizers import SGD
from support.drawn_batches import draw_exposures, of_user

RATE = 0.3
EVENTS, EXPOSURES = [4, 0, 5], [4, 3, 1]


def make_model(inner=None, report=None, sparse="auto", **settings):
    features = [
        FeatureConfig(n, TableConfig(n, 4, initializer=Normal(0.0, 0.5)))
        for n in ("item", "category", "action", "city")
    ]
    base = GRM.of(
        features,
        contexts=["city"],
        history=["item", "category", "action"],
        targets=["item", "category"],
        time="time",
        dim=4,
        blocks=1,
        max_length=5,
        by_time=True,
        experts=3,
        expert_units=[4],
        top_k=2,
        sparse=sparse,
        tower_units=[3],
        weights={"ctcvr": 2.0},
        optimizer=SGD(0.1),
        report=report,
    )
    inner = inner or InnerLoop(steps=2, learning_rate=RATE, adapt=["mixture", "heads"])
    model = MetaGRM(base, inner=inner, **settings)
    model.compile("sgd", run_eagerly=True)  # a few batches cost less than their graphs
    return model


def by_hand(model, batch, steps, tape=None):
    """The outer loss, the query logits and the lookups: one user after another, in float64.

    The trunk sees each user alone; heads are the layers' equations, with the weights that they are given.
    """
    total, count, outputs, lookups = 0.0, 0, [], []
    for user in range(len(EVENTS)):
        own = of_user(batch, user)
        lookups.append(model.collection.lookup(model.learner.columns.ids(own), insert=False))
        if tape is not None:
            tape.watch(lookups[-1].rows)
        hidden = model.trunk(model.collection.embed(lookups[-1]), model.learner.columns.layout(own))
        hidden = tf.cast(hidden, tf.float64)
        labels = tf.stack([own["labels"][n].values for n in ("click", "buy")], axis=-1)
        labels = tf.cast(labels, tf.float64)
        weights = {
            name: tf.cast(variable, tf.float64) for name, variable in model.learner.adapted_weights().items()
        }
        split = len(hidden) - half(len(hidden))
        for _ in range(steps if split else 0):
            with tf.GradientTape() as inner:
                inner.watch(weights)
                loss = tf.reduce_mean(losses(labels[:split], heads(hidden[:split], weights)))
            found = inner.gradient(loss, weights)
            weights = {n: w - RATE * found[n] for n, w in weights.items()}
        outputs.append(heads(hidden[split:], weights))
        total += tf.reduce_sum(losses(labels[split:], outputs[-1]))
        count += len(hidden) - split
    return total / count, outputs, lookups


def heads(x, weights):
    """MMoE with the two strongest gates, and a tower for each task."""
    kernels = [name for name in weights if name.startswith("mixture/") and "kernel" in name]
    gate, experts = (weights[name] for name in kernels)
    bias = next(w for name, w in weights.items() if name.startswith("mixture/") and "bias" in name)
    logits = tf.reshape(x @ gate, [-1, 2, 3])
    strongest = logits >= tf.sort(logits, axis=-1)[..., 1:2]
    gates = tf.nn.softmax(tf.where(strongest, logits, tf.constant(-np.inf, tf.float64)))
    made = tf.nn.relu(tf.einsum("nd,edh->neh", x, experts) + bias)
    found = []
    for number, task in enumerate(("ctr", "cvr")):
        y = tf.einsum("ne,neh->nh", gates[:, number], made)
        k1, b1, k2, b2 = (weights[f"heads/{task}/{n}"] for n in ("kernel", "bias", "kernel_1", "bias_1"))
        found.append((tf.nn.relu(y @ k1 + b1) @ k2 + b2)[:, 0])
    return tf.stack(found, axis=-1)


def losses(labels, logits):
    click, buy = (tf.sigmoid(logits[:, n]) for n in range(2))
    found = 0.0
    for weight, p, y in ((1, click, labels[:, 0]), (2, click * buy, labels[:, 1])):
        found -= weight * (y * tf.math.log(p) + (1 - y) * tf.math.log(1 - p))
    return found


def half(n):
    return min(max(int(np.floor(n / 2 + 0.5)), 1), max(n - 1, 1))


def by_key(lookups, gradients):
    """Key -> the sum of its rows' gradients."""
    found = {}
    for lookup, of_tables in zip(lookups, gradients, strict=True):
        for table, (keys, gradient) in enumerate(zip(lookup.keys, of_tables, strict=True)):
            for key, own in zip(keys.numpy(), tf.convert_to_tensor(gradient).numpy(), strict=True):
                found[table, key] = found.get((table, key), 0) + own
    return found


def test_second_order_gradients_of_trunk_heads_and_rows_are_those_of_users_one_by_one():
    model, batch = make_model(), draw_exposures(4, EVENTS, EXPOSURES)
    outer, variables = model.compute_gradients(batch), model.trainable_variables
    with tf.GradientTape(persistent=True) as tape:
        loss, _, lookups = by_hand(model, batch, 2, tape)
    np.testing.assert_allclose(outer.loss, loss, rtol=1e-5)
    expected = tape.gradient(loss, variables)
    for variable, got, gradient in zip(variables, outer.dense, expected, strict=True):
        assert np.any(gradient), variable.name
        np.testing.assert_allclose(got, gradient, rtol=2e-3, atol=2e-6, err_msg=variable.name)
    rows = by_key(lookups, [tape.gradient(loss, each.rows) for each in lookups])
    lookup = model.collection.lookup(model.ranker.ids(batch), insert=False)
    for key, got in by_key([lookup], [outer.rows]).items():
        np.testing.assert_allclose(got, rows[key], rtol=2e-3, atol=2e-6)
    # Not those of first order, which takes the inner gradients for constants.
    first = make_model(InnerLoop(steps=2, learning_rate=RATE, adapt=["mixture", "heads"], order=1))
    other = first.compute_gradients(batch).dense
    assert any(not np.allclose(a, b, rtol=2e-2) for a, b in zip(outer.dense, other, strict=True))


def test_the_trunk_is_computed_once_whatever_the_steps(monkeypatch):
    model, batch, calls = make_model(), draw_exposures(4, EVENTS, EXPOSURES), []
    call = model.trunk.call
    monkeypatch.setattr(
        model.trunk, "call", lambda *args, **kwargs: calls.append(args) or call(*args, **kwargs)
    )
    model.train_step(batch)
    assert len(calls) == 1
    after = model.predict_after(batch, [0, 1, 2])
    assert len(calls) == 2
    lengths = [half(n) for n in EXPOSURES]
    for steps, found in after.items():
        _, outputs, _ = by_hand(model, batch, steps)
        for user, length in enumerate(lengths):
            np.testing.assert_allclose(found[user, :length], outputs[user], rtol=1e-4, atol=1e-5)
    # Before the first step it is the ranker.
    whole = model.ranker(batch)
    for task, logits in model.by_label(after[0]).items():
        for user, length in enumerate(lengths):
            np.testing.assert_allclose(
                logits[user, :length], whole[task][user, -length:], rtol=1e-4, atol=1e-5
            )


def test_it_is_fitted_measured_and_saved(tmp_path):
    model = make_model(
        InnerLoop(steps=1, learning_rate=RATE, adapt=["heads/ctr"], evaluation_steps=2), query=2
    )
    assert {name.rpartition("/")[0] for name in model.learner.adapted_weights()} == {"heads/ctr"}
    batch = draw_exposures(4, EVENTS, EXPOSURES)
    data = tf.data.Dataset.from_tensors(batch)
    before = model.predict_after(batch, [2])[2]
    model.fit(data.repeat(5), verbose=0)
    assert not np.allclose(model.predict_after(batch, [2])[2], before)
    model.reset_metrics()
    measured = model.test_step(batch)
    assert {"loss", "gauc_ctr", "gauc_ctcvr"} == set(measured)
    tasks = model.learner.tasks_of(batch)
    assert tasks["query"]["mask"].numpy().sum(axis=1).tolist() == [2, 2, 1]
    labels, mask = tf.gather(tasks["label"], tasks["query"]["index"]), tasks["query"]["mask"]
    logits = model.predict_after(batch, [2])[2]
    expected = tf.boolean_mask(model.learner.exposure_losses(labels, logits), mask > 0)
    assert float(measured["loss"]) == pytest.approx(np.mean(expected), rel=1e-5)
    model.save(tmp_path / "model.keras")
    other = tf.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(other.predict_after(batch, [2])[2], logits)
    assert float(other.train_step(batch)["loss"]) > 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"report": "tasks"}, "report=None"),
        ({"sparse": True}, "make it with sparse='auto'"),
        ({"query": 1.5}, "share above 0 and below 1"),
        ({"inner": InnerLoop(adapt=["mixture", "embeddings"])}, "rows can't adapt"),
        ({"inner": InnerLoop("reptile", adapt=["mixture"])}, "Reptile doesn't differentiate"),
        ({"inner": InnerLoop(adapt=["trunk"])}, "layers with weights are mixture, heads/ctr, heads/cvr"),
    ],
)
def test_what_it_is_not_for_is_told(settings, told):
    with pytest.raises(ConfigError, match=told):
        make_model(**settings)


def test_it_has_no_methods_that_only_refuse():
    """A user's support is its sequence, and no samples by themselves: `predict_after` adapts to those."""
    assert not hasattr(MetaGRM, "adapt")
    assert not hasattr(MetaGRM, "adapt_many")


def test_a_loss_or_metrics_are_refused():
    model = make_model()
    with pytest.raises(ConfigError, match="those of the ranker"):
        model.compile("adam", loss="mse")


# Quick: tests/models/training/test_windows.py,
# test_a_step_of_micro_batches_is_the_step_of_the_batch[maml-2-1].
@pytest.mark.slow
def test_micro_batches_of_users_make_the_step_of_all():
    learnt = []
    for pipeline in (None, gmeta.Pipeline(depth=1, micro_batches=2)):
        tf.random.set_seed(2)
        model = make_model(InnerLoop(steps=1, learning_rate=RATE, adapt=["mixture", "heads"]))
        model.compile("sgd", pipeline=pipeline)
        data = tf.data.Dataset.from_tensors(draw_exposures(4, EVENTS, EXPOSURES))
        losses = model.fit(data.repeat(3), verbose=0).history["loss"]
        learnt.append([*(weight.numpy() for weight in model.weights), losses])
    for one, other in zip(*learnt, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_micro_batches_of_a_batch_that_is_no_data_set_are_refused():
    model = make_model(InnerLoop(steps=1, learning_rate=RATE, adapt=["mixture", "heads"]))
    model.compile("sgd", pipeline=gmeta.Pipeline(depth=1, micro_batches=2))
    with pytest.raises(ConfigError, match="micro_batches can't divide layout of a batch of tasks"):
        model.train_on_batch(draw_exposures(4, EVENTS, EXPOSURES))

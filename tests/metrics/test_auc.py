"""The exact AUC, pooled and of users: its numbers, and that batches, padding and order don't change them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.metrics import AUC, GAUC, UserGAUC
from gmeta.models import Model

ROW = st.tuples(
    st.integers(-1, 2),  # user
    st.sampled_from([0.0, 1.0]),  # label
    st.sampled_from([-0.5, 0.0, 0.25, 3.0]),  # score; few, so that ties are the rule
    st.sampled_from([0.0, 1.0, 2.5]),  # weight
)


def pairwise(rows):
    """The definition: of each pair of a positive and a negative, who is scored higher."""
    won = total = 0.0
    for _, label, score, weight in rows:
        for _, other, lower, its in rows:
            if label > other:
                won += weight * its * (1.0 if score > lower else 0.5 if score == lower else 0.0)
                total += weight * its
    return won / total if total else math.nan


def by_user(rows):
    found = []
    for user in {row[0] for row in rows}:
        own = [row for row in rows if row[0] == user]
        found.append((pairwise(own), sum(row[3] for row in own)))
    found = [(value, weight) for value, weight in found if not math.isnan(value)]
    return sum(v * w for v, w in found) / sum(w for _, w in found) if found else math.nan


def update(metric, rows):
    users, labels, scores, weights = np.array(rows, np.float64).reshape(-1, 4).T
    labels, scores = np.where(weights > 0, labels, math.nan), np.where(weights > 0, scores, math.nan)
    if isinstance(metric, UserGAUC):
        metric.update_state(labels, scores, users.astype(np.int64), sample_weight=weights)
    else:
        metric.update_state(labels, scores, sample_weight=weights)


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(ROW, max_size=12), cut=st.integers(0, 12))
def test_results_equal_their_definitions_in_any_batches(rows, cut):
    for metric, definition in ((AUC(), pairwise), (UserGAUC(), by_user)):
        update(metric, rows[:cut])
        update(metric, rows[cut:])
        assert float(metric.result()) == pytest.approx(definition(rows), rel=1e-12, nan_ok=True)


def test_it_tells_apart_what_bins_cannot():
    labels = np.tile([1.0, 0.0], 500)
    scores = 0.5 + np.tile([1e-6, 0.0], 500)
    exact, bins = AUC(), tf.keras.metrics.AUC()
    exact.update_state(labels, scores)
    bins.update_state(labels, scores)
    assert float(exact.result()) == 1
    assert float(bins.result()) == 0.5


def test_users_of_whole_tasks_have_the_gauc_of_tasks():
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(1, 6, (7, 9)), rng.normal(size=(7, 9)).astype(np.float32)
    tasks, users = GAUC(positive=4), UserGAUC(positive=4)
    tasks.update_state(labels, scores, tf.ones([7, 9]))
    order = rng.permutation(63)
    users.update_state(labels.ravel()[order], scores.ravel()[order], np.repeat(range(7), 9)[order])
    assert float(users.result()) == pytest.approx(float(tasks.result()), rel=1e-12)


def test_a_graph_of_open_shapes_appends_and_room_is_reused():
    rng = np.random.default_rng(1)
    metric, whole = AUC(), AUC()
    spec = tf.TensorSpec([None], tf.float32)
    step = tf.function(
        lambda y, s: (metric.update_state(y, s), metric.result())[1], input_signature=[spec] * 2
    )
    for _ in range(2):
        seen = []
        for size in (3, 0, 1, 40, 2):
            seen += [rng.integers(0, 2, size) * 1.0, rng.normal(size=size)]
            found = step(*(tf.constant(x, tf.float32) for x in seen[-2:]))
        whole.update_state(np.concatenate(seen[::2]), np.concatenate(seen[1::2]))
        assert float(found) == float(whole.result())
        assert int(tf.size(metric.columns[0])) <= 2 * 46
        metric.reset_state()
        whole.reset_state()
        assert math.isnan(float(metric.result()))
    assert step.experimental_get_tracing_count() == 1


def test_keras_loops_take_it():
    x, y = np.random.default_rng(2).normal(size=(2, 40, 1))
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[AUC(positive=0.0)])
    measured = model.evaluate(x, y, batch_size=16, verbose=0)[1]
    alone = AUC(positive=0.0)
    alone.update_state(y, model.predict(x, verbose=0))
    assert measured == pytest.approx(float(alone.result()), rel=1e-6)
    assert model.evaluate(x, y, batch_size=16, verbose=0)[1] == measured


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_prediction_that_is_not_finite_is_not_hidden(bad):
    metric = AUC()
    metric.update_state([1.0, 0.0, 0.0], [0.5, 0.1, bad])
    assert math.isnan(float(metric.result()))


@pytest.mark.parametrize("make", [AUC, UserGAUC])
def test_it_is_made_again_from_its_config(make):
    metric = make(positive=4, name="held_out")
    again = tf.keras.metrics.deserialize(tf.keras.metrics.serialize(metric))
    assert type(again) is make
    assert again.get_config() == metric.get_config()


def test_numbers_of_elements_that_differ_are_refused():
    with pytest.raises(ConfigError, match=r"user_gauc: labels, predictions, groups .* got 2, 2, 3, 2"):
        UserGAUC().update_state([1.0, 0.0], [0.1, 0.2], [1, 2, 3])


NAN = [1.0, float("nan"), 0.0]


@pytest.mark.parametrize("make", [AUC, UserGAUC, GAUC])
@pytest.mark.parametrize("wrong", [3.0, -1.0, 0.5])
def test_without_a_threshold_labels_are_zero_or_one(make, wrong):
    labels, scores = [[1.0, 0.0, wrong]], [[0.1, 0.2, 0.3]]
    others = {"users": [1, 1, 1]} if make is UserGAUC else {}
    advice = "make the metric with positive=, the least label that is positive: 4 for ratings of 1 to 5"
    with pytest.raises(ConfigError, match=f"^own: labels must be 0 or 1, got {wrong:g}: {advice}$"):
        make(name="own").update_state(labels, scores, **others)
    metric = make(positive=wrong)
    metric.update_state(labels, scores, **others)
    assert metric.get_config()["positive"] == wrong
    again = make(name="own")
    again.update_state(
        labels, scores, **others, **({"mask" if make is GAUC else "sample_weight": [[1, 1, 0]]})
    )
    assert float(again.result()) == 0.0


@pytest.mark.parametrize("weight", [-1.0, math.nan])
def test_weights_that_are_negative_or_nan_are_refused(weight):
    with pytest.raises(ConfigError, match=f"auc: weights must be at least 0, got {weight:g}"):
        AUC().update_state([1.0, 0.0], [0.1, 0.2], sample_weight=[1.0, weight])


@pytest.mark.parametrize("make", [AUC, UserGAUC])
def test_labels_that_are_nan_are_no_negatives(make):
    metric = make()
    others = {"users": [1, 1, 1]} if make is UserGAUC else {}
    with pytest.raises(ConfigError, match="labels hold NaN, which is of neither class"):
        metric.update_state(NAN, [0.1, 0.2, 0.3], **others)
    metric.update_state(NAN, [0.1, 0.2, 0.3], **others, sample_weight=[1.0, 0.0, 1.0])
    assert float(metric.result()) == 0.0


def test_gauc_of_tasks_refuses_labels_that_are_nan_outside_of_the_padding():
    with pytest.raises(ConfigError, match="labels hold NaN"):
        GAUC().update_state([NAN], [[0.1, 0.2, 0.3]], [[1.0, 1.0, 1.0]])
    GAUC().update_state([NAN], [[0.1, 0.2, 0.3]], [[1.0, 0.0, 1.0]])


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (NAN, "labels hold NaN, which is of neither class"),
        ([1.0, 5.0, 0.0], "labels must be 0 or 1, got 5: m"),
    ],
)
def test_evaluate_names_in_one_line_labels_of_neither_class(labels, told):
    x = tf.keras.Input([1])
    model = Model(x, tf.keras.layers.Dense(1)(x))
    model.compile("sgd", "mse", metrics=[AUC()])
    with pytest.raises(ConfigError, match=f"^auc: {told}") as raised:
        model.evaluate(np.zeros([3, 1]), np.array(labels), verbose=0)
    assert "\n" not in str(raised.value)

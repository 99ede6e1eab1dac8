"""Metrics of whole tasks: their numbers, and that batches, padding and ranks don't change them."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.experiment.results.metrics import ndcg
from gmeta.metrics import GAUC, NDCG
from gmeta.metrics.ranking import TaskMetric

METRICS = [lambda: NDCG(1), lambda: NDCG(3), lambda: GAUC(positive=4)]


@st.composite
def task_lists(draw, min_size=0):
    """Some tasks' labels and predictions; few distinct values, so that ties are the rule."""
    row = st.tuples(st.sampled_from([0.0, 0.5, 1.0, 3.0, 4.0, 5.0]), st.sampled_from([-1.0, 0.5, 2.75, 4.5]))
    return draw(st.lists(st.lists(row, max_size=6), min_size=min_size, max_size=6))


def padded(tasks, width):
    """(labels, predictions, mask), each (tasks, width), with values in the padding that would be noticed."""
    labels, predictions, mask = np.full((3, len(tasks), width), np.nan)
    mask[:] = 0
    for number, rows in enumerate(tasks):
        for place, row in enumerate(rows):
            labels[number, place], predictions[number, place] = row
            mask[number, place] = 1
    return labels, predictions, mask


def of_tasks(metric, tasks, width=6):
    metric.update_state(*padded(tasks, width))
    return float(metric.result())


def pairwise_gauc(tasks, positive):
    """The definition written out: of each pair of a positive and a negative, who is predicted higher."""
    total, weight = 0.0, 0
    for rows in tasks:
        pairs = [
            1.0 if p > q else 0.5 if p == q else 0.0 for r, p in rows for s, q in rows if r >= positive > s
        ]
        if pairs:
            total, weight = total + len(rows) * sum(pairs) / len(pairs), weight + len(rows)
    return total / weight if weight else math.nan


@given(task_lists(), st.integers(1, 7))
def test_ndcg_equals_its_reference(tasks, k):
    labels, predictions = ([row[i] for rows in tasks for row in rows] for i in (0, 1))
    splits = np.cumsum([0, *map(len, tasks)])
    expected = ndcg(labels, predictions, splits, k=k)
    assert of_tasks(NDCG(k), tasks) == pytest.approx(expected, rel=1e-12, nan_ok=True)


@given(task_lists())
def test_gauc_equals_its_definition(tasks):
    expected = pairwise_gauc(tasks, 4)
    assert of_tasks(GAUC(positive=4), tasks) == pytest.approx(expected, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("make", METRICS)
@given(tasks=task_lists(min_size=2), cut=st.integers(0, 6))
@pytest.mark.shown_by(case="<lambda>1")
def test_batches_and_padding_do_not_change_the_result(make, tasks, cut):
    whole = of_tasks(make(), tasks, width=6)
    parts = make()
    parts.update_state(*padded(tasks[:cut], 11))
    parts.update_state(*padded(tasks[cut:], 7))
    assert float(parts.result()) == pytest.approx(whole, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("make", METRICS)
def test_a_graph_of_open_shapes_computes_the_same(make):
    rng = np.random.default_rng(0)
    batches = [
        (rng.integers(1, 6, (t, q)), rng.normal(size=(t, q)), np.ones((t, q))) for t, q in ((7, 9), (3, 4))
    ]
    eager, traced = make(), make()
    dtypes = tf.int64, tf.float32, tf.float32
    spec = [tf.TensorSpec([None, None], dtype) for dtype in dtypes]

    @tf.function(input_signature=spec)
    def update(labels, predictions, mask):
        traced.update_state(labels, predictions, mask)

    for labels, predictions, mask in batches:
        tensors = (
            tf.constant(labels, tf.int64),
            tf.constant(predictions, tf.float32),
            tf.constant(mask, tf.float32),
        )
        eager.update_state(*tensors)
        update(*tensors)
    assert update.experimental_get_tracing_count() == 1
    assert 0 < float(eager.result()) < 1
    assert float(traced.result()) == float(eager.result())


@pytest.mark.parametrize("make", METRICS)
def test_sums_of_ranks_are_those_of_one(make):
    first, second, whole = make(), make(), make()
    tasks = [[(5.0, 1.0), (1.0, 2.0)], [(4.0, 1.0), (3.0, 0.5), (5.0, 0.0)], [(2.0, 2.0), (5.0, 1.0)]]
    of_tasks(first, tasks[:1])
    of_tasks(second, tasks[1:])
    assert {v.aggregation for v in first.variables} == {tf.VariableAggregation.SUM}
    for mine, other in zip(first.variables, second.variables, strict=True):
        mine.assign_add(other)
    assert float(first.result()) == pytest.approx(of_tasks(whole, tasks), rel=1e-12)


@pytest.mark.parametrize("make", METRICS)
def test_it_is_made_again_from_its_config(make):
    metric = make()
    again = tf.keras.metrics.deserialize(tf.keras.metrics.serialize(metric))
    assert type(again) is type(metric)
    assert again.get_config() == metric.get_config()
    assert again.name == metric.name


@pytest.mark.parametrize("make", METRICS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_prediction_that_is_not_finite_is_not_hidden(make, bad):
    metric = make()
    of_tasks(metric, [[(5.0, 1.0), (1.0, 2.0)], [(5.0, bad)]])
    assert math.isnan(of_tasks(metric, [[(5.0, 1.0), (1.0, 2.0)]]))
    metric.reset_state()
    assert of_tasks(metric, [[(5.0, 2.0), (1.0, 1.0)]]) == 1


@pytest.mark.parametrize("rating", [-1.0, 1000.0, math.nan])
def test_ndcg_refuses_what_is_no_rating(rating):
    with pytest.raises(
        ConfigError, match=f"ndcg@2: labels must be at least 0 and below 1000, got {rating:g}: "
    ):
        of_tasks(NDCG(2), [[(5.0, 1.0), (rating, 2.0)]])


def test_a_weight_in_the_mask_marks_a_sample_as_real():
    metric = NDCG(1)
    metric.update_state([[1.0, 5.0, 3.0]], [[0.1, 0.2, 0.9]], [[0.25, 3.0, 0.0]])
    assert float(metric.result()) == 1


def test_a_model_that_knows_no_tasks_is_refused():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[NDCG(3)], run_eagerly=True)
    with pytest.raises(ConfigError, match="ndcg@3: NDCG measures whole tasks"):
        model.fit(np.ones((4, 2)), np.ones(4), verbose=0)


def test_outputs_side_by_side_are_refused_with_their_shape():
    with pytest.raises(ConfigError, match=r"must each be \(tasks, samples\), got \(2, 3, 2\)"):
        GAUC().update_state(np.ones((2, 3, 2)), np.ones((2, 3, 2)), np.ones((2, 3)))


def test_k_below_one_is_refused():
    with pytest.raises(ConfigError, match="k must be a whole number from 1 on, got 0"):
        NDCG(0)


def test_a_metric_that_measures_nothing_says_so():
    with pytest.raises(NotImplementedError, match="define task_values"):
        TaskMetric("empty").update_state(np.ones((1, 1)), np.ones((1, 1)))

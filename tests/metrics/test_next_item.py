"""Ranks among a whole catalogue, and what is made of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.metrics import NextItem
from gmeta.metrics import next_item as catalogue
from gmeta.metrics.next_item import catalogue_ranks


def ranks_by_counting(queries, items, positives, seen):
    """The definition, item by item."""
    found = []
    for query, positive, had in zip(queries, positives, seen, strict=True):
        scores = [float(query @ item) for item in items]
        others = set(range(len(items))) - {positive, *had}
        found.append(1 + sum(scores[item] >= scores[positive] for item in others))
    return found


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(0, 4),
    size=st.integers(1, 9),
    block=st.integers(1, 10),
    seed=st.integers(0, 99),
    ragged=st.booleans(),
)
def test_ranks_equal_their_definition_for_any_block(n, size, block, seed, ragged):
    rng = np.random.default_rng(seed)
    queries, items = (rng.integers(-1, 2, (k, 2)).astype(np.float32) for k in (n, size))  # ties are the rule
    positives, seen = rng.integers(0, size, n), rng.integers(-1, size, (n, 3))
    given_ = tf.RaggedTensor.from_tensor(seen, padding=-1) if ragged else seen
    expected = ranks_by_counting(queries, items, positives, seen)
    found = catalogue_ranks(queries, items, positives, seen=given_, block=block)
    np.testing.assert_array_equal(found, expected)
    if not ragged:
        np.testing.assert_array_equal(
            catalogue_ranks(queries, items, positives, block=block),
            ranks_by_counting(queries, items, positives, np.full((n, 1), -1)),
        )


def test_a_model_that_cannot_tell_items_apart_has_the_last_rank():
    rng = np.random.default_rng(0)
    items = np.tile(rng.normal(size=33).astype(np.float32), (1001, 1))  # whatever the order of summing
    for block in (7, 64, 8192):
        found = catalogue_ranks(rng.normal(size=(5, 33)), items, [0, 1, 500, 999, 1000], block=block)
        np.testing.assert_array_equal(found, [1001] * 5)


def test_lengths_count_for_nothing_in_cosines():
    items = np.array([[1.0, 0.0], [30.0, 40.0], [0.0, 0.0]])
    query = [[2.0, 0.5]]
    assert catalogue_ranks(query, items, [0]).numpy() == 2
    assert catalogue_ranks(query, items, [0], normalize=True).numpy() == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_has_rank_0(bad):
    items = np.ones((5, 2))
    np.testing.assert_array_equal(catalogue_ranks([[1.0, bad], [1.0, 2.0]], items, [4, 4], block=2), [0, 5])
    items[1] = bad
    np.testing.assert_array_equal(catalogue_ranks([[1.0, 2.0]], items, [4], block=2), [0])


def test_no_more_than_a_block_is_scored_at_once_and_a_graph_does_the_same(monkeypatch):
    rng = np.random.default_rng(1)
    queries, items, positives = rng.normal(size=(3, 4)), tf.Variable(rng.normal(size=(50, 4))), [4, 9, 49]
    eager = catalogue_ranks(queries, items, positives, block=8)
    scored, matmul = [], tf.matmul
    monkeypatch.setattr(
        catalogue.tf, "matmul", lambda *args, **how: scored.append(args) or matmul(*args, **how)
    )
    catalogue_ranks(queries, items, positives, block=8)
    assert [len(rows) for _, rows in scored] == [8] * 6 + [2]
    spec = [tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([None], tf.int64)]
    graph = tf.function(lambda q, p: catalogue_ranks(q, items, p, block=8), input_signature=spec)
    np.testing.assert_array_equal(graph(queries, tf.constant(positives, tf.int64)), eager)


def of(ranks, weights=None, ks=(1, 5)):
    metric = NextItem(ks)
    metric.update_state(ranks, weights)
    return {name: float(value) for name, value in metric.result().items()}


def test_results_are_weighted_means_of_the_definitions():
    ranks, weights = np.array([1, 2, 5, 6, 900]), np.array([1.0, 0.5, 2.0, 1.0, 0.0])
    gains, total = 1 / np.log2(ranks + 1), weights.sum()
    expected = {"mrr": (weights / ranks).sum() / total}
    for k in (1, 5):
        expected[f"hr@{k}"] = (weights * (ranks <= k)).sum() / total
        expected[f"ndcg@{k}"] = (weights * (ranks <= k) * gains).sum() / total
    assert of(ranks, weights) == pytest.approx(expected, rel=1e-12)


def test_batches_and_ranks_add_up_to_the_whole():
    first, second = NextItem((3,)), NextItem((3,))
    first.update_state([1, 2])
    first.update_state([9])
    second.update_state([3, 4])
    assert {v.aggregation for v in first.variables} == {tf.VariableAggregation.SUM}
    for mine, other in zip(first.variables, second.variables, strict=True):
        mine.assign_add(other)
    found = {name: float(value) for name, value in first.result().items()}
    assert found == pytest.approx(of([1, 2, 9, 3, 4], ks=(3,)), rel=1e-12)


def test_a_rank_of_a_diverged_model_is_not_hidden_and_padding_is():
    assert all(map(math.isnan, of([1, 0]).values()))
    assert of([1, 0], [1.0, 0.0]) == of([1])
    assert all(map(math.isnan, of([]).values()))
    metric = NextItem((1,))
    metric.update_state([0])
    metric.reset_state()
    metric.update_state([1])
    assert float(metric.result()["hr@1"]) == 1


def test_it_is_made_again_from_its_config():
    metric = NextItem(ks=[7, 3], name="held_out")
    again = tf.keras.metrics.deserialize(tf.keras.metrics.serialize(metric))
    assert again.get_config() == metric.get_config()
    assert again.name == "held_out"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: NextItem([]), r"one or more numbers, each once, got \[\]"),
        (lambda: NextItem([5, 5]), "each once"),
        (lambda: NextItem([0]), "k must be a whole number from 1 on, got 0"),
        (
            lambda: catalogue_ranks(np.ones((2, 3)), np.ones((4, 2)), [0, 1]),
            r"got \(2, 3\), \(4, 2\) and \(2,\)",
        ),
        (lambda: catalogue_ranks(np.ones((2, 3)), np.ones((4, 3)), [[0, 1]]), r"and \(1, 2\)"),
        (lambda: catalogue_ranks(np.ones((1, 3)), np.ones((4, 3)), [0], block=0), "block must be a whole"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        wrong()


@pytest.mark.parametrize("positive", [-1, 4])
def test_a_positive_that_is_no_item_is_refused(positive):
    with pytest.raises(tf.errors.InvalidArgumentError, match="positives must be rows of the items"):
        catalogue_ranks(np.ones((1, 3)), np.ones((4, 3)), [positive])


def test_a_bias_of_seen_items_moves_them_and_the_positive_one():
    items = tf.constant([[1.0], [2.0], [3.0], [4.0]])
    queries, positives, seen = tf.ones([3, 1]), [1, 1, 3], tf.constant([[3, 2], [1, -1], [3, 3]])
    for bias, expected in ((-9.0, [1, 4, 4]), (0.0, [3, 3, 1]), (9.0, [3, 1, 1])):
        found = catalogue_ranks(queries, items, positives, seen=seen, seen_bias=bias)
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(ConfigError, match="seen_bias is added to the scores of seen="):
        catalogue_ranks(queries, items, positives, seen_bias=1.0)

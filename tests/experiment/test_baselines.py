"""Baselines against what their formulas say, written out row by row."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.experiment.measurement.baselines import (
    ITEM_DAMPING,
    TASK_DAMPING,
    ItemMeans,
    as_logits,
    biases,
    item_means,
)


def batch(items, labels, support=(), query=()):
    """One task of these rows."""
    index = {"support": [list(support)], "query": [list(query)]}
    sides = {
        side: {"index": tf.constant(rows, tf.int64, [1, len(rows[0])]), "mask": tf.ones([1, len(rows[0])])}
        for side, rows in index.items()
    }
    return {"features": {"item": tf.constant(items, tf.int64)}, "label": tf.constant(labels), **sides}


TRAINED = batch([5, 5, 9], [1.0, 2.0, 5.0])


def test_item_means_fall_back_to_the_mean_of_all():
    means = ItemMeans.of([TRAINED], "item", None)
    asked = batch([9, 5, 1, 77], [0.0] * 4, query=[0, 1, 2, 3])
    np.testing.assert_allclose(item_means(means, [asked], "item"), [5.0, 1.5, 8 / 3, 8 / 3], rtol=1e-6)


def test_damping_draws_items_to_the_mean_of_all():
    means = ItemMeans.of([TRAINED], "item", None)
    found = means.of_items(np.array([9]), damping=3.0)
    assert found[0] == pytest.approx((5.0 + 3 * 8 / 3) / 4)


def test_biases_add_what_a_task_s_own_support_rows_say():
    means = ItemMeans.of([TRAINED], "item", None)
    task = batch([9, 5, 9], [4.0, 4.0, 0.0], support=[0, 1], query=[2])
    mean = 8 / 3
    of = {
        9: (5 + ITEM_DAMPING * mean) / (1 + ITEM_DAMPING),
        5: (3 + ITEM_DAMPING * mean) / (2 + ITEM_DAMPING),
    }
    own = ((4 - of[9]) + (4 - of[5])) / (2 + TASK_DAMPING)
    np.testing.assert_allclose(biases(means, [task], "item", None), [of[9] + own])


def test_without_an_item_all_rows_are_of_one():
    means = ItemMeans.of([TRAINED], None, None)
    asked = batch([9, 1], [0.0, 0.0], query=[0, 1])
    np.testing.assert_allclose(item_means(means, [asked], None), [8 / 3, 8 / 3])


def test_rates_count_labels_from_positive_on_and_stay_finite_as_logits():
    means = ItemMeans.of([TRAINED], "item", positive=2.0)
    rates = means.of_items(np.array([5, 9]))
    np.testing.assert_allclose(rates, [0.5, 1.0])
    assert as_logits(rates)[0] == pytest.approx(0.0)
    assert np.isfinite(as_logits(np.array([-0.2, 0.0, 1.0, 1.3]))).all()

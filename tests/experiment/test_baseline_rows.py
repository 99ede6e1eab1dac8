"""Batches of tasks as baselines see them."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from gmeta.experiment.baselines.attributes import ItemMean
from gmeta.experiment.baselines.task_rows import ItemNumbers
from gmeta.experiment.baselines.tuning import tune
from gmeta.experiment.measurement.run_pool import describe
from gmeta.experiment.measurement.split import as_logits, number_items, read_tasks, read_whole
from gmeta.testing import small_config

BATCH = {
    "features": {"item": tf.constant([7, 5, 9, 7, 5], tf.int64)},
    "label": tf.constant([1.0, 2.0, 3.0, 4.0, 5.0]),
    "support": {
        "index": tf.constant([[2, 0], [3, 0]], tf.int64),
        "mask": tf.constant([[1.0, 1.0], [1.0, 0.0]]),
    },
    "query": {"index": tf.constant([[1], [4]], tf.int64), "mask": tf.constant([[1.0], [1.0]])},
}


def test_rows_keep_their_sides_tasks_and_order():
    tasks = read_tasks([BATCH, BATCH], "item", None)
    assert tasks.support.items.tolist() == [9, 7, 7] * 2
    assert tasks.support.labels.tolist() == [3.0, 1.0, 4.0] * 2
    assert tasks.support.row_splits.tolist() == [0, 2, 3, 5, 6]
    assert tasks.query.labels.tolist() == [2.0, 5.0] * 2
    numbered = number_items(tasks, ItemNumbers(np.array([5, 7])))
    assert numbered.support.items.tolist() == [2, 1, 1] * 2
    assert tasks.whole().labels.tolist() == [3.0, 1.0, 2.0, 4.0, 5.0] * 2


def test_tasks_that_are_not_cut_keep_all_rows_in_order():
    element = {
        "columns": {"item": tf.constant([7, 5, 9], tf.int64), "click": tf.constant([1, 0, 4], tf.int64)},
        "row_splits": tf.constant([0, 2, 3], tf.int64),
    }
    whole = read_whole([element, element], "item", "click", None)
    assert (whole.items.tolist(), whole.labels.tolist()) == ([7, 5, 9] * 2, [1.0, 0.0, 4.0] * 2)
    assert whole.row_splits.tolist() == [0, 2, 3, 5, 6]
    yes = read_whole([element], None, "click", 1.0)
    assert (yes.items.tolist(), yes.labels.tolist()) == ([0, 0, 0], [1.0, 0.0, 1.0])


def test_without_an_item_all_rows_are_of_one_and_rates_count_labels_from_positive_on():
    tasks = read_tasks([BATCH], None, 3.0)
    assert tasks.support.items.tolist() == [0, 0, 0]
    assert tasks.support.labels.tolist() == [1.0, 0.0, 1.0]
    assert len(read_tasks([], "item", None)) == 0


def test_rates_stay_finite_as_logits():
    assert as_logits(np.array([0.5]))[0] == pytest.approx(0.0)
    assert np.isfinite(as_logits(np.array([-0.2, 0.0, 1.0, 1.3]))).all()


def test_each_baseline_is_described_with_its_settings():
    words = describe([tune([], items=3, by_item=True)], small_config())
    assert list(words) == ["item_mean", "biases", "neighbours", "kriging", "factors"]
    assert words["factors"][0] == "ridge on factors"
    assert words["factors"][1].endswith("support rows (8 factors, penalty 100).")
    plain = describe([tune([], items=1, by_item=False)], replace(small_config(), item=None))
    assert [label for label, _ in plain.values()] == ["mean", "task bias"]
    assert "no column is named as the item" in plain["item_mean"][1]


def test_a_baseline_of_several_runs_is_described_with_the_settings_of_each():
    usual = tune([], items=3, by_item=True)
    words = describe([usual, replace(usual, mean=ItemMean(7.0)), usual], small_config())
    assert words["item_mean"][1].endswith("(damped by 5 rows; or damped by 7 rows).")
    assert words["factors"][1].endswith("(8 factors, penalty 100).")

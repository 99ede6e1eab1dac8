"""Batches of tasks as baselines see them."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from gmeta.experiment.baselines.task_rows import ItemNumbers
from gmeta.experiment.baselines.tuning import tune
from gmeta.experiment.measurement.baseline_rows import as_logits, number_items, read_tasks
from gmeta.experiment.measurement.baseline_words import describe
from gmeta.testing.small_experiment import small_config

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


def test_without_an_item_all_rows_are_of_one_and_rates_count_labels_from_positive_on():
    tasks = read_tasks([BATCH], None, 3.0)
    assert tasks.support.items.tolist() == [0, 0, 0]
    assert tasks.support.labels.tolist() == [1.0, 0.0, 1.0]
    assert len(read_tasks([], "item", None)) == 0


def test_rates_stay_finite_as_logits():
    assert as_logits(np.array([0.5]))[0] == pytest.approx(0.0)
    assert np.isfinite(as_logits(np.array([-0.2, 0.0, 1.0, 1.3]))).all()


def test_each_baseline_is_described_with_its_settings():
    words = describe(tune([], items=3, by_item=True), small_config())
    assert list(words) == ["item_mean", "biases", "neighbours", "kriging", "factors"]
    assert words["factors"][0] == "ridge on factors"
    assert words["factors"][1].endswith("support rows (8 factors, penalty 100).")
    plain = describe(tune([], items=1, by_item=False), replace(small_config(), item=None))
    assert [label for label, _ in plain.values()] == ["mean", "task bias"]
    assert "no column is named as the item" in plain["item_mean"][1]

"""The cut into pseudo-cold tasks, the choice among settings, and all baselines together."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.experiment.baselines import task_rows as rows_of_tasks
from gmeta.experiment.baselines.attributes import ItemMean
from gmeta.experiment.baselines.task_rows import (
    ItemNumbers,
    Rows,
    Tasks,
    choose,
    cut_blocks,
    cut_folds,
    hide_items,
)
from gmeta.experiment.baselines.tuning import Baselines
from support.drawn_batches import task_rows, tasks_of


def named(tasks):
    """The tasks, with each one's number as the label of its rows."""
    return Tasks(*(replace(side, labels=side.task.astype(float)) for side in (tasks.support, tasks.query)))


@given(task_rows(), st.integers(2, 4))
def test_each_task_is_held_out_once_and_no_row_of_it_is_fitted_to(case, count):
    tasks = named(case[0])
    held_out = []
    for fold in cut_folds(tasks, count):
        cold, warm = set(fold.cold.query.labels), set(fold.warm.labels)
        assert not cold & warm
        assert cold | warm == set(tasks.query.labels)
        for task in fold.cold.query.labels:  # cut as it was
            mine = fold.cold.support.items[fold.cold.support.labels == task]
            np.testing.assert_array_equal(mine, tasks.support.items[tasks.support.labels == task])
        held_out += sorted(cold)
    assert sorted(held_out) == sorted(set(tasks.query.labels))


def test_a_task_without_query_rows_is_fitted_to_and_plays_no_new_task():
    cut, whole = tasks_of(0, [4] * 9, [2] * 9, 5), tasks_of(1, [50] * 9, [0] * 9, 5).support
    tasks = named(cut.and_whole(whole))
    folds = cut_folds(tasks)
    assert sorted(task for fold in folds for task in set(fold.cold.query.labels)) == list(range(9))
    assert sum(len(fold.cold) for fold in folds) == 9
    assert sum(len(fold.warm.items) for fold in folds) == 2 * (9 * 6 + 9 * 50)
    tasks = cut.and_whole(whole)
    assert tasks.asked.tolist() == list(range(9))
    baselines = Baselines.of(tasks, 5)
    found = baselines.predict_warm(tasks, cut)
    other = cut.and_whole(replace(whole, labels=whole.labels + 9.0))
    for name, moved in baselines.predict_warm(other, cut).items():
        assert np.isfinite(found[name]).all()
        assert not np.isclose(found[name], moved).any()


def test_no_more_tasks_take_part_than_there_is_time_for(monkeypatch):
    tasks = tasks_of(0, [4] * 60, [1] * 60, 5)
    monkeypatch.setattr(rows_of_tasks, "MOST_ROWS", 150)
    monkeypatch.setattr(rows_of_tasks, "MOST_PAIRS", 32)
    folds = cut_folds(tasks)
    assert [len(fold.warm.items) for fold in folds] == [100, 100, 100]
    assert [len(fold.cold) for fold in folds] == [8, 8, 8]


def test_a_third_of_the_items_plays_new_ones():
    fold = cut_folds(tasks_of(0, [40] * 4, [5] * 4, 9))[0]
    found = hide_items(fold, 9, seed=0)
    kept = np.unique(found.warm.items)
    assert len(kept) == 6
    rows = np.isin(fold.warm.items, kept)
    np.testing.assert_array_equal(found.warm.labels, fold.warm.labels[rows])
    np.testing.assert_array_equal(found.warm.task, fold.warm.task[rows])
    assert found.cold is fold.cold


def test_the_least_error_over_all_folds_is_chosen_and_the_usual_without_a_fold():
    assert choose("abc", [[3.0, 1.0, 2.0], [3.0, 4.0, 2.0]]) == "c"
    assert choose("abc", [[np.nan, 1.0, 2.0]]) == "b"
    assert choose("abc", []) == "a"
    assert cut_folds(tasks_of(0, [3], [2], 4)) == []


def test_damping_follows_how_far_items_differ():
    rng = np.random.default_rng(0)
    tasks = tasks_of(0, [5] * 60, [3] * 60, 40)
    rows = tasks.support.labels, tasks.query.labels
    for labels in rows:
        labels[:] = rng.normal(size=len(labels))
    alike = ItemMean.tune(cut_folds(tasks), 40)
    offset = rng.normal(0, 5, 40)
    for side in (tasks.support, tasks.query):
        side.labels[:] += offset[side.items]
    assert ItemMean.tune(cut_folds(tasks), 40).damping < alike.damping


@pytest.fixture(scope="module")
def fitted():
    tasks = tasks_of(1, [6] * 30, [3] * 30, 12)
    return tasks, Baselines.of(tasks, 12)


def test_a_query_label_moves_no_prediction(fitted):
    tasks, baselines = fitted
    unseen = Rows(tasks.query.items, np.full(len(tasks.query.labels), np.nan), tasks.query.row_splits)
    expected = baselines.predict(tasks)
    for name, found in baselines.predict(Tasks(tasks.support, unseen)).items():
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found, expected[name])


def test_a_warm_task_is_predicted_by_what_was_fitted_to_others(fitted):
    tasks, baselines = fitted
    expected = baselines.predict_warm(tasks, tasks)
    assert list(expected) == list(baselines.predictors)
    for task in (0, 17, 29):
        labels = np.where(tasks.query.task == task, 1e3, tasks.query.labels)
        other = Tasks(tasks.support, replace(tasks.query, labels=labels))
        found = baselines.predict_warm(other, other)
        own = tasks.query.task == task
        for name, predictions in found.items():
            np.testing.assert_allclose(predictions[own], expected[name][own], rtol=1e-9)
            assert not np.allclose(predictions[~own], expected[name][~own])


def test_unknown_items_and_tasks_without_support_rows_are_predicted(fitted):
    _, baselines = fitted
    nothing = Rows(np.zeros(0, np.int64), np.zeros(0), np.zeros(2, np.int64))
    asked = Tasks(nothing, Rows(np.array([12, 3]), np.zeros(2), np.array([0, 2])))
    mean = baselines.predictors["biases"].mean
    for found in baselines.predict(asked).values():
        assert found[0] == pytest.approx(mean)
        assert np.isfinite(found[1])
    variances = baselines.variances(asked)
    assert list(variances) == ["kriging", "factors"]
    assert all((variance > 0).all() for variance in variances.values())


def test_without_items_only_means_and_biases_make_sense():
    tasks = tasks_of(1, [6] * 9, [3] * 9, 1)
    baselines = Baselines.of(tasks, 1, by_item=False)
    assert list(baselines.predict(tasks)) == list(baselines.tuned.describe()) == ["item_mean", "biases"]
    assert baselines.variances(tasks) == {}


@pytest.mark.parametrize("tasks", [tasks_of(0, [2], [1], 1), tasks_of(0, [1, 0], [1, 2], 2)])
def test_a_handful_of_rows_is_enough(tasks):
    baselines = Baselines.of(tasks, 2)
    for found in (baselines.predict(tasks), baselines.predict_warm(tasks, tasks)):
        assert all(np.isfinite(each).all() for each in found.values())


@given(task_rows(), st.integers(1, 30))
def test_blocks_hold_every_pair_once(case, most):
    tasks, _ = case
    found = []
    for block in cut_blocks(tasks, most):
        assert block.support.shape[0] == 1 or block.asked.size * block.given.shape[1] <= most
        for queries, asked, rows, given_ in zip(
            block.query, block.asked, block.support, block.given, strict=True
        ):
            found += [(q, s) for q in queries[asked] for s in rows[given_]]
    expected = [
        (q, s) for q, t in enumerate(tasks.query.task) for s, u in enumerate(tasks.support.task) if t == u
    ]
    assert sorted(found) == expected


@given(task_rows(), st.integers(1, 30))
def test_blocks_may_bound_pairs_of_support_rows_too(case, most):
    for block in cut_blocks(case[0], most, squares=True):
        tasks, rows = block.support.shape
        assert tasks == 1 or tasks * rows * max(rows, block.query.shape[1]) <= most


@given(task_rows(), st.integers(0, 6))
def test_the_latest_support_rows_are_the_last_of_each_task(case, size):
    tasks, _ = case
    support, limited = tasks.support, tasks.latest(size).support
    for t in range(len(tasks)):
        own = support.items[support.task == t]
        np.testing.assert_array_equal(limited.items[limited.task == t], own[max(len(own) - size, 0) :])


def test_items_are_numbered_by_the_warm_rows():
    numbers = ItemNumbers(np.array([-7, 3, 50]))
    np.testing.assert_array_equal(numbers.of(np.array([50, 4, -7, 99])), [2, 3, 0, 3])
    np.testing.assert_array_equal(ItemNumbers(np.zeros(0, np.int64)).of(np.array([4])), [0])


def test_items_of_cold_tasks_alone_are_numbered_after_the_warm_ones():
    def tasks(*items):
        rows = Rows(np.array(items), np.zeros(len(items)), np.array([0, len(items)]))
        return Tasks(rows, rows)

    numbers = ItemNumbers.of_tasks(tasks(50, 3), [tasks(3, 7), tasks(4, 7)])
    assert numbers.unknown == 2
    np.testing.assert_array_equal(numbers.ids, [3, 50, 4, 7])
    np.testing.assert_array_equal(numbers.of(np.array([7, 50, 4, 9])), [3, 1, 2, 4])
    np.testing.assert_array_equal(tasks(0, 1, 2, 3).merge_unknown(2).query.items, [0, 1, 2, 2])

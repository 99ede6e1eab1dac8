"""What a table is after going back, whatever happened in between."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.ops import HashTable
from gmeta.ops.table.restored_rows import TableSnapshot
from gmeta.optimizers import SGD, Adagrad, Adam, Momentum, RowWiseAdagrad
from gmeta.policies import LRU, CountAdmission, TwoPrecisions

POLICIES = {
    "plain": {},
    "evicts": {"eviction": LRU(max_rows=40)},
    "two precisions": {"precision": TwoPrecisions(3)},
    "cooling down": {"precision": TwoPrecisions(2, half_life=2)},
    "admits": {"admission": CountAdmission(2)},
}
ACTIONS = ("train", "train", "read", "remove", "take", "restore", "drop", "replace")


def content(table):
    records = table.export()
    order = np.argsort(records.keys.numpy())
    waiting = table.export_admission()
    parts = [np.asarray(part)[order] for part in records[:5]]
    return [*parts, np.asarray(records.step), np.sort(waiting.keys), np.sort(waiting.counts)]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=12)
@given(actions=st.lists(st.sampled_from(ACTIONS), max_size=40), seed=st.integers(0, 99))
def test_every_open_snapshot_gives_back_records_slots_step_and_admission(policy, actions, seed):
    rng = np.random.default_rng(seed)
    table = HashTable(3, Adam(0.1), name="x", **POLICIES[policy])
    open_ones = []
    for action in actions:
        some = rng.integers(0, 120, 30)
        if action == "train":
            found = table.lookup(some)
            table.apply_gradients(found.keys, rng.normal(size=found.rows.shape).astype(np.float32))
        elif action == "read":
            table.lookup(some)
        elif action == "remove":
            table.remove(some)
        elif action == "replace":
            table.import_(table.export()._replace(step=5), replace=True)
        elif action == "take":
            open_ones.append((TableSnapshot(table), content(table)))
        elif open_ones:
            place = rng.integers(len(open_ones))
            if action == "drop":
                open_ones.pop(place)
            else:
                open_ones[place][0].restore()
                assert_same(content(table), open_ones[place][1])
    for snapshot, expected in open_ones:
        snapshot.restore()
        assert_same(content(table), expected)


def test_a_snapshot_costs_the_rows_that_change_while_it_lives():
    table = HashTable(64, Adam(0.1), name="x")
    table.lookup(np.arange(20_000))
    before = int(table.statistics().bytes)
    snapshot = TableSnapshot(table)
    assert int(table.statistics().bytes) - before < 0.02 * before
    table.lookup(np.arange(200))
    few = int(table.statistics().bytes) - before
    table.lookup(np.arange(20_000))
    assert few < 0.1 * (int(table.statistics().bytes) - before)
    del snapshot
    assert int(table.statistics().bytes) == before


def test_an_incremental_save_after_a_restore_is_told_that_the_journal_is_broken():
    table = HashTable(2, Adam(0.1), name="x")
    table.start_journal(100)
    snapshot = TableSnapshot(table)
    table.lookup([1, 2])
    assert table.journal_whole()
    snapshot.restore()
    assert not table.journal_whole()


@pytest.mark.parametrize("optimizer", [Adagrad(0.1), RowWiseAdagrad(0.1), Momentum(0.1), SGD(0.1)])
def test_a_changed_optimizer_keeps_rows_and_steps_as_a_new_one_does(optimizer):
    one, other = HashTable(3, Adam(0.1), name="x"), HashTable(3, optimizer, name="x")

    @tf.function  # traced before the change: it has to see it
    def step(table_keys):
        one.apply_gradients(table_keys, tf.ones([2, 3]))

    one.lookup([4, 5])
    step.get_concrete_function(tf.TensorSpec([2], tf.int64))
    assert not one.change_optimizer(optimizer)  # no row has been updated, so no slot is lost
    other.lookup([4, 5])
    for _ in range(3):
        step(tf.constant([4, 5], tf.int64))
        other.apply_gradients([4, 5], tf.ones([2, 3]))
    if not isinstance(optimizer, SGD | Momentum):  # the graph has the rate that Adam had, which is the same
        assert one.optimizer == optimizer
    assert_same(content(one), content(other))


def test_a_snapshot_of_other_slots_is_refused():
    table = HashTable(2, Adam(0.1), name="x")
    snapshot = TableSnapshot(table)
    table.change_optimizer(SGD(0.1))
    with pytest.raises(ConfigError, match="take snapshots after compile"):
        snapshot.restore()
    again = TableSnapshot(table)
    table.change_optimizer(SGD(0.2))
    again.restore()

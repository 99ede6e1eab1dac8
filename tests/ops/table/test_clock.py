"""Rows whose lifetime is in seconds: when they expire, over pauses, checkpoints and clocks."""

from __future__ import annotations

import copy

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings

from gmeta import initializers, ops, optimizers
from gmeta.checkpoint.sharded import load, save
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.ops.table.restored_rows import TableSnapshot
from gmeta.policies import TTL
from support.fake_time import FakeTime
from support.tables import assert_same_tables

pytestmark = pytest.mark.usefixtures("table_device")

DAY = 86_400.0


class Clock:
    """A clock that tests set."""

    def __init__(self, seconds=1.8e9):
        self.seconds = seconds

    def __call__(self):
        return tf.constant(self.seconds, tf.float64)


WEEK = TTL(seconds="7d")


def make(clock, eviction=WEEK, name="item"):
    table = ops.HashTable(2, optimizers.SGD(0.5), initializers.Zeros(), name=name, eviction=eviction)
    table.clock = clock
    return table


def step(table, keys=()):
    keys = table.lookup(np.array(keys, np.int64)).keys
    table.apply_gradients(keys, tf.ones([len(keys), 2]))


def held(table):
    return sorted(table.export().keys.numpy().tolist())


@settings(max_examples=40)
@given(
    gaps=st.lists(st.floats(0, 40), min_size=1, max_size=120),
    lifetime=st.floats(0.5, 400),
    seed=st.integers(0, 2**16),
)
def test_rows_are_never_removed_early_and_soon_after_they_have_expired(gaps, lifetime, seed):
    """By the times of uses themselves, which the table doesn't have."""
    clock, random = Clock(0.0), np.random.default_rng(seed)
    table, used = make(clock, TTL(seconds=lifetime, every=lifetime / 4)), {}
    for gap in gaps:
        keys = random.integers(0, 30, 3)
        clock.seconds += gap
        step(table, keys)
        used |= dict.fromkeys(keys.tolist(), clock.seconds)
        late = lifetime * (1 + 1 / 64 + 1 / 4) + 2 * max(gaps) + 1e-3
        there = set(held(table))
        for key, time in used.items():
            if clock.seconds - time < lifetime - 1e-3:
                assert key in there
            if clock.seconds - time > late:
                assert key not in there
        assert len(table.step_times) <= 67


def test_time_goes_on_while_training_is_stopped(tmp_path):
    clock = Clock()
    before = make(clock)
    step(before, [1, 2, 3])
    for _ in range(3):
        clock.seconds += DAY
        step(before, [3])
    path = tf.train.Checkpoint(table=before).save(tmp_path / "tf")
    save(tmp_path / "sharded", {"item": before})
    for days, kept in ((3, [1, 2, 3, 9]), (5, [3, 9]), (30, [3, 9])):
        tables = [make(Clock(clock.seconds + days * DAY)) for _ in range(2)]
        tf.train.Checkpoint(table=tables[0]).restore(path).assert_consumed()
        load(tmp_path / "sharded", {"item": tables[1]})
        for table in tables:
            step(table, [9])
            # The last step before the pause has no later step beside it, so its rows stay.
            assert held(table) == kept
    assert int(tables[0].evict()) == 0


def test_checkpoints_of_all_kinds_keep_the_times(tmp_path):
    clock = Clock()
    collection = EmbeddingCollection(
        [FeatureConfig("item", TableConfig("item", 2, eviction=TTL(seconds="2d")))],
        optimizer=optimizers.SGD(0.5),
    )
    model = tf.keras.Sequential([collection])
    model({"item": tf.constant([0])})
    (table,) = collection.tables
    table.clock = clock
    for day in range(5):
        step(table, [day])
        clock.seconds += DAY / 2
    times = table.step_times.numpy()
    assert len(times) > 2
    save(tmp_path / "a", {"item": table}, journal=100)
    step(table, [9])
    save(tmp_path / "b", {"item": table}, base=tmp_path / "a", journal=100)
    copied = copy.deepcopy(collection).tables[0]
    np.testing.assert_array_equal(copied.step_times, table.step_times)
    assert copied.clock is clock
    snapshot = TableSnapshot(table)
    now = table.step_times.numpy()
    model.save_weights(tmp_path / "model.weights.h5")
    step(table, [11])
    snapshot.restore()
    np.testing.assert_array_equal(table.step_times, now)
    for path, expected in (("a", times), ("b", now)):
        load(tmp_path / path, {"item": table})
        np.testing.assert_array_equal(table.step_times, expected)
    table.set_step_times([])
    model.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(table.step_times, now)


def test_rows_without_times_count_as_used_when_they_are_loaded(tmp_path):
    by_steps, clock = make(None, TTL(steps=100)), Clock()
    step(by_steps, [1, 2])
    path = tf.train.Checkpoint(table=by_steps).save(tmp_path / "tf")
    table = make(clock)
    step(table, [7])
    tf.train.Checkpoint(table=table).restore(path).assert_consumed()
    for days, kept in ((0, [1, 2]), (6.9, [1, 2]), (1, [])):
        clock.seconds += days * DAY
        step(table)
        assert held(table) == kept


def test_the_clock_is_read_at_each_step_of_a_function():
    """Any function of time: here, what a batch's events say."""
    now = tf.Variable(0.0, dtype=tf.float64)
    table = make(now.read_value, TTL(seconds=10, every=1))

    @tf.function
    def train(keys, time):
        now.assign(time)
        found = table.lookup(keys)
        table.apply_gradients(found.keys, tf.ones_like(found.rows))
        return table.size()

    spec = tf.constant([1], tf.int64)
    assert [int(train(spec + i, tf.constant(5.0 * i, tf.float64))) for i in range(6)] == [1, 2, 3, 3, 3, 3]
    time = FakeTime()
    other = make(time.now, TTL(seconds=10, every=1))
    train_other = tf.function(lambda keys: time.work(step_in_graph(other, keys), 5.0))
    assert [int(train_other(spec + i)) for i in range(6)] == [1, 2, 3, 3, 3, 3]


def step_in_graph(table, keys):
    found = table.lookup(keys)
    table.apply_gradients(found.keys, tf.ones_like(found.rows))
    return table.size()


def test_ranks_that_divide_rows_sweep_as_one_does():
    """Each by its own clock; here they agree."""
    clock = Clock()
    one, parts = make(clock), [make(clock) for _ in range(2)]
    random = np.random.default_rng(0)
    for _ in range(40):
        clock.seconds += DAY / 3
        keys = random.integers(0, 200, 5)
        step(one, keys)
        for rank, part in enumerate(parts):
            step(part, keys[keys % 2 == rank])
        assert held(one) == sorted([*held(parts[0]), *held(parts[1])])


def test_a_time_that_is_none_is_refused():
    table = make(Clock(np.nan))
    with pytest.raises(tf.errors.InvalidArgumentError, match="the clock of a table returned nan"):
        step(table, [1])


def test_by_default_the_clock_is_the_machines():
    table = ops.HashTable(2, eviction=TTL(seconds="1h"))
    step(table, [1])
    assert abs(float(tf.timestamp()) - table.step_times.numpy()[-1, 1] / 1e6) < 600
    assert_same_tables(table, table)
    assert ops.HashTable(2, eviction=TTL(steps=3)).step_times is None

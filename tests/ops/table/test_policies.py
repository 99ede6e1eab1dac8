from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings

from gmeta import initializers, ops, optimizers, policies
from gmeta.core.errors import ConfigError
from gmeta.policies.row_lifetimes import Always
from support.reference.table import ReferenceHashTable
from support.tables import assert_agrees, assert_same_tables

pytestmark = pytest.mark.usefixtures("table_device")

ROW = 8 + 4 * 3 + 48  # a row of 3 weights under SGD, as a bound in bytes charges it

ADMISSIONS = [
    Always(),
    policies.CountAdmission(1),
    policies.CountAdmission(3),
    policies.CountAdmission(3, filter=policies.Bloom(200, error=0.01)),
    policies.CountAdmission(
        2, filter=policies.Bloom(5, error=0.5)
    ),  # overfull: false admissions are replayed too
    policies.ProbabilityAdmission(0.3),
]
EVICTIONS = [
    None,
    policies.LRU(max_rows=9),
    policies.LRU(max_rows=32, max_bytes=24 * ROW),
    policies.LFU(max_rows=33),
    policies.LFU(max_bytes=20 * ROW + 5),
    policies.TTL(steps=2),
    policies.TTL(steps=4, every=3, max_rows=16),
    policies.TTL(seconds=3, every=0.5),
    policies.TTL(seconds="2m", max_rows=17),
    policies.MinNorm(threshold=1.5, every=2),
    policies.MinNorm(threshold=1.0, max_rows=17),
]

PRECISIONS = [
    None,
    None,
    policies.TwoPrecisions(2, rounding="nearest"),
    policies.TwoPrecisions(4),
    policies.TwoPrecisions(2, half_life=1),
    policies.TwoPrecisions(3, half_life=17, rounding="nearest"),
]

keys_strategy = st.lists(st.integers(-3, 40), max_size=24)
operation = st.one_of(
    st.tuples(st.just("lookup"), keys_strategy, st.sampled_from([True, True, True, False])),
    st.tuples(st.just("apply"), keys_strategy, st.integers(0, 2**16)),
    st.tuples(st.just("remove"), st.lists(st.integers(-3, 40), max_size=3), st.none()),
    st.tuples(st.just("evict"), st.just([]), st.none()),
)


def pair(admission, eviction, initializer=None, dim=3, seed=0, precision=None):
    settings = (dim, optimizers.SGD(0.5), initializer or initializers.Constant(1.0), seed)
    rules = {"admission": admission, "eviction": eviction, "precision": precision}
    table, model = ops.HashTable(*settings, **rules), ReferenceHashTable(*settings, **rules)
    model.eviction.clock = lambda: model.seconds
    table.clock = lambda: tf.constant(model.seconds, tf.float64)
    model.seconds = 1.8e9
    return table, model


@settings(max_examples=100)
@given(
    operations=st.lists(operation, max_size=30),
    admission=st.sampled_from(ADMISSIONS),
    eviction=st.sampled_from(EVICTIONS),
    precision=st.sampled_from(PRECISIONS),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_any_trace_agrees_with_the_model(operations, admission, eviction, precision, seed):
    table, model = pair(admission, eviction, seed=seed, precision=precision)
    for kind, keys, argument in operations:
        keys = np.array(keys, np.int64)
        if kind == "lookup":
            np.testing.assert_array_equal(table.lookup(keys, argument).rows, model.lookup(keys, argument)[0])
        elif kind == "apply":  # small integers times a power of two: exact, and many norms are equal
            random = np.random.default_rng(argument)
            grads = random.integers(-2, 3, (len(keys), 3)).astype(np.float32)
            model.seconds += random.choice([0, 0.01, 0.25, 1, 20, 3600, -2])  # a pause, and a clock set back
            table.apply_gradients(keys, grads)
            model.apply_gradients(keys, grads, 0.5)
        elif kind == "remove":
            assert int(table.remove(keys)) == model.remove(keys)
        else:
            assert int(table.evict()) == model.evict()
        assert int(table.size()) == model.size()
    assert_agrees(table, model)


@pytest.mark.parametrize(
    ("admission", "eviction"),
    [
        (policies.CountAdmission(2), None),
        (policies.CountAdmission(3, filter=policies.Bloom(1000, error=0.1)), None),
        (policies.ProbabilityAdmission(0.2), None),
        # Quick: the others, and each in test_any_trace_agrees_with_the_model.
        pytest.param(None, policies.LRU(max_rows=4096), marks=pytest.mark.slow),
        pytest.param(None, policies.LFU(max_bytes=4500 * ROW), marks=pytest.mark.slow),
        (None, policies.TTL(steps=5, every=4, max_rows=10_000)),
        (None, policies.TTL(seconds=5, every=3)),
        pytest.param(None, policies.MinNorm(threshold=0.6, every=3, max_rows=8192), marks=pytest.mark.slow),
        (policies.CountAdmission(2, filter=policies.Bloom(20_000)), policies.LRU(max_rows=5000)),
    ],
    ids=str,
)
def test_a_long_trace_over_many_shards_agrees_with_the_model(admission, eviction):
    table, model = pair(admission, eviction, initializers.Uniform(-1.0, 1.0), seed=9)
    random = np.random.default_rng(5)
    for _ in range(12):
        ids = random.zipf(1.2, 3000) % 15_000 * 7919 - 50_000_000
        rows, keys, _ = table.lookup(ids)
        expected = model.lookup(ids)
        np.testing.assert_array_equal(rows, expected[0])
        grads = random.integers(-2, 3, (len(keys), 3)).astype(np.float32) / 4
        model.seconds += 0.8
        table.apply_gradients(keys, grads)
        model.apply_gradients(expected[1], grads, 0.5)
    assert_agrees(table, model)
    assert model.counts["rejects"] if admission else model.counts["evictions"]


def test_a_rejected_key_reads_its_initial_row_and_trains_nothing():
    table = ops.HashTable(
        4, optimizers.SGD(1.0), initializers.Normal(0, 1), seed=3, admission=policies.CountAdmission(2)
    )
    initial = table.lookup([7], insert=False).rows
    for attempt in range(2):
        rows = table.lookup([7]).rows
        np.testing.assert_array_equal(rows, initial)
        table.apply_gradients([7], tf.ones([1, 4]))
        assert int(table.size()) == attempt
    np.testing.assert_array_equal(table.lookup([7]).rows, initial - 1)
    statistics = table.statistics()
    assert (int(statistics.rejects), int(statistics.ignored), int(statistics.updates)) == (1, 1, 1)
    assert (int(statistics.misses), int(statistics.inserts), int(statistics.hits)) == (3, 1, 1)


@pytest.mark.parametrize("bloom", [None, policies.Bloom(100)])
def test_each_occurrence_of_a_key_in_a_batch_counts(bloom):
    table = ops.HashTable(2, admission=policies.CountAdmission(3, filter=bloom))
    table.lookup_keys([5, 6, 5])
    assert table.contains([5, 6]).numpy().tolist() == [False, False]
    table.lookup_keys([6, 5, 5, 6])
    assert table.contains([5, 6]).numpy().tolist() == [True, True]
    assert table.export().frequency.numpy().sum() == 3  # 5 was read twice since it has a row


def test_an_exact_count_starts_anew_after_removal_and_a_filter_forgets_nothing():
    exact = ops.HashTable(2, admission=policies.CountAdmission(2))
    filtered = ops.HashTable(2, admission=policies.CountAdmission(2, filter=policies.Bloom(100)))
    for table in (exact, filtered):
        for _ in range(2):
            table.lookup([1])
        table.remove([1])
        table.lookup([1])
    assert (int(exact.size()), int(filtered.size())) == (0, 1)


@pytest.mark.parametrize("error", [0.3, 0.05, 0.01])
def test_a_filter_at_its_capacity_admits_too_early_as_often_as_stated(error):
    capacity, tries = 20_000, 20_000
    table = ops.HashTable(1, admission=policies.CountAdmission(2, filter=policies.Bloom(capacity, error)))
    table.lookup(np.arange(capacity))
    before = int(table.size())  # some of these were early too
    table.lookup(np.arange(10**6, 10**6 + tries // 100))  # few, so that the load stays the stated one
    early = int(table.size()) - before
    expected = error * tries / 100
    assert early <= expected + 4 * np.sqrt(expected) + 1
    assert before <= capacity * error  # while it fills, the error is below


def test_probability_admission_admits_that_share_at_each_step():
    table = ops.HashTable(
        1, optimizers.SGD(), initializers.Zeros(), seed=1, admission=policies.ProbabilityAdmission(0.25)
    )
    ids = np.arange(20_000)
    left = len(ids)
    for _ in range(4):
        before = int(table.size())
        table.lookup(ids)
        table.lookup(ids)  # of the same step: nothing new
        admitted = int(table.size()) - before
        assert abs(admitted - left / 4) < 5 * np.sqrt(left * 0.25 * 0.75)
        left -= admitted
        table.apply_gradients([], tf.zeros([0, 1]))
    never = ops.HashTable(1, admission=policies.ProbabilityAdmission(0.0))
    always = ops.HashTable(1, admission=policies.ProbabilityAdmission(1.0))
    for table, size in ((never, 0), (always, len(ids))):
        table.lookup(ids)
        assert int(table.size()) == size


def test_a_bound_is_kept_and_memory_used_again():
    bound = 50_000
    table = ops.HashTable(8, optimizers.SGD(), initializers.Zeros(), eviction=policies.LRU(max_rows=bound))
    for start in range(0, 400_000, 5000):
        table.lookup(np.arange(start, start + 5000))
        table.apply_gradients([], tf.zeros([0, 8]))
        assert int(table.size()) <= bound + 5000
    assert int(table.size()) >= 0.85 * bound
    if table.tiers is None:
        assert int(table.statistics().bytes) < 1.25 * (bound + 5000) * (8 + 4 * 8 + 48)
    table.evict()
    assert int(table.size()) <= bound
    assert bool(tf.reduce_all(table.contains(np.arange(395_000, 400_000))))  # the newest stayed


def test_a_bound_in_bytes_bounds_the_memory():
    limit = 8_000_000
    table = ops.HashTable(16, optimizers.Adam(), initializers.Zeros(), eviction=policies.LFU(max_bytes=limit))
    for start in range(0, 200_000, 2000):
        table.lookup(np.arange(start, start + 2000))
    table.evict()
    statistics = table.statistics()
    assert 0.85 * limit < int(statistics.size) * (8 + 4 * 48 + 48) <= limit
    assert int(statistics.bytes) < 1.25 * limit


@pytest.mark.parametrize("admission", ADMISSIONS, ids=str)
@pytest.mark.parametrize("eviction", [None, policies.TTL(steps=3, every=2, max_rows=30)], ids=str)
def test_a_restored_table_goes_on_as_the_saved_one(tmp_path: Path, admission, eviction):
    def make() -> ops.HashTable:
        return ops.HashTable(
            3,
            optimizers.Adagrad(0.1),
            initializers.Normal(0, 1),
            seed=4,
            admission=admission,
            eviction=eviction,
        )

    def train(table: ops.HashTable, seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(6):
            keys = table.lookup(random.integers(0, 60, 20)).keys
            table.apply_gradients(keys, tf.ones([len(keys), 3]))

    saved, restored = make(), make()
    train(saved, 0)
    train(restored, 1)  # what it held and counted is replaced
    path = tf.train.Checkpoint(table=saved).save(tmp_path / "model")
    tf.train.Checkpoint(table=restored).restore(path).assert_consumed()
    for _ in range(3):
        train(saved, 2)
        train(restored, 2)
        assert_same_tables(saved, restored)


def test_a_table_goes_on_under_another_admission(tmp_path: Path):
    counting = ops.HashTable(2, admission=policies.CountAdmission(3))
    counting.lookup([1, 2])
    path = tf.train.Checkpoint(table=counting).save(tmp_path / "model")
    for admission in (Always(), policies.CountAdmission(3, filter=policies.Bloom(10))):
        table = ops.HashTable(2, admission=admission)
        tf.train.Checkpoint(table=table).restore(path).assert_consumed()
        table.lookup([1])
        assert int(table.size()) == int(admission == Always())


def test_a_filter_of_another_size_is_refused():
    state = ops.HashTable(
        2, name="a", admission=policies.CountAdmission(2, policies.Bloom(10))
    ).export_admission()
    table = ops.HashTable(2, name="b", admission=policies.CountAdmission(2, policies.Bloom(1000)))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"table 'b': a filter of \d+ bytes"):
        table.import_admission(state)


def test_policies_work_in_functions():
    table = ops.HashTable(
        2,
        optimizers.SGD(),
        initializers.Zeros(),
        admission=policies.CountAdmission(2),
        eviction=policies.LRU(max_rows=4),
    )

    @tf.function
    def step(ids: tf.Tensor) -> tf.Tensor:
        keys = table.lookup(ids).keys
        table.apply_gradients(keys, tf.ones([tf.size(keys), 2]))
        return table.evict()

    evicted = sum(int(step(tf.range(start, start + 6, dtype=tf.int64))) for start in (0, 0, 4, 4))
    assert (int(table.size()), evicted) == (4, int(table.statistics().evictions))


def test_policies_are_equal_by_their_fields():
    assert policies.CountAdmission(2, policies.Bloom(10)) == policies.CountAdmission(
        2, filter=policies.Bloom(10)
    )
    assert (
        len(
            {
                policies.LRU(max_rows=3),
                policies.LRU(max_rows=3),
                policies.LRU(max_rows=4),
                policies.LFU(max_rows=3),
            }
        )
        == 3
    )


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(
        ConfigError, match="CountAdmission: threshold must be an integer from 1 to 4294967295, got 0"
    ):
        policies.CountAdmission(0)
    with pytest.raises(ConfigError, match="threshold must be an integer from 1 to 255, got 256"):
        policies.CountAdmission(256, policies.Bloom(10))
    with pytest.raises(ConfigError, match=r"Bloom: error must lie in \(0, 1\), got 0"):
        policies.Bloom(10, error=0)
    with pytest.raises(ConfigError, match=r"ProbabilityAdmission: p must lie in \[0, 1\], got 1.5"):
        policies.ProbabilityAdmission(1.5)
    with pytest.raises(ConfigError, match="LRU: give max_rows or max_bytes"):
        policies.LRU()
    with pytest.raises(ConfigError, match=r"LFU: max_rows must be an integer from 1 to .*, got 0"):
        policies.LFU(max_rows=0)
    with pytest.raises(ConfigError, match="TTL: steps must be an integer"):
        policies.TTL(steps=1.5)
    for both in ({}, {"steps": 3, "seconds": "3s"}):
        with pytest.raises(ConfigError, match="TTL: give either steps or seconds, got steps="):
            policies.TTL(**both)
    with pytest.raises(ConfigError, match='TTL: seconds must be a time such as "90s"'):
        policies.TTL(seconds="soon")
    with pytest.raises(ConfigError, match=r"TTL: seconds must be a time from 1e-6 to 1e\+10 seconds, got 0"):
        policies.TTL(seconds="0")
    with pytest.raises(ConfigError, match=r"TTL: every must be a time from .* got -1"):
        policies.TTL(seconds=9, every=-1)
    with pytest.raises(ConfigError, match="TTL: every must be an integer"):
        policies.TTL(steps=9, every="1h")
    with pytest.raises(ConfigError, match=r"MinNorm: threshold must lie in \[0, inf\), got -1"):
        policies.MinNorm(threshold=-1)
    with pytest.raises(ConfigError, match="table 'x': max_bytes is 50, but one row takes 72"):
        ops.HashTable(4, optimizers.SGD(), name="x", eviction=policies.LRU(max_bytes=50))

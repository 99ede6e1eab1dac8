from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta import initializers, ops, optimizers, policies
from gmeta.core.errors import ConfigError
from support.reference.table import ReferenceHashTable
from support.tables import assert_agrees, assert_same_tables

pytestmark = pytest.mark.usefixtures("table_device")

IDS = np.arange(300)


def tables(dim=24, optimizer=None, threshold=1000, initializer=None, seed=0, **precision):
    """One of two precisions, and one of float32 that is the same else."""
    settings = (dim, optimizer or optimizers.SGD(1.0), initializer or initializers.Normal(0, 0.1), seed)
    mixed = ops.HashTable(*settings, precision=policies.TwoPrecisions(threshold, **precision))
    return mixed, ops.HashTable(*settings)


def record_bytes(table: ops.HashTable) -> float:
    statistics = table.statistics()
    slot = 16 if table.device == "gpu" else 128 / 9
    return int(statistics.bytes) - slot * int(statistics.capacity)  # but for what little is being drained


def test_a_row_is_half_until_its_frequency_reaches_the_threshold():
    mixed, full = tables(threshold=3)
    rounded = full.lookup(IDS).rows.numpy().astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(mixed.lookup(IDS, insert=False).rows, rounded)
    for half in (300, 300, 0, 0):
        np.testing.assert_array_equal(mixed.lookup(IDS).rows, rounded)
        mixed.lookup(IDS, insert=False)  # is no use
        assert int(mixed.statistics().half_rows) == half
    mixed.lookup([1000])
    assert int(mixed.statistics().half_rows) == 1
    step = np.float32(1e-6)  # far below a half's last place
    mixed.apply_gradients([5, 1000], tf.fill([2, 24], step))
    np.testing.assert_array_equal(mixed.lookup([5]).rows[0], rounded[5] - step)
    assert int(mixed.statistics().half_rows) == 1


def test_a_row_may_be_promoted_and_made_in_the_middle_of_a_batch():
    random = np.random.default_rng(0)
    mixed, full = tables(dim=3, threshold=4, initializer=initializers.Zeros())
    for _ in range(30):
        keys = random.integers(0, 60, 400)  # each about seven times
        np.testing.assert_array_equal(mixed.lookup_keys(keys), full.lookup_keys(keys))
        grads = random.integers(-2, 3, (400, 3)).astype(np.float32)  # exact in float16
        mixed.apply_gradients(keys, grads)
        full.apply_gradients(keys, grads)
        gone = random.integers(0, 60, 20)
        assert int(mixed.remove(gone)) == int(full.remove(gone))
        assert_same_tables(mixed, full)


@pytest.mark.parametrize(("rounding", "unit"), [("nearest", 2.0**-11), ("stochastic", 2.0**-10)])
def test_the_error_of_half_rows_stays_within_its_bound(rounding, unit):
    mixed, full = tables(rounding=rounding)
    steps = 50
    random = np.random.default_rng(1)
    largest = np.zeros((300, 24), np.float32)
    for _ in range(steps):
        grads = random.normal(0, 0.01, (300, 24)).astype(np.float32)
        for table in (mixed, full):
            table.lookup(IDS)
            table.apply_gradients(IDS, grads)
        largest = np.maximum(largest, np.abs(mixed.lookup_keys(IDS, insert=False)))
    error = np.abs(mixed.lookup_keys(IDS).numpy() - full.lookup_keys(IDS).numpy())
    bound = (steps + 1) * (np.maximum(largest * unit, unit * 2.0**-14) * 1.01 + 1e-7)
    assert (error <= bound).all()
    assert 1e-6 < error.mean() < bound.mean() / 4  # roundings mostly cancel


@pytest.mark.parametrize(
    "optimizer",
    [
        optimizers.Adagrad(0.01),
        optimizers.RowWiseAdagrad(0.01),
        optimizers.Momentum(0.01),
        optimizers.Adam(0.01),
        optimizers.AdamW(0.01),
    ],
    ids=lambda optimizer: optimizer.kind,
)
@pytest.mark.parametrize("scale", [1e-5, 1.0])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_half_rows_train_as_float32_rows_do(optimizer, scale, rounding):
    # Gradients of 1e-5 have squares far below the smallest float16.
    mixed, full = tables(optimizer=optimizer, rounding=rounding)
    start = full.lookup(IDS).rows.numpy()
    random = np.random.default_rng(2)
    for _ in range(20):
        grads = (random.normal(0.5, 1.0, (300, 24)) * scale).astype(np.float32)
        for table in (mixed, full):
            table.lookup(IDS)
            table.apply_gradients(IDS, grads)
    expected = full.lookup_keys(IDS).numpy()
    error = np.abs(mixed.lookup_keys(IDS).numpy() - expected)
    moved = np.abs(expected - start)
    assert error.max() < 0.02 * moved.max() + 20 * 2.0**-12
    assert error.mean() < 0.004 * moved.mean() + 2.0**-14


@pytest.mark.parametrize(
    "optimizer",
    [optimizers.SGD(0.5), optimizers.Adagrad(0.5), optimizers.RowWiseAdagrad(0.5)],
    ids=lambda o: o.kind,
)
@pytest.mark.parametrize("half_life", [None, 1, 30])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_reference_rounds_alike(optimizer, rounding, half_life):
    settings = (5, optimizer, initializers.Uniform(-1.0, 1.0), 3)
    precision = policies.TwoPrecisions(3, half_life, rounding)
    table = ops.HashTable(*settings, precision=precision)
    model = ReferenceHashTable(*settings, precision=precision)
    random = np.random.default_rng(3)
    for step in range(12):
        ids = random.integers(0, 40, 30) + step // 5 * 30  # some aren't used any more
        expected = model.lookup(ids)[0]
        np.testing.assert_allclose(table.lookup(ids).rows, expected, rtol=2.0**-9, atol=2.0**-14)
        grads = random.integers(-4, 5, (30, 5)).astype(np.float32) / 8
        table.apply_gradients(ids, grads)
        model.apply_gradients(ids, grads, 0.5)
        assert int(table.statistics().half_rows) == model.half_rows()
    if isinstance(optimizer, optimizers.SGD):  # the others divide, and may round to neighbours
        assert_agrees(table, model)


def test_the_reference_rounds_every_slot_alike():
    settings = (70, optimizers.Momentum(1.0, momentum=0.5), initializers.Uniform(-1.0, 1.0), -7)
    precision = policies.TwoPrecisions(100)
    table = ops.HashTable(*settings, precision=precision)
    model = ReferenceHashTable(*settings, precision=precision)
    random = np.random.default_rng(4)
    keys = random.integers(-(2**63), 2**63 - 1, 20)
    for _ in range(5):
        table.lookup(keys)
        model.lookup(keys)
        grads = random.standard_normal((20, 70)).astype(np.float16).astype(np.float32)
        table.apply_gradients(keys, grads)
        model.apply_gradients(keys, grads, 1.0)
    assert_agrees(table, model)


@settings(max_examples=25)
@given(seed=st.integers(-(2**63), 2**63 - 1), step=st.floats(2.0**-20, 2.0**-8), start=st.floats(0.25, 4.0))
def test_the_mean_of_random_rounding_is_the_number(seed, step, start):
    # 65,536 weights that are each 5 steps from the start: within 6 standard deviations of the mean.
    start, step = float(np.float16(start)), float(np.float32(step))
    mixed, _ = tables(dim=64, initializer=initializers.Constant(start), seed=seed)
    ids = np.arange(1024)
    mixed.lookup(ids)
    for _ in range(5):
        mixed.apply_gradients(ids, tf.fill([1024, 64], step))
    rows = mixed.lookup(ids, insert=False).rows.numpy().astype(np.float64)
    unit = 2.0**-8  # of the last place, at most
    deviation = unit / 2 * np.sqrt(5 / rows.size)
    assert abs(rows.mean() - (start - 5 * step)) < 6 * deviation + 1e-6


def test_small_steps_add_up_at_random_and_are_lost_to_nearest():
    left = {}
    for rounding in ("nearest", "stochastic"):
        mixed, _ = tables(initializer=initializers.Constant(1.0), rounding=rounding)
        mixed.lookup(IDS)
        for _ in range(100):
            mixed.apply_gradients(IDS, tf.fill([300, 24], np.float32(2.0**-14)))
        left[rounding] = mixed.lookup(IDS, insert=False).rows.numpy()
    assert (left["nearest"] == 1).all()
    assert abs(left["stochastic"].mean() - (1 - 100 * 2.0**-14)) < 2.0**-12


def test_runs_repeat_and_other_seeds_round_otherwise():
    rows = []
    for seed in (1, 1, 2):
        mixed, _ = tables(initializer=initializers.Constant(1.0), seed=seed)
        mixed.lookup(IDS)
        mixed.apply_gradients(IDS, tf.fill([300, 24], np.float32(1e-4)))
        rows.append(mixed.lookup(IDS, insert=False).rows.numpy())
    np.testing.assert_array_equal(rows[0], rows[1])
    assert (rows[0] != rows[2]).mean() > 0.1


def test_a_row_cools_down_and_a_use_brings_it_back():
    mixed, full = tables(threshold=2, half_life=8)
    for _ in range(2):
        for table in (mixed, full):
            table.lookup(IDS)
    step = np.float32(2.0**-20)  # far below a half's last place
    for _ in range(8):
        mixed.apply_gradients(IDS[:10], tf.fill([10, 24], step))
    assert int(mixed.statistics().half_rows) == 0  # an effective frequency of 1, half of the threshold
    mixed.apply_gradients(IDS[:10], tf.fill([10, 24], step))
    assert int(mixed.statistics().half_rows) == 290
    expected = full.lookup(IDS, insert=False).rows.numpy().astype(np.float16).astype(np.float32)
    expected[:10] -= 9 * step
    np.testing.assert_allclose(mixed.lookup(IDS, insert=False).rows, expected, rtol=1e-6, atol=1e-7)
    mixed.apply_gradients(IDS[:50], tf.fill([50, 24], step))
    assert int(mixed.statistics().half_rows) == 250  # an update is a use too
    mixed.lookup(IDS[:100])
    assert int(mixed.statistics().half_rows) == 200
    mixed.lookup(IDS)
    assert int(mixed.statistics().half_rows) == 0


@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_restores_rows_that_have_cooled_down(tmp_path: Path, whole):
    def make() -> ops.HashTable:
        precision = policies.TwoPrecisions(2, half_life=3)
        return ops.HashTable(6, optimizers.Adam(0.1), initializers.Normal(0, 1), seed=4, precision=precision)

    def train(table: ops.HashTable, end: int) -> None:
        table.lookup(IDS[:end])
        table.apply_gradients(IDS[:end], tf.ones([end, 6]))

    saved, restored = make(), make()
    for end in (300, 300, 100, 100, 100, 100, 200, 50):
        train(saved, end)
    halves = int(saved.statistics().half_rows)
    assert halves == 100
    if whole:
        path = tf.train.Checkpoint(table=saved).save(tmp_path / "model")
        tf.train.Checkpoint(table=restored).restore(path).assert_consumed()
    else:  # piece by piece, over rows that are there
        train(restored, 20)
        records = saved.export()
        restored.import_(type(records)(*(column[:0] for column in records[:5]), records.step), replace=True)
        for part in (slice(0, 120), slice(120, None)):
            restored.import_(type(records)(*(column[part] for column in records[:5]), records.step))
    for end in (50, 50, 300, 10, 10, 10, 10):
        assert int(restored.statistics().half_rows) == int(saved.statistics().half_rows)
        assert_same_tables(saved, restored)
        train(saved, end)
        train(restored, end)


def test_numbers_that_float16_cannot_hold_are_its_largest():
    mixed, _ = tables(dim=2, initializer=initializers.Zeros())
    mixed.lookup([1])
    mixed.apply_gradients([1], [[1e6, -3e38]])
    np.testing.assert_array_equal(mixed.lookup([1]).rows, [[-65504.0, 65504.0]])


@pytest.mark.parametrize("optimizer", [optimizers.SGD(), optimizers.Adam()], ids=lambda o: o.kind)
def test_half_rows_take_half_the_memory(optimizer):
    mixed, full = tables(dim=64, optimizer=optimizer, threshold=2)
    if full.tiers is not None:
        pytest.skip("tiers bound the memory")
    ids = np.arange(100_000)
    for table in (mixed, full):
        table.lookup(ids)
    numbers = 64 + optimizer.slot_floats(64)
    saved = int(full.statistics().bytes) - int(mixed.statistics().bytes)
    assert saved >= 0.95 * 2 * numbers * len(ids)
    mixed.lookup(ids)  # promotes all; the half records are used again by rows to come
    before = record_bytes(mixed)
    mixed.lookup(np.arange(1_000_000, 1_090_000))
    assert record_bytes(mixed) < 1.1 * before


def test_a_bound_in_bytes_holds_more_half_rows():
    bound = 1_000_000
    sizes = []
    for precision in (None, policies.TwoPrecisions(10)):
        table = ops.HashTable(
            32,
            optimizers.Adam(),
            initializers.Zeros(),
            eviction=policies.LRU(max_bytes=bound),
            precision=precision,
        )
        for start in range(0, 20_000, 500):
            table.lookup(np.arange(start, start + 500))
        table.evict()
        sizes.append(int(table.size()))
        row = 48 + 8 + (4 if precision is None else 2) * 96
        assert 0.8 * bound < sizes[-1] * row <= bound
    assert sizes[1] > 1.6 * sizes[0]


def test_a_checkpoint_restores_each_row_to_its_precision(tmp_path: Path):
    def make(precision: policies.TwoPrecisions | None) -> ops.HashTable:
        return ops.HashTable(6, optimizers.Adam(0.1), initializers.Normal(0, 1), seed=4, precision=precision)

    saved = make(policies.TwoPrecisions(2))
    for ids in (IDS, IDS[:100]):
        saved.lookup(ids)
        saved.apply_gradients(ids, tf.ones([len(ids), 6]))
    path = tf.train.Checkpoint(table=saved).save(tmp_path / "model")
    restored, full, wider = make(policies.TwoPrecisions(2)), make(None), make(policies.TwoPrecisions(3))
    restored.lookup(IDS)  # the rows of frequency 2 take the place of half ones
    for table, half in ((restored, 200), (full, 0), (wider, 300)):
        tf.train.Checkpoint(table=table).restore(path).assert_consumed()
        assert int(table.statistics().half_rows) == half
    assert_same_tables(saved, restored)
    assert_same_tables(saved, full)  # float32 holds what half rows held
    for table in (saved, restored):
        table.lookup(IDS)
        table.apply_gradients(IDS, tf.ones([300, 6]))
    assert_same_tables(saved, restored)
    restored.import_(saved.export())  # over rows that are there
    assert int(restored.statistics().half_rows) == 0


def test_a_threshold_below_two_is_refused():
    with pytest.raises(ConfigError, match="TwoPrecisions: threshold must be an integer from 2 to"):
        policies.TwoPrecisions(1)


def test_a_half_life_and_a_rounding_have_their_bounds():
    with pytest.raises(ConfigError, match="TwoPrecisions: half_life must be an integer from 1 to 2147483647"):
        policies.TwoPrecisions(2, half_life=0)
    with pytest.raises(ConfigError, match="TwoPrecisions: rounding must be 'stochastic' or 'nearest'"):
        policies.TwoPrecisions(2, rounding="up")  # type: ignore[arg-type]

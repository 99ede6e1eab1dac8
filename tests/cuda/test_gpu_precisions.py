"""The GPU table of two precisions against the NumPy reference: rounding, promotion and statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gmeta.initializers import Constant, Normal, Uniform
from gmeta.optimizers import SGD, Adagrad, Adam, Momentum, RowWiseAdagrad, SparseOptimizer
from gmeta.policies import LFU, LRU, TTL, CountAdmission, MinNorm
from support.gpu.cuda_library import CudaError
from support.gpu.gpu_table import EXTREMES, GpuTable, check_equal, check_trace, pair

# Optimizers that NumPy computes to the same bit: with others, a number may be rounded to a neighbour.
EXACT: list[SparseOptimizer] = [SGD(), Adagrad(), Momentum(), Momentum(nesterov=True)]


@pytest.mark.parametrize("optimizer", EXACT, ids=lambda o: o.kind)
@pytest.mark.parametrize("dim", [1, 3, 8, 36, 128])
@pytest.mark.parametrize(("half_below", "half_life"), [(2, 0), (5, 0), (3, 2)])
@pytest.mark.parametrize("round_at_random", [False, True])
def test_a_trace_leaves_what_it_leaves_in_the_reference(
    optimizer: SparseOptimizer, dim: int, half_below: int, half_life: int, round_at_random: bool
) -> None:
    halves = {"half_below": half_below, "half_life": half_life, "round_at_random": round_at_random}
    table, model = pair(dim, optimizer, Uniform(-1, 1), 11, **halves)
    check_trace(table, model, calls=40, keys=400, batch=300)


@pytest.mark.parametrize("dim", [1, 8, 20, 64, 128, 260])
def test_initial_rows_are_rounded_as_they_are_stored(dim: int) -> None:
    keys = np.concatenate([EXTREMES, np.arange(1000)])
    table, model = pair(dim, Adam(), Normal(0.5, 2.0), 9, half_below=3)
    for insert in (False, True, True, True, False):
        np.testing.assert_array_equal(table.lookup_keys(keys, insert), model.lookup_keys(keys, insert))
    check_equal(table, model)


@pytest.mark.parametrize("optimizer", [Adam(), RowWiseAdagrad()], ids=lambda o: o.kind)
def test_a_step_of_a_half_row_is_rounded_once(optimizer: SparseOptimizer) -> None:
    """One step from equal records: by a rounding at most."""
    keys, rng = np.arange(500), np.random.default_rng()
    table, model = pair(16, optimizer, Uniform(-1, 1), 2, half_below=1000)
    table.lookup_keys(keys)
    model.lookup_keys(keys)
    grads = rng.standard_normal((500, 16)).astype(np.float32)
    table.apply_gradients(keys, grads, 0.1, distinct=True)
    model.apply_gradients(keys, grads, 0.1)
    found = table.export().columns
    order = np.argsort(found["keys"])
    records = [model.records[key] for key in keys.tolist()]
    rows, slots = (np.array([getattr(r, part) for r in records]) for part in ("row", "slots"))
    np.testing.assert_allclose(found["rows"][order], rows, rtol=2.0**-9, atol=2.0**-23)
    np.testing.assert_allclose(found["slots"][order], slots, rtol=2.0**-7)
    assert (found["rows"][order] == rows).mean() > 0.99


def test_numbers_beyond_a_halfs_range_are_its_largest() -> None:
    table = GpuTable(4, SGD(), Constant(0.0), half_below=5)
    keys = np.array([1])
    table.lookup_keys(keys)
    table.apply_gradients(keys, np.array([[1e6, -1e6, -np.inf, 2e-8]]), 1.0)
    np.testing.assert_array_equal(table.lookup_keys(keys), [[-65504.0, 65504.0, 65504.0, 0.0]])


def test_one_key_many_times_is_promoted_once() -> None:
    table, model = pair(8, Adagrad(), Normal(), 3, half_below=5000)
    keys = np.full(20_000, 77)
    keys[::7] = 5  # 2,858 uses a batch: the second batch promotes it
    for _ in range(3):
        np.testing.assert_array_equal(table.lookup_keys(keys), model.lookup_keys(keys))
        assert table.statistics()["half_rows"] == model.half_rows()
    check_equal(table, model)


def test_rows_are_promoted_while_the_table_grows() -> None:
    table, model = pair(4, Adagrad(), Normal(), 5, half_below=2)
    rng = np.random.default_rng()
    for size in (10, 3000, 20_000, 60_000, 60_000):
        keys = rng.integers(0, 80_000, size)
        np.testing.assert_array_equal(table.lookup_keys(keys), model.lookup_keys(keys))
        keys = np.unique(keys)
        grads = rng.standard_normal((len(keys), 4)).astype(np.float32)
        table.apply_gradients(keys, grads, 0.1, True)
        model.apply_gradients(keys, grads, 0.1)
        gone = rng.integers(0, 80_000, size // 4)
        assert table.remove(gone) == model.remove(gone)
    check_equal(table, model)


def test_half_rows_take_half_the_memory_and_it_is_used_again() -> None:
    half, full = (GpuTable(64, Adam(), Constant(), half_below=threshold) for threshold in (2, 0))
    keys = np.arange(100_000)
    for table in (half, full):
        table.lookup_keys(keys, distinct=True)
    sizes = [table.statistics()["bytes"] - 16 * table.statistics()["capacity"] for table in (half, full)]
    assert sizes[0] < 0.55 * sizes[1]
    half.lookup_keys(keys, distinct=True)  # promotes all
    assert half.statistics()["half_rows"] == 0
    before = half.statistics()
    half.lookup_keys(keys + 10**6, distinct=True)  # into the half rows that are free
    after = half.statistics()
    assert after["half_rows"] == len(keys)
    assert after["bytes"] - 16 * after["capacity"] == before["bytes"] - 16 * before["capacity"]


def test_an_import_gives_each_row_the_form_of_its_frequency() -> None:
    table, model = pair(12, Adagrad(), Normal(), 8, half_below=4)
    check_trace(table, model, calls=30, keys=2000, batch=2000)
    saved = table.export()
    for half_below in (0, 2, 4, 9):
        for replace in (True, False):
            other = GpuTable(12, Adagrad(), Normal(), 8, half_below=half_below)
            for _ in range(3):
                other.lookup_keys(saved.columns["keys"][::2])  # some change their form
            other.import_(saved.columns, saved.step, replace=replace)
            found = other.export()
            np.testing.assert_array_equal(found.columns["frequency"], saved.columns["frequency"])
            rare = saved.columns["frequency"] < half_below
            assert other.statistics()["half_rows"] == rare.sum()
            if half_below <= 4:  # those that are half held halves before
                np.testing.assert_array_equal(found.columns["rows"], saved.columns["rows"])
                np.testing.assert_array_equal(found.columns["slots"], saved.columns["slots"])


POLICIES: list[dict[str, Any]] = [
    {"admission": CountAdmission(3)},
    {"eviction": LRU(max_rows=700)},
    {"eviction": LFU(max_bytes=90_000)},
    {"eviction": LRU(max_bytes=250_000)},
    {"eviction": TTL(steps=3, max_rows=4000)},
    {"eviction": MinNorm(threshold=0.9, every=2)},
    {"admission": CountAdmission(2), "eviction": LRU(max_bytes=200_000)},
]


@pytest.mark.parametrize("policies", POLICIES, ids=lambda p: "_".join(type(v).__name__ for v in p.values()))
@pytest.mark.parametrize("half_below", [2, 4])
def test_policies_decide_as_on_the_cpu(policies: dict[str, Any], half_below: int) -> None:
    table, model = pair(4, Adagrad(), Uniform(-1, 1), 21, half_below=half_below, half_life=3, **policies)
    check_trace(table, model, calls=60, keys=6000, batch=1500)
    assert table.evict() == model.evict()
    check_equal(table, model)


def test_rows_of_both_forms_may_be_in_host_memory() -> None:
    table, model = pair(64, Momentum(), Normal(), 4, hbm_rows=1, half_below=2)
    rng = np.random.default_rng()
    for _ in range(3):
        keys = rng.integers(0, 50_000, 12_000)
        np.testing.assert_array_equal(table.lookup_keys(keys), model.lookup_keys(keys))
        keys = np.unique(keys)
        grads = rng.standard_normal((len(keys), 64)).astype(np.float32)
        table.apply_gradients(keys, grads, 0.1, True)
        model.apply_gradients(keys, grads, 0.1)
    check_equal(table, model)


def test_an_emptied_table_begins_anew() -> None:
    table, model = pair(8, SGD(), Normal(), 1, half_below=3)
    keys = np.arange(5000)
    for _ in range(4):
        table.lookup_keys(keys)
    table.clear()
    assert table.statistics()["half_rows"] == table.size() == 0
    for _ in range(2):
        np.testing.assert_array_equal(table.lookup_keys(keys), model.lookup_keys(keys))
    assert table.statistics()["half_rows"] == 5000


def test_a_threshold_is_at_least_two() -> None:
    with pytest.raises(CudaError, match=r"half_below must be 0, or 2 to 2\^32 - 1, got 1"):
        GpuTable(4, SGD(), Constant(), half_below=1)

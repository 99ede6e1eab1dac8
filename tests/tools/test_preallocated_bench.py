"""The preallocated tables that ours is measured beside: who has a row, who loses it, what training does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"
DIM = 3


@pytest.fixture(scope="module", params=["numpy", "torch"])
def form(request) -> Iterator[Any]:
    if request.param == "torch":
        pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCH))
        module = importlib.import_module(f"parts.preallocated.{request.param}_form")
        yield Form(module, request.param)
    for name in [each for each in sys.modules if each.split(".")[0] in ("harness", "parts")]:
        sys.modules.pop(name)


class Form:
    """One of them, with NumPy's arrays."""

    def __init__(self, module: Any, kind: str) -> None:
        self._module, self._kind = module, kind

    def make(self, capacity: int, interval: int) -> Any:
        if self._kind == "numpy":
            return self._module.NumpyForm(capacity, DIM, interval)
        return self._module.TorchForm(capacity, DIM, interval, device="cpu")

    def array(self, values: Any) -> Any:
        values = np.asarray(values)
        if self._kind == "torch":
            import torch

            return torch.tensor(values)
        return values

    def step(self, table: Any, ids: list[int], gradient: float = 1.0) -> None:
        given = np.full([len(ids), DIM], gradient, np.float32)
        if self._kind == "numpy":
            import tensorflow as tf

            table.step(np.array(ids), tf.constant(given))
        else:
            table.step(self.array(ids), self.array(given))

    def rows(self, table: Any, ids: list[int]) -> dict[int, np.ndarray]:
        """Id -> row, of those that have one."""
        at, found = (np.asarray(each) for each in table.find(self.array(np.sort(ids))))
        slots = np.asarray(table._slots)
        rows = np.array(table.rows)  # a copy
        return {
            key: rows[slots[place]] for key, place, has in zip(np.sort(ids), at, found, strict=True) if has
        }


def test_ids_wait_for_a_row_until_the_merge(form):
    table = form.make(8, interval=2)
    form.step(table, [5, -3, 5])
    assert form.rows(table, [-3, 5, 9]) == {}
    form.step(table, [9])
    assert sorted(form.rows(table, [-3, 4, 5, 9])) == [-3, 5, 9]


def test_training_changes_the_rows_of_a_batch_by_adagrad_and_no_others(form):
    table = form.make(8, interval=1)
    form.step(table, [1, 2, 3])
    before = form.rows(table, [1, 2, 3])
    form.step(table, [3, 1, 3], gradient=2.0)
    after = form.rows(table, [1, 2, 3])
    np.testing.assert_array_equal(after[2], before[2])
    for key in (1, 3):
        step = 1e-3 * 2.0 / (np.sqrt(0.1 + 2.0**2) + 1e-7)
        np.testing.assert_allclose(after[key], before[key] - step, atol=1e-6)


def test_the_least_used_lose_their_rows_and_the_others_keep_them(form):
    table = form.make(3, interval=1)
    form.step(table, [10, 10, 10, 20, 30, 30])
    kept = form.rows(table, [10, 30])
    form.step(table, [25, 25, 25, 25])
    rows = form.rows(table, [10, 20, 25, 30])
    assert sorted(rows) == [10, 25, 30]
    for key, row in kept.items():
        np.testing.assert_array_equal(rows[key], row)
    assert not any(np.array_equal(rows[25], row) for row in kept.values())


def test_as_a_model_of_counts(form):
    """Random batches: the ids with rows are those of the most uses, and no row is shared."""
    table, uses, random = form.make(20, interval=1), {}, np.random.default_rng(0)
    for _ in range(30):
        ids = random.zipf(1.3, 40).clip(max=200)
        before = dict(uses)
        for key in ids.tolist():
            uses[key] = uses.get(key, 0) + 1
        form.step(table, ids.tolist())
        has = form.rows(table, sorted(uses))
        assert len(has) == min(20, len(uses))
        assert len({row.tobytes() for row in has.values()}) == len(has)
        gone = sorted(set(uses) - set(has))
        if gone:
            assert max(uses[key] for key in gone) <= min(uses[key] for key in has)
        assert before.keys() <= uses.keys()
        for key in gone:  # a count is forgotten with the row
            del uses[key]


def test_it_takes_all_of_its_memory_at_the_start(form):
    table = form.make(1_000, interval=1)
    start = table.bytes()
    form.step(table, list(range(500)))
    assert table.bytes() == start == 1_000 * (24 + 8 * DIM) + 8 * DIM

"""Compares tables record by record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gmeta.ops import HashTable
from gmeta.ops.device import asked_place
from gmeta.policies import Tiers
from support.reference.table import ReferenceHashTable

if TYPE_CHECKING:
    import pytest


def give_tiers(patch: pytest.MonkeyPatch, tiers: Tiers, *, like_gpu: bool = False) -> None:
    """Give all later tables these tiers, unless they have some or are on another device.

    Args:
      patch: The monkeypatch, which undoes it.
      tiers: The tiers.
      like_gpu: Whether pipelines prefetch the tables' rows as they do those of tables on a GPU.
    """
    make = HashTable.__init__

    def make_tiered(self: HashTable, *args: Any, **kwargs: Any) -> None:
        on_gpu = asked_place(kwargs.get("device", "auto"), "a table") == "gpu"
        fit = tiers if on_gpu == (tiers.hbm_rows is not None) else None
        make(self, *args, **{**kwargs, "tiers": kwargs.get("tiers") or fit})
        if like_gpu:
            self._tiers = Tiers(hbm_rows=1)

    patch.setattr(HashTable, "__init__", make_tiered)


def small_tiers(folder: Path) -> Tiers:
    """Return tiers that keep few rows in memory and the others in files of a folder, for tables anywhere."""
    on_gpu = asked_place("auto", "a table") == "gpu"
    return Tiers(host_bytes=100, ssd=str(folder), hbm_rows=4 if on_gpu else None)


def sorted_records(table: HashTable) -> dict[str, npt.NDArray[Any]]:
    """A table's export as arrays, its records in the order of their keys."""
    records = {name: value.numpy() for name, value in table.export()._asdict().items()}
    order = np.argsort(records["keys"])
    return {name: value[order] if value.ndim else value for name, value in records.items()}


def assert_same_tables(a: HashTable, b: HashTable) -> None:
    """Asserts that two tables hold the same records, to the last bit, and are at the same step."""
    mine, other = sorted_records(a), sorted_records(b)
    for name, value in mine.items():
        np.testing.assert_array_equal(value, other[name], name)


def assert_agrees(table: HashTable, model: ReferenceHashTable) -> None:
    """Asserts that a table and its reference hold the same records, step and counts."""
    assert int(table.step()) == model.step
    statistics = table.statistics()
    assert int(statistics.half_rows) == model.half_rows()
    assert {name: int(getattr(statistics, name)) for name in model.counts} == model.counts
    records = sorted_records(table)
    keys = sorted(model.records)
    assert records["keys"].tolist() == keys
    assert int(table.size()) == model.size() == len(keys)
    expected = [model.records[key] for key in keys]
    assert records["frequency"].tolist() == [record.frequency for record in expected]
    assert records["last_step"].tolist() == [record.last_step for record in expected]
    if expected:
        np.testing.assert_allclose(records["rows"], np.stack([r.row for r in expected]), rtol=2e-6, atol=1e-7)
        # Ftrl's slot sums differences of numbers near 1: a few of their last bits are many bits of a small
        # sum.
        slots = np.stack([record.slots for record in expected])
        np.testing.assert_allclose(records["slots"], slots, rtol=2e-6, atol=1e-6)

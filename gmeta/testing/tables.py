"""Compares tables record by record."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.ops import HashTable


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

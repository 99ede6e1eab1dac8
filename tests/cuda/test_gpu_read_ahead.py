"""Rows that a GPU table reads ahead: every number is that of a table that only looks up."""

from __future__ import annotations

import numpy as np
import pytest

from gmeta.initializers import Uniform
from gmeta.optimizers import SGD, Adam, RowWiseAdagrad, SparseOptimizer
from gmeta.policies import LRU, CountAdmission, MinNorm
from support.gpu.gpu_table import GpuTable

POLICIES = [
    (None, None),
    (CountAdmission(2), None),
    (None, LRU(max_rows=300)),
    (None, MinNorm(threshold=1.0, every=2)),
]


@pytest.mark.parametrize("optimizer", [SGD(), Adam(), RowWiseAdagrad()], ids=lambda o: o.kind)
@pytest.mark.parametrize(("admission", "eviction"), POLICIES)
@pytest.mark.parametrize("half_below", [0, 3])
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_peeking_early_and_rereading_is_looking_up(
    optimizer: SparseOptimizer,
    admission: CountAdmission | None,
    eviction: LRU | MinNorm | None,
    half_below: int,
    dim: int,
) -> None:
    rng = np.random.default_rng()
    plain, ahead = (
        GpuTable(dim, optimizer, Uniform(-1.0, 1.0), 5, admission, eviction, half_below=half_below)
        for _ in range(2)
    )
    peeked, unchanged = [], 0
    for _ in range(150):
        keys = rng.integers(0, 600, rng.integers(1, 300))
        distinct = bool(rng.integers(2))
        if distinct:
            keys = rng.permutation(np.unique(keys))
        match rng.integers(9):
            case 0 | 1 | 2:
                peeked.append((keys, distinct, *ahead.peek(keys)))
            case 3 | 4 | 5 if peeked:
                keys, distinct, rows, stamps = peeked.pop(rng.integers(len(peeked)))
                insert = bool(rng.integers(4))
                expected = plain.lookup_keys(keys, insert, distinct)
                found, changed = ahead.reread(keys, rows, stamps, insert, distinct)
                np.testing.assert_array_equal(found, expected)
                unchanged += len(keys) - changed
            case 6:
                assert plain.remove(keys[:3]) == ahead.remove(keys[:3])
                assert plain.evict() == ahead.evict()
            case _:
                gradients = rng.normal(size=(len(keys), dim)).astype(np.float32)
                for table in (plain, ahead):
                    table.apply_gradients(keys, gradients, 0.1, distinct)
    one, other = plain.export(), ahead.export()
    for name, column in one.columns.items():
        np.testing.assert_array_equal(column, other.columns[name], name)
    counts = [table.statistics() for table in (plain, ahead)]
    for name in (
        "size",
        "hits",
        "misses",
        "inserts",
        "removes",
        "updates",
        "ignored",
        "rejects",
        "evictions",
    ):
        assert counts[0][name] == counts[1][name], name
    assert unchanged > 0

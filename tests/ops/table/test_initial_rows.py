from __future__ import annotations

import numpy as np
import pytest

from gmeta import initializers, ops
from support.reference.table import initial_rows

pytestmark = pytest.mark.usefixtures("table_device")

INT64 = np.iinfo(np.int64)
EXTREMES = [INT64.min, INT64.min + 1, -1, 0, 1, INT64.max - 1, INT64.max]


@pytest.mark.parametrize(
    "initializer",
    [
        initializers.Uniform(-2, 3),
        initializers.Normal(0, 1),
        initializers.TruncatedNormal(0.5, 2),
        initializers.Constant(7),
    ],
)
def test_initial_rows_are_the_references_to_the_last_bit(initializer):
    keys = np.array([*EXTREMES, *np.random.default_rng(1).integers(INT64.min, INT64.max, 2000)])
    expected = initial_rows(initializer, -3, keys, 37)
    rows = ops.HashTable(37, initializer=initializer, seed=-3).lookup_keys(keys)
    np.testing.assert_array_equal(rows, expected)


def test_initial_rows_do_not_depend_on_order_or_insertion():
    keys = np.arange(-500, 500)
    shuffled = np.random.default_rng(0).permutation(keys)
    together = ops.HashTable(6, initializer=initializers.Normal(0, 1), seed=9)
    apart = ops.HashTable(6, initializer=initializers.Normal(0, 1), seed=9)
    rows = together.lookup_keys(keys)
    for part in np.split(shuffled, 20):
        apart.lookup(part)
    np.testing.assert_array_equal(apart.lookup_keys(keys, insert=False), rows)
    never = ops.HashTable(6, initializer=initializers.Normal(0, 1), seed=9)
    np.testing.assert_array_equal(never.lookup_keys(keys, insert=False), rows)
    assert int(never.size()) == 0
    other_seed = ops.HashTable(6, initializer=initializers.Normal(0, 1), seed=10)
    assert np.mean(other_seed.lookup_keys(keys) == rows) < 0.001

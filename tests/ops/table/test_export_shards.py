from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings

from gmeta import initializers, ops, optimizers
from gmeta.core.native import load_op_library
from support.reference.table import logical_shards
from support.tables import sorted_records

pytestmark = pytest.mark.usefixtures("table_device")


def small_table(keys: int = 3000) -> ops.HashTable:
    table = ops.HashTable(3, optimizers.Adam(0.1), initializers.Normal(), seed=4)
    for begin in range(0, keys, 1000):
        lookup = table.lookup(np.arange(begin, begin + 1000) * 7919)
        table.apply_gradients(lookup.keys, tf.ones_like(lookup.rows))
    return table


@settings(max_examples=20, deadline=None)
@given(cuts=st.sets(st.integers(0, 1024), max_size=5))
def test_any_ranges_together_hold_the_whole_table(cuts):
    table = small_table()
    cuts = sorted(cuts | {0, 1024})
    parts = [table.export_shards(first, last) for first, last in itertools.pairwise(cuts)]
    whole = sorted_records(table)
    keys = np.concatenate([part.keys for part in parts])
    shards = logical_shards(keys)
    assert np.all(np.lexsort((keys, shards)) == np.arange(len(keys)))
    order = np.argsort(keys)
    for name in ("keys", "rows", "slots", "frequency", "last_step"):
        got = np.concatenate([getattr(part, name) for part in parts])[order]
        np.testing.assert_array_equal(got, whole[name], name)
    live = np.concatenate([part.live for part in parts])
    np.testing.assert_array_equal(live, np.bincount(shards, minlength=1024))
    for part, first, last in zip(parts, cuts, cuts[1:], strict=False):
        inside = logical_shards(part.keys)
        np.testing.assert_array_equal(
            part.row_splits, np.searchsorted(inside, np.arange(first, last + 1), side="left")
        )


def test_only_what_was_touched_since_a_step():
    table = small_table()
    since = int(table.step())
    table.lookup([7919, -1])
    table.apply_gradients([0], np.ones((1, 3), np.float32))
    touched = table.export_shards(0, 1024, min_last_step=since).keys.numpy()
    # The last 1000 keys were updated in the very step `since`.
    assert set(touched) == {0, 7919, -1, *(np.arange(2000, 3000) * 7919)}
    assert set(table.export_shards(0, 1024, min_last_step=since + 1).keys.numpy()) == {0}


def test_the_journal_tells_removals_once_they_are_saved():
    table = small_table()
    table.start_journal(1000)
    table.remove(np.arange(10) * 7919)
    table.remove([12345678])  # absent
    expected = set(np.arange(10) * 7919)
    for _ in range(2):  # a save that failed is made again
        part = table.export_shards(0, 1024)
        assert bool(part.journal_whole)
        assert set(part.removed.numpy()) == expected
        np.testing.assert_array_equal(
            part.removed_splits, np.searchsorted(logical_shards(part.removed), np.arange(1025))
        )
    table.journal_saved()
    assert len(table.export_shards(0, 1024).removed) == 0
    assert bool(table.journal_whole())
    table.import_(table.export())
    assert not bool(table.journal_whole())


def test_a_range_or_limit_that_cannot_be_is_refused():
    table = small_table(1000)
    for first, last in ((-1, 3), (5, 4), (0, 1025)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[first, last\) within \[0, 1024\)"):
            table.export_shards(first, last)
    with pytest.raises(tf.errors.InvalidArgumentError, match="min_last_step must lie in"):
        table.export_shards(0, 1, min_last_step=-1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="limit must be at least 0, got -1"):
        table.start_journal(-1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must have shape"):
        load_op_library("ops").gmeta_hash_table_export_shards(table.resource_handle, [1, 2, 3], 0)


def test_the_reference_knows_the_extremes():
    keys = np.array([np.iinfo(np.int64).min, -1, 0, np.iinfo(np.int64).max])
    table = ops.HashTable(1, optimizers.SGD(0.1))
    table.lookup(keys)
    splits = table.export_shards(0, 1024).row_splits.numpy()
    np.testing.assert_array_equal(np.diff(splits), np.bincount(logical_shards(keys), minlength=1024))


def test_an_export_for_serving_leaves_the_slots_out():
    table = small_table()
    whole, weights = table.export(), table.export(with_slots=False)
    assert weights.slots.shape == (len(whole.keys), 0)
    assert whole.slots.shape == (len(whole.keys), 6)
    for name in ("keys", "rows", "frequency", "last_step", "step"):
        np.testing.assert_array_equal(getattr(weights, name), getattr(whole, name), name)

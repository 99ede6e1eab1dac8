"""The pure functions: order of rows, batches, repeated keys, selection, and the places of batches."""

import itertools
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.source import take
from support.reference.table import splitmix64

SMALL = st.integers(-2, 2)
FLOATS = st.sampled_from([-1.5, -0.0, 0.0, 0.5, math.inf])
ROWS = st.lists(st.tuples(SMALL, SMALL, FLOATS, st.lists(SMALL, max_size=3), SMALL), min_size=1, max_size=40)
NAMES = ("task", "time", "score", "tags", "item")


def as_columns(rows):
    task, time, score, tags, item = zip(*rows, strict=True)
    splits = np.cumsum([0, *map(len, tags)])
    return {
        "task": np.array(task, np.int64),
        "time": np.array(time, np.int64),
        "score": np.array(score, np.float32),
        "tags": (np.array([tag for row in tags for tag in row], np.int64), splits),
        "item": np.array(item, np.int64),
    }


def rank(row):
    """What rows are compared by, on Python's own values; the sign bit tells the zeros apart."""
    task, time, score, tags, item = row
    return task, time, (score, math.copysign(1, score)), (len(tags), *tags), item


@given(ROWS)
def test_rows_are_sorted_by_all_columns(rows):
    order = plan.row_order(as_columns(rows), NAMES)
    assert sorted(order.tolist()) == list(range(len(rows)))
    assert [rank(rows[place]) for place in order] == sorted(map(rank, rows))


@given(rows=ROWS, data=st.data())
def test_the_order_of_the_input_does_not_matter(rows, data):
    def in_order(rows):
        columns = as_columns(rows)
        found = take(columns, plan.row_order(columns, NAMES))
        return [
            part.tobytes() for name in NAMES for part in (found[name] if name == "tags" else [found[name]])
        ]

    assert in_order(rows) == in_order(data.draw(st.permutations(rows)))


def test_sorted_rows_stay_and_an_empty_table_has_an_order():
    rows = [(1, time, 0.5, [], 0) for time in range(5)]
    assert plan.row_order(as_columns(rows), NAMES).tolist() == [0, 1, 2, 3, 4]
    empty = {"task": np.zeros(0, np.int64), "time": np.zeros(0, np.int64)}
    assert plan.row_order(empty, ("task", "time")).tolist() == []


@given(st.lists(st.integers(1, 7), max_size=8), st.integers(0, 5))
def test_positions_count_in_each_task_from_where_the_first_one_stands(sizes, first):
    task = np.repeat(np.arange(len(sizes)), sizes)
    starts = [first, *([0] * (len(sizes) - 1))] if sizes else []
    expected = [start + place for start, size in zip(starts, sizes, strict=True) for place in range(size)]
    assert plan.positions(task, first).tolist() == expected


@given(size=st.integers(1, 300), batch_rows=st.integers(1, 120))
def test_batches_are_consecutive_even_and_not_too_small(size, batch_rows):
    batch = plan.batch_of(np.arange(size), np.full(size, size), batch_rows)
    sizes = np.bincount(batch)
    assert (np.diff(batch) >= 0).all()
    assert len(sizes) == plan.batch_count(np.array([size]), batch_rows)[0]
    assert min(sizes) >= min(size, batch_rows)
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) < 2 * batch_rows
    assert sizes.tolist() == [len(part) for part in np.array_split(np.arange(size), len(sizes))]


def test_without_a_batch_size_a_task_is_a_batch():
    assert plan.batch_of(np.arange(9), np.full(9, 9), None).tolist() == [0] * 9


def test_the_batch_of_a_row_needs_no_other_row():
    """A task of 10^12 rows on many workers: each cuts its own part."""
    size, batch_rows = 10**12 + 7, 1000
    position = np.array([0, 10**11, size - 1])
    batch = plan.batch_of(position, np.full(3, size), batch_rows)
    assert batch.tolist() == [0, batch[1], size // batch_rows - 1]
    before, after = plan.batch_of(np.array([1007, 7 * 1001 + 993 * 1000]), np.full(2, size), batch_rows)
    assert (before, after) == (1, 1000)


def test_a_repeated_key_keeps_its_earliest_row():
    columns = {
        "task": np.array([1, 1, 1, 2, 2]),
        "item": np.array([7, 8, 7, 7, 7]),
        "day": np.array([1, 1, 2, 1, 1]),
    }
    assert plan.find_repeated(columns, "task", ["item"]).tolist() == [False, False, True, False, True]
    assert plan.find_repeated(columns, "task", ["item", "day"]).tolist() == [False, False, False, False, True]


@pytest.mark.parametrize(("size", "kept"), [(1, False), (12, False), (13, True), (100, True), (101, False)])
def test_the_bounds_of_the_selection_are_inclusive(size, kept):
    config = PlanConfig(min_rows=13, max_rows=100)
    assert plan.select_tasks(np.array([size]), config).tolist() == [kept]
    assert bool(plan.left_out(np.array([size]), config)) == (not kept)


def test_without_an_upper_bound_all_are_kept():
    assert plan.select_tasks(np.array([1, 10**9]), PlanConfig()).all()
    assert plan.left_out(np.array([1, 10**9]), PlanConfig()) == {}


def test_what_is_left_out_is_counted_by_reason():
    assert plan.left_out(np.array([3, 4, 5, 9, 11]), PlanConfig(min_rows=5, max_rows=9)) == {
        "task has fewer than 5 rows": (7, 2),
        "task has more than 9 rows": (11, 1),
    }


def test_splits():
    tasks = np.array([-10, -3, 0, 4, 5])
    assert plan.splits(PlanConfig(cold_modulus=5)) == ("warm", "cold")
    assert plan.split_of(tasks, PlanConfig(cold_modulus=5)).tolist() == [1, 0, 1, 0, 1]
    assert plan.splits(PlanConfig()) == ("train",)
    assert plan.split_of(tasks, PlanConfig()).tolist() == [0] * 5


def test_the_reference_is_splitmix64():
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the generator's first output from state 0


@given(seed=st.integers(0, 2**63 - 1), task=st.integers(-(2**63), 2**63 - 1), number=st.integers(0, 1000))
def test_order_key(seed, task, number):
    key = plan.order_key(seed, np.array([task], np.int64), np.array([number], np.int64))
    unsigned = struct.unpack("<Q", struct.pack("<q", task))[0]
    assert int(key[0]) == splitmix64(splitmix64(splitmix64(seed) ^ unsigned) ^ number)


def test_order_is_pinned():
    """Data sets that are prepared elsewhere and later have this order too."""
    key = plan.order_key(0, np.arange(1, 9), np.zeros(8, np.int64))
    assert np.argsort(key).tolist() == [4, 2, 0, 6, 3, 5, 1, 7]


@given(shards=st.integers(1, 70))
def test_shards_are_equal_ranges_of_the_key(shards):
    edges = [(number << 64) // shards for number in range(1, shards)]
    keys = np.array(
        [0, *itertools.chain(*((edge - 2**33, edge + 2**33) for edge in edges)), 2**64 - 1], np.uint64
    )
    expected = [number for number in range(shards) for _ in range(2)]
    assert plan.shard_of(keys, shards).tolist() == expected

"""Ranges of rows: how they are chosen, counted and put together again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.plan.outcome import Census, kept_tasks
from gmeta.preprocess.plan.ranges import (
    COUNT,
    KEY,
    PLACE,
    POSITION,
    RangeCount,
    Sampler,
    bounds_of,
    edges,
    number_rows,
    place_rows,
    range_of,
)
from gmeta.preprocess.source import join_rows, single, take
from gmeta.preprocess.summary import count_sizes
from gmeta.preprocess.table_spec import ColumnSpec, TableSpec

INT = ColumnSpec(dtype="int64", is_list=False)
SPEC = TableSpec("task", time="time", columns={"task": INT, "time": INT, "item": INT})


def table(rows):
    task, time, item = np.array(rows, np.int64).reshape(-1, 3).T.copy()
    return {"task": task, "time": time, "item": item}


SMALL = st.integers(-2, 2)
ROWS = st.lists(st.tuples(SMALL, SMALL, SMALL), min_size=1, max_size=60)


@given(rows=ROWS, bounds=st.lists(st.tuples(SMALL, SMALL, SMALL), max_size=5))
def test_a_row_is_in_the_range_of_the_last_bound_that_is_not_after_it(rows, bounds):
    ascending = sorted(bounds)
    expected = [sum(bound <= row for bound in ascending) for row in rows]
    found = range_of(table(rows), table(ascending) if bounds else None, SPEC.order)
    assert found.tolist() == expected


@settings(max_examples=60)
@given(
    rows=ROWS,
    ranges=st.integers(1, 9),
    config=st.builds(
        PlanConfig,
        seed=st.integers(0, 3),
        cold_modulus=st.sampled_from([0, 2]),
        min_rows=st.integers(1, 5),
        max_rows=st.sampled_from([0, 20]),
        batch_rows=st.sampled_from([None, 5, 7]),
        shards=st.integers(1, 4),
    ),
)
def test_ranges_give_every_row_the_place_that_the_whole_gives_it(rows, ranges, config):
    columns = table(rows)
    bounds = bounds_of([(1, columns)], SPEC.order, ranges)
    number = range_of(columns, bounds, SPEC.order)
    numbered = {
        which: number_rows(take(columns, np.flatnonzero(number == which)), SPEC)
        for which in np.unique(number).tolist()
    }
    counts = [RangeCount.of(which, part["task"], config) for which, part in numbered.items()]
    known = edges(reversed(counts))
    found = join_rows([place_rows(part, known[which], SPEC, config) for which, part in numbered.items()])

    whole = take(columns, plan.row_order(columns, SPEC.order))
    task = whole["task"]
    tasks, sizes = np.unique(task, return_counts=True)
    size = sizes[np.searchsorted(tasks, task)]
    position = plan.positions(task)
    batch = plan.batch_of(position, size, config.batch_rows)
    kept = plan.select_tasks(size, config)
    place = plan.place(task, batch, config)
    expected = {
        **whole,
        SPEC.batch: batch,
        POSITION: position,
        PLACE: place.split * config.shards + place.shard,
        KEY: (place.key ^ np.uint64(1 << 63)).view(np.int64),
    }
    assert {name: found[name].tolist() for name in found} == {
        name: values[kept].tolist() for name, values in expected.items()
    }

    census = Census(counts, config)
    assert (census.rows, census.tasks) == (len(rows), len(tasks))
    assert census.task_sizes == count_sizes(sizes)
    assert census.left_out == plan.left_out(sizes, config)
    splits = census.of_splits()
    assert {name: tasks for name, (tasks, _, _) in splits.items()} == kept_tasks(tasks, sizes, config)
    assert sum(rows for _, _, rows in splits.values()) == kept.sum()
    groups = len(set(zip(task[kept].tolist(), batch[kept].tolist(), strict=True)))
    assert sum(groups for _, groups, _ in splits.values()) == groups


def test_one_task_with_one_time_is_cut_into_even_ranges():
    """Nothing but the other columns tells its rows apart."""
    rows = [(7, 0, item) for item in range(1000)]
    number = range_of(table(rows), bounds_of([(1, table(rows))], SPEC.order, 10), SPEC.order)
    assert np.bincount(number).tolist() == [100] * 10
    numbered = number_rows(table(rows), SPEC)
    assert single(numbered, COUNT).tolist() == [1000] * 1000


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_a_sample_is_every_so_manieth_row_whatever_the_parts(chunk):
    sampler, rows = Sampler(100), [(number, 0, 0) for number in range(1000)]
    for start in range(0, 1000, chunk):
        sampler.add(table(rows[start : start + chunk]))
    kept = sampler.rows()["task"]
    assert kept.tolist() == list(range(0, 1000, sampler.stride))
    assert 50 <= len(kept) <= 100


def test_samples_of_unequal_parts_count_by_what_they_stand_for():
    many, few = Sampler(64), Sampler(64)
    many.add(table([(number, 0, 0) for number in range(1024)]))
    few.add(table([(5000 + number, 0, 0) for number in range(64)]))
    bounds = bounds_of([(s.stride, s.rows()) for s in (many, few)], SPEC.order, 4)
    assert (bounds["task"][:3] < 1024).all()
    assert bounds["task"][2] > 700

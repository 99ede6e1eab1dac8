"""Rows that come in parts are cut as if they came at once."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.plan.ranges import Cutter
from gmeta.preprocess.source import NUMBER, join_rows, part, row_count, take
from gmeta.preprocess.table_spec import ColumnSpec, TableSpec

INT, LIST = ColumnSpec(dtype="int64", is_list=False), ColumnSpec(dtype="int64", is_list=True)


def spec_of(*, time, unique=()):
    return TableSpec("task", time, unique=unique, columns={"task": INT, "ts": INT, "tags": LIST, "item": INT})


def table(rng, sizes, times):
    count = int(np.sum(sizes))
    lengths = rng.integers(0, 3, count)
    columns = {
        "task": np.repeat(np.arange(len(sizes)) * 7 - 5, sizes),
        "ts": rng.integers(0, times, count),
        "tags": (rng.integers(0, 3, lengths.sum()), np.concatenate([[0], np.cumsum(lengths)])),
        "item": rng.integers(0, 4, count),
    }
    return take(columns, rng.permutation(count))


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 240), max_size=12),
    times=st.sampled_from([1, 3, 1000]),
    time=st.sampled_from(["ts", None]),
    batch_rows=st.sampled_from([None, 1, 3, 10]),
    seed=st.integers(0, 100),
)
def test_parts_are_cut_as_the_whole(sizes, cuts, times, time, batch_rows, seed):
    spec, config = spec_of(time=time), PlanConfig(batch_rows=batch_rows)
    rows = table(np.random.default_rng(seed), sizes, times)
    whole = take(rows, plan.row_order(rows, spec.order))
    total = np.repeat(sizes, sizes)
    whole["batch_id"] = plan.batch_of(plan.positions(whole["task"]), total, batch_rows)

    presorted = take(rows, np.lexsort([rows[name] for name in reversed(spec.presort)]))
    edges = [0, *sorted(min(cut, len(total)) for cut in cuts), len(total)]
    cutter = Cutter(spec, config, np.unique(rows["task"]), np.array(sizes))
    found = [cutter.add(part(presorted, a, b)) for a, b in itertools.pairwise(edges)]
    found = [cut for cut in [*found, cutter.finish()] if cut is not None]

    ours = join_rows([cut.columns for cut in found])
    for name, values in whole.items():
        for mine, theirs in zip(
            *((v if isinstance(v, tuple) else (v,)) for v in (ours[name], values)), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
    keys = []
    for cut in found:
        assert cut.ends[-1] == row_count(cut.columns)
        starts = np.concatenate([[0], cut.ends[:-1]])
        np.testing.assert_array_equal(cut.columns["task"][starts], cut.task)
        np.testing.assert_array_equal(cut.columns["batch_id"][starts], cut.batch_id)
        keys += list(zip(cut.task.tolist(), cut.batch_id.tolist(), strict=True))
    assert len(keys) == len(set(keys)) == plan.batch_count(np.array(sizes), batch_rows).sum()


@given(cuts=st.lists(st.integers(0, 60), max_size=8), seed=st.integers(0, 100))
def test_keys_that_repeat_are_dropped_before_batches_are_cut(cuts, seed):
    spec = spec_of(time="ts", unique=("item",))
    rng = np.random.default_rng(seed)
    rows = table(rng, [20, 1, 9, 30], 5)
    rows[NUMBER] = np.arange(60)
    presorted = take(rows, np.lexsort([rows[name] for name in reversed(spec.presort)]))
    sizes = [len(set(rows["item"][rows["task"] == task].tolist())) for task in np.unique(rows["task"])]

    def without(whole):
        assert NUMBER in whole
        return take(whole, np.flatnonzero(~plan.find_repeated(whole, "task", ["item"])))

    cutter = Cutter(spec, PlanConfig(batch_rows=2), np.unique(rows["task"]), np.array(sizes), without)
    edges = [0, *sorted(cuts), 60]
    found = [cutter.add(part(presorted, a, b)) for a, b in itertools.pairwise(edges)]
    ours = join_rows([cut.columns for cut in [*found, cutter.finish()] if cut is not None])
    assert NUMBER not in ours
    whole = take(rows, plan.row_order(rows, (*spec.order, NUMBER)))
    kept = without(whole)
    for name in ("task", "ts", "item"):
        np.testing.assert_array_equal(ours[name], kept[name])


def test_a_batch_of_many_parts_is_joined_once(monkeypatch):
    """A task of a million rows in parts of a thousand must not cost a million rows for each part."""
    looked_at = []
    real = plan.row_order
    monkeypatch.setattr(
        plan, "row_order", lambda rows, names: (looked_at.append(row_count(rows)), real(rows, names))[1]
    )
    spec, rows, step = TableSpec("task", "ts", columns={"task": INT, "ts": INT}), 200_000, 1000
    columns = {"task": np.zeros(rows, np.int64), "ts": np.arange(rows)}
    cutter = Cutter(spec, PlanConfig(), np.zeros(1, np.int64), np.array([rows]))
    for start in range(0, rows, step):
        assert cutter.add(part(columns, start, start + step)) is None
    assert cutter.finish().ends.tolist() == [rows]
    assert sum(looked_at) < 2 * rows


@pytest.mark.parametrize("last", [True, False])
def test_no_rows_make_no_batch(last):
    cutter = Cutter(spec_of(time="ts"), PlanConfig(), np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert cutter.finish() is None

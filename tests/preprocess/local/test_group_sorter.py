"""Batches come into the order of the shards, whatever the memory, and the index agrees with them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import DataError
from gmeta.core.group_index import GroupIndex
from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.local.group_sorter import GroupSorter, ShardMerger
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.plan.ranges import Cut
from gmeta.preprocess.shards import record_encoder
from gmeta.preprocess.shards.data_set import write_shard
from gmeta.preprocess.source import take
from support.grouped_data import SCHEMA, grouped_columns


def cut_of(sizes, first_task):
    columns = grouped_columns(sizes, first_task=first_task)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    return Cut(columns, ends, columns["task"][starts], columns["batch_id"][starts])


@given(
    cuts=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), max_size=5),
    layout=st.sampled_from(["columnar", "example"]),
    shards=st.integers(1, 3),
    run_limit=st.sampled_from([1, 500, 1 << 20]),
    merge_limit=st.sampled_from([200, 1000, 1 << 20]),
)
def test_shards_are_those_that_a_writer_makes_of_sorted_rows(
    tmp_path_factory, cuts, layout, shards, run_limit, merge_limit
):
    folder = tmp_path_factory.mktemp("sorter")
    config = PlanConfig(seed=3, cold_modulus=3, shards=shards, layout=layout)
    made = [cut_of(np.array(sizes), 100 * number) for number, sizes in enumerate(cuts)]
    sorter = GroupSorter(folder, SCHEMA, config, run_limit)
    for cut in made:
        sorter.add(cut)
    sorter.finish()
    sorter.close()
    assert sorter.runs == (len(cuts) if run_limit == 1 else min(sorter.runs, len(cuts)))
    merger = ShardMerger(folder, sorter.runs, merge_limit)
    assert merger.rows == sum(map(sum, cuts))

    for place in range(2 * shards):
        groups = []
        for cut in made:
            at = plan.place(cut.task, cut.batch_id, config)
            for group in np.flatnonzero(at.split * shards + at.shard == place):
                start, end = ([0, *cut.ends][group], cut.ends[group])
                key = at.key[group], cut.task[group], cut.batch_id[group]
                groups.append((key, take(cut.columns, np.arange(start, end))))
        groups.sort(key=lambda group: group[0])
        expected = write_shard(folder / "expected", SCHEMA, layout, [rows for _, rows in groups])
        ours = merger.write(folder / "ours", place, config)
        assert (ours.groups, ours.rows, ours.bytes, ours.index) == (
            expected.groups,
            expected.rows,
            expected.bytes,
            expected.index,
        )
        for suffix in ("", ".gidx"):
            assert (folder / f"ours{suffix}").read_bytes() == (folder / f"expected{suffix}").read_bytes()
        assert GroupIndex.load(folder / "ours").rows == ours.rows


def test_a_batch_that_readers_would_refuse_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(record_encoder, "MAX_RECORD", 8000)
    monkeypatch.setattr(record_encoder, "_HEADER", 1000)
    sorter = GroupSorter(tmp_path, SCHEMA, PlanConfig(layout="columnar"), 1 << 20)
    with pytest.raises(DataError, match=r"task 1, batch 1: its record of 400 rows .*--batch-rows"):
        sorter.add(cut_of(np.array([1, 400]), 0))
    sorter.close()


def test_a_run_that_was_cut_is_an_error(tmp_path):
    config = PlanConfig(layout="columnar", shards=1)
    sorter = GroupSorter(tmp_path, SCHEMA, config, 1 << 20)
    sorter.add(cut_of(np.array([5, 6]), 0))
    sorter.finish()
    sorter.close()
    run = tmp_path / "run-00000.groups"
    run.write_bytes(run.read_bytes()[:-1])
    with pytest.raises(OSError, match="a run of sorted batches was cut"):
        ShardMerger(tmp_path, 1, 1 << 20).write(tmp_path / "x", 0, config)
    assert not (tmp_path / "x").exists()

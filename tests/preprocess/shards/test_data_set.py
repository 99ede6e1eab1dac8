"""What stands in the shards, read with TensorFlow's reader: groups, their places and their order."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from gmeta.core.data_manifest import Manifest
from gmeta.core.group_index import GroupIndex
from gmeta.preprocess import PrepareConfig, prepare
from gmeta.preprocess.movielens.movielens_source import DEFAULTS, SPEC
from gmeta.preprocess.plan import placement as plan
from gmeta.testing import small_100k
from support.data_files import read_groups, read_shard

MANY = PrepareConfig(batch_rows=13, shards=3, seed=7)


@pytest.fixture(
    scope="module", params=[PrepareConfig(layout="example"), replace(MANY, layout="example"), MANY]
)
def prepared(request, tmp_path_factory):
    """The manifest, and shard name -> [((task, batch id), its records)]."""
    folder = tmp_path_factory.mktemp("shards")
    out = prepare(small_100k(folder / "raw"), folder / "out", request.param).out
    manifest = Manifest.load(out)
    read = read_shard if manifest.layout == "example" else read_groups
    groups = {}
    for split in manifest.splits.values():
        for shard in split.shards:
            by_group = itertools.groupby(read(out / shard.name), lambda r: (r["task"][0], r["batch_id"][0]))
            groups[shard.name] = [(key, list(records)) for key, records in by_group]
            index = GroupIndex.load(out / shard.name)
            assert (index.layout, index.checksum) == (manifest.layout, shard.index)
            assert index.groups[["task", "batch_id"]].tolist() == [key for key, _ in groups[shard.name]]
    return request.param.resolve(DEFAULTS), manifest, groups


def test_the_manifest_counts_what_is_there(prepared):
    _, manifest, groups = prepared
    for split in manifest.splits.values():
        for shard in split.shards:
            assert shard.groups == len(groups[shard.name])
            assert shard.rows == sum(len(records) for _, records in groups[shard.name])


def test_a_batch_stands_together_once_in_time_order(prepared):
    _, _, groups = prepared
    keys = [key for shard in groups.values() for key, _ in shard]
    assert len(keys) == len(set(keys))
    for _, records in itertools.chain(*groups.values()):
        times = [(record["timestamp"][0], record["item"][0]) for record in records]
        assert times == sorted(times)


def test_batches_of_a_task_follow_each_other_in_time(prepared):
    config, _, groups = prepared
    batches = dict(itertools.chain(*groups.values()))
    assert any(number > 0 for _, number in batches) == (config.batch_rows is not None)
    for (task, number), records in batches.items():
        if number > 0:
            assert batches[task, number - 1][-1]["timestamp"] <= records[0]["timestamp"]


def test_place_and_order_are_the_plans(prepared):
    config, manifest, groups = prepared
    for name, split in manifest.splits.items():
        for number, shard in enumerate(split.shards):
            keys = [key for key, _ in groups[shard.name]]
            tasks, batches = np.array(keys, np.int64).T
            order = plan.order_key(config.seed, tasks, batches)
            assert {plan.splits(config)[split] for split in plan.split_of(tasks, config)} == {name}
            assert (plan.shard_of(order, config.shards) == number).all()
            assert (np.diff(order.astype(np.float64)) > 0).all()


def test_a_record_has_the_schemas_columns_and_types(prepared):
    _, _, groups = prepared
    for _, records in itertools.chain(*groups.values()):
        for record in records:
            assert record.keys() == {column.name for column in SPEC.schema}
            assert all(len(record[column.name]) == 1 for column in SPEC.schema if not column.is_list)
            assert isinstance(record["rating"][0], float)
            assert record["rating"][0] in (1, 2, 3, 4, 5)
            assert isinstance(record["timestamp"][0], int)

"""What admission remembers, in sharded checkpoints: of ids that have no row yet, nothing is forgotten."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings

from gmeta import initializers, ops, optimizers, policies
from gmeta.checkpoint.chain import CheckpointReader
from gmeta.checkpoint.manifest import Manifest
from gmeta.checkpoint.sharded import load, save
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.shares import owned_shards
from gmeta.ops.table.records import AdmissionState
from gmeta.policies.row_lifetimes import Admission, Always, Eviction
from support.cells import slow_but
from support.reference.table import ReferenceHashTable, logical_shards
from support.tables import assert_same_tables, sorted_records
from support.thread_ranks import run_thread_ranks

EXACT = policies.CountAdmission(3)
FILTER = policies.CountAdmission(3, filter=policies.Bloom(2000, error=0.05))
OVERFULL = policies.CountAdmission(2, filter=policies.Bloom(5, error=0.5))
FEW_SHARDS = policies.LRU(max_rows=2048)  # 2 shards of the table's own


def new_table(admission: Admission, eviction: Eviction | None = None) -> ops.HashTable:
    return ops.HashTable(
        2,
        optimizers.SGD(0.5),
        initializers.Constant(1.0),
        seed=4,
        name="t",
        admission=admission,
        eviction=eviction,
    )


def new_model(admission: Admission, eviction: Eviction | None = None) -> ReferenceHashTable:
    return ReferenceHashTable(
        2, optimizers.SGD(0.5), initializers.Constant(1.0), seed=4, admission=admission, eviction=eviction
    )


def train(table, keys) -> None:
    keys = np.asarray(keys, np.int64)
    table.lookup(keys)
    table.apply_gradients(keys, np.ones((len(keys), 2), np.float32), 0.5)


def batches(count: int, seed: int = 0, ids: int = 3000) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, ids, 600) * 7919 for _ in range(count)]


def remembered(table: ops.HashTable) -> tuple[dict[int, int], np.ndarray]:
    state = table.export_admission()
    return dict(zip(state.keys.numpy().tolist(), state.counts.numpy().tolist(), strict=True)), (
        state.filter.numpy()
    )


def assert_remembers(table: ops.HashTable, model: ReferenceHashTable) -> None:
    counts, filters = remembered(table)
    assert counts == model.admission.counts
    assert filters.tolist() == [counter for part in model.admission.filters for counter in part]
    records = sorted_records(table)
    assert records["keys"].tolist() == sorted(model.records)
    rows = [model.records[key].row for key in sorted(model.records)]
    np.testing.assert_array_equal(records["rows"], np.array(rows, np.float32).reshape(-1, 2))


def save_as_ranks(folder: Path, tables: list[ops.HashTable]) -> list:
    size = len(tables)
    return run_thread_ranks(
        size,
        lambda rank, gather: save(folder, {"item": tables[rank]}, rank=rank, world_size=size, gather=gather),
    )


operation = st.one_of(
    st.tuples(st.just("train"), st.lists(st.integers(-30, 30), max_size=12)),
    st.tuples(st.just("train"), st.lists(st.integers(-30, 30), max_size=12)),
    st.tuples(st.just("remove"), st.lists(st.integers(-30, 30), max_size=6)),
    st.tuples(st.just("go on from a save"), st.booleans()),
)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    operations=st.lists(operation, max_size=14),
    admission=st.sampled_from(
        [EXACT, FILTER, OVERFULL, policies.CountAdmission(1), policies.ProbabilityAdmission(0.4)]
    ),
    eviction=st.sampled_from([None, policies.LRU(max_rows=9), FEW_SHARDS]),
)
def test_a_run_that_is_resumed_from_full_and_incremental_saves_admits_what_the_reference_admits(
    tmp_path_factory, operations, admission, eviction
):
    folder = tmp_path_factory.mktemp("resumed")
    table, model, base = new_table(admission, eviction), new_model(admission, eviction), None
    for number, (kind, argument) in enumerate([*operations, ("go on from a save", True)]):
        if kind == "train":
            train(table, argument)
            train(model, argument)
        elif kind == "remove":
            table.remove(np.array(argument, np.int64))
            model.remove(np.array(argument, np.int64))
        else:
            name = folder / str(number)
            info = save(name, {"item": table}, base=base if argument else None, journal=1000)
            assert info.waiting["item"] == len(model.admission.counts)
            base, table = name, new_table(admission, eviction)
            train(table, [1, 2, 99])  # forgotten
            loaded = load(name, {"item": table}, journal=1000)
            assert loaded.waiting == info.waiting
            assert loaded.forgotten == {}
            assert_remembers(table, model)


# Quick: more ranks and fewer, each with every admission and eviction.
@pytest.mark.parametrize("eviction", [None, FEW_SHARDS], ids=str)
@pytest.mark.parametrize("admission", [EXACT, FILTER], ids=str)
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"), slow_but([(1, 3), (4, 2)], [(1, 3), (2, 1), (4, 2), (3, 1), (3, 5)])
)
def test_any_number_of_ranks_goes_on_with_what_any_other_counted(
    tmp_path, admission, eviction, saved_by, loaded_by
):
    """As one rank would: of exact counts always, of a filter if no filter's keys are divided among ranks."""
    whole = new_table(admission, eviction)
    ranks = [new_table(admission, eviction) for _ in range(saved_by)]
    for batch in batches(3):
        whole.lookup(batch)
        shards = logical_shards(batch)
        for rank, table in enumerate(ranks):
            table.lookup(batch[np.isin(shards, owned_shards(rank, saved_by))])
    infos = save_as_ranks(tmp_path / "a", ranks)
    counts, whole_filter = remembered(whole)
    assert sum(info.waiting["item"] for info in infos) == len(counts)
    assert len(counts) > 500 or admission is FILTER

    filters = 2 if eviction is FEW_SHARDS else 64
    undivided = filters % saved_by == 0
    found: dict[int, int] = {}
    for rank in range(loaded_by):
        table, own = new_table(admission, eviction), owned_shards(rank, loaded_by)
        load(tmp_path / "a", {"item": table}, rank=rank, world_size=loaded_by)
        some, filter_ = remembered(table)
        assert set(logical_shards(np.array(list(some), np.int64)).tolist()) <= set(own)
        found |= some
        if admission is FILTER:
            mine = filter_.reshape(filters, -1)
            width = 1024 // filters
            for number in range(filters):
                meets = number * width < own.stop and (number + 1) * width > own.start
                expected = whole_filter.reshape(filters, -1)[number] * meets
                assert np.all(mine[number] <= expected)  # no id comes earlier than with one rank
                if undivided:
                    np.testing.assert_array_equal(mine[number], expected)
        # The next batch, by whoever owns its ids. No id comes later than with the ranks that saved.
        batch = batches(1, seed=9)[0]
        batch = batch[np.isin(logical_shards(batch), own)]
        alone = new_table(admission, eviction)
        load(tmp_path / "a", {"item": alone})
        table.lookup(batch)
        for saver, before in enumerate(ranks):
            part = np.unique(batch[np.isin(logical_shards(batch), owned_shards(saver, saved_by))])
            known = before.contains(part).numpy()
            again = new_table(admission, eviction)
            again.import_admission(before.export_admission())
            again.lookup(part)
            admitted = again.contains(part).numpy() | known
            assert np.all(table.contains(part).numpy() >= admitted)
    assert found == counts


def test_the_files_are_arrows_own(tmp_path):
    exact, filtered = new_table(EXACT), new_table(FILTER)
    for table in (exact, filtered):
        for batch in batches(2):
            table.lookup(batch)
    save(tmp_path / "a", {"exact": exact, "filtered": filtered})
    (path,) = (tmp_path / "a").glob("exact/waiting-*")
    with pa.memory_map(str(path)) as source:
        found = pa.ipc.open_file(source).read_all()
    assert (
        dict(zip(*(found[name].to_pylist() for name in ("key", "count")), strict=True))
        == (remembered(exact)[0])
    )
    (path,) = (tmp_path / "a").glob("filtered/filter-*")
    with pa.memory_map(str(path)) as source:
        file = pa.ipc.open_file(source)
        counters = np.concatenate(
            [file.get_batch(i).column("counter").to_numpy() for i in range(file.num_record_batches)]
        )
    np.testing.assert_array_equal(counters, remembered(filtered)[1])
    layout = json.loads(file.schema.metadata[b"gmeta.filter"])
    assert layout == {"shards": 64, "counters": len(counters) // 64, "hashes": FILTER.filter.hashes}
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "a").glob("*/*")) == (
        ["filter", "rows", "rows", "waiting"]
    )


def test_a_table_that_remembers_nothing_has_no_file_for_it(tmp_path):
    save(tmp_path / "a", {"a": new_table(EXACT), "b": new_table(FILTER), "c": new_table(Always())})
    assert {path.name.split("-")[0] for path in (tmp_path / "a").glob("*/*")} == {"rows"}
    again = new_table(FILTER)
    load(tmp_path / "a", {"b": again})
    assert not remembered(again)[1].any()


def test_exact_counts_go_into_another_threshold_and_into_a_filter(tmp_path):
    table = new_table(policies.CountAdmission(4))
    for keys in ([1, 2, 3], [1, 2], [1]):
        table.lookup(keys)  # 1 is at 3, 2 at 2, 3 at 1
    save(tmp_path / "a", {"item": table})
    for admission in (policies.CountAdmission(3), policies.CountAdmission(3, filter=policies.Bloom(1000))):
        again = new_table(admission)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load(tmp_path / "a", {"item": again})
        again.lookup([1, 2, 3])
        assert again.contains([1, 2, 3]).numpy().tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("admission", "eviction", "why"),
    [
        (EXACT, None, "exact counts, which a filter can't give.*make it with admission CountAdmission"),
        (
            policies.CountAdmission(3, filter=policies.Bloom(4000, error=0.05)),
            None,
            "64 filters of .*saved capacity",
        ),
        (policies.CountAdmission(3, filter=policies.Bloom(2000, error=0.01)), None, "7 an id"),
        (FILTER, FEW_SHARDS, "2 filters of .*and the eviction bound"),
    ],
    ids=str,
)
def test_what_cannot_be_taken_over_is_told(tmp_path, admission, eviction, why):
    table = new_table(FILTER)
    train(table, [1, 2])
    save(tmp_path / "a", {"item": table})
    again = new_table(admission, eviction)
    with pytest.warns(UserWarning, match=f"counts of table 'item' are left out, .*counted afresh: .*{why}"):
        info = load(tmp_path / "a", {"item": again})
    assert list(info.forgotten) == ["item"]
    counts, filter_ = remembered(again)
    assert not counts
    assert not filter_.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tmp_path / "a", {"item": new_table(Always())})  # needs no counts


def test_counts_of_other_ranks_ids_are_not_lost_without_a_word(tmp_path):
    for admission, words in ((EXACT, "holds .* keys of logical shards outside"), (FILTER, "has counted ids")):
        ranks = [new_table(admission) for _ in range(2)]
        ranks[0].lookup(np.arange(100))  # half of them belong to rank 1
        results = save_as_ranks(tmp_path / "a", ranks)
        assert isinstance(results[0], ConfigError)
        with pytest.raises(ConfigError, match=f"{words}.*route keys by their logical shard"):
            raise results[0]
        assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("admission", [EXACT, FILTER], ids=str)
def test_damage_is_named_and_a_failed_save_changes_nothing(tmp_path, admission, monkeypatch):
    table = new_table(admission)
    for batch in batches(2):
        table.lookup(batch)
    save(tmp_path / "a", {"item": table}, journal=1000)
    before = remembered(table)
    table.lookup(batches(1, seed=5)[0])

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("gmeta.checkpoint.lock.commit", full_disk)
        with pytest.raises(Exception, match="No space left on device; make room"):
            save(tmp_path / "b", {"item": table}, base=tmp_path / "a", journal=1000)
    again = new_table(admission)
    load(tmp_path / "a", {"item": again})
    assert remembered(again)[0] == before[0]
    np.testing.assert_array_equal(remembered(again)[1], before[1])
    assert save(tmp_path / "b", {"item": table}, base=tmp_path / "a").kinds == {"item": "increment"}
    load(tmp_path / "b", {"item": again})
    assert_same_tables(again, table)
    assert remembered(again)[0] == remembered(table)[0]
    np.testing.assert_array_equal(remembered(again)[1], remembered(table)[1])

    (part,) = Manifest.load(tmp_path / "a").tables["item"].parts
    file = part.waiting or part.filter
    path, segment = tmp_path / "a" / file.name, file.segments[len(file.segments) // 2]
    data = bytearray(path.read_bytes())
    data[segment.offset + segment.bytes - 40] ^= 1
    path.write_bytes(data)
    words = rf"{path} at byte {segment.offset}: logical shard {segment.shard} is damaged"
    with pytest.raises(DataError, match=words):
        load(tmp_path / "a", {"item": new_table(admission)})
    with CheckpointReader(tmp_path / "a") as reader, pytest.raises(DataError, match=words):
        reader.verify()


def test_filters_are_exported_and_merged_shard_by_shard():
    table, other = new_table(FILTER), new_table(FILTER)
    for batch in batches(2):
        table.lookup(batch)
    other.lookup(batches(1, seed=3)[0])
    parts = [table.export_filter(first, last) for first, last in ((0, 5), (5, 5), (5, 64))]
    assert [int(part.count) for part in parts] == [64] * 3
    whole = np.concatenate([part.counters for part in parts])
    np.testing.assert_array_equal(whole.reshape(-1), remembered(table)[1])
    before = remembered(other)[1].reshape(64, -1)
    none = np.empty(0, np.int64)
    other.import_admission(AdmissionState(none, none, whole[3:6].reshape(-1)), replace=False, first_filter=3)
    expected = before.copy()
    expected[3:6] = np.maximum(before[3:6], whole[3:6])
    np.testing.assert_array_equal(remembered(other)[1].reshape(64, -1), expected)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"filters are \[first, last\) within \[0, 64\)"):
        table.export_filter(0, 65)
    for first, some in ((63, whole[:2]), (-1, whole[:1]), (0, whole[0, 1:])):
        state = AdmissionState(none, none, some.reshape(-1))
        with pytest.raises(tf.errors.InvalidArgumentError, match="is not of this table's admission"):
            other.import_admission(state, replace=False, first_filter=first)
    assert new_table(EXACT).export_filter(0, 3).counters.shape == (3, 0)


def test_exported_shards_tell_who_waits():
    table = new_table(EXACT)
    for batch in batches(2):
        table.lookup(batch)
    part = table.export_shards(100, 700, min_last_step=2**32 - 1)
    keys, counts = part.waiting.numpy(), part.waiting_counts.numpy()
    expected = {
        k: c for k, c in remembered(table)[0].items() if 100 <= logical_shards(np.array([k]))[0] < 700
    }
    assert dict(zip(keys.tolist(), counts.tolist(), strict=True)) == expected
    shards = logical_shards(keys)
    assert np.all(np.lexsort((keys, shards)) == np.arange(len(keys)))
    np.testing.assert_array_equal(part.waiting_splits, np.searchsorted(shards, np.arange(100, 701)))

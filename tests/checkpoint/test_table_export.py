"""Exported tables: what the files hold, that they come back to the last bit, and when there are none."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest
from hypothesis import HealthCheck, given, settings

from gmeta import checkpoint, initializers, ops, optimizers, policies
from gmeta.checkpoint import column_files
from gmeta.checkpoint.callback import tables_by_name
from gmeta.checkpoint.manifest import Manifest
from gmeta.checkpoint.sharded import load, save
from gmeta.core.errors import ConfigError, DataError, GmetaError, NotFiniteError
from gmeta.core.shares import owned_shards
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from support.cells import slow_but
from support.reference.table import logical_shards
from support.tables import assert_same_tables, sorted_records
from support.thread_ranks import run_thread_ranks

DIM = 3
FORMATS = ["arrow", "npy"]
NAMES = ("user", "item", "tag")  # merged into one physical table; the ids of the last are hashed


def new_table(optimizer: optimizers.SparseOptimizer | None = None, **settings: Any) -> ops.HashTable:
    start = initializers.Normal()
    return ops.HashTable(DIM, optimizer or optimizers.Adam(0.1), start, seed=4, name="t", **settings)


def train(table: ops.HashTable, keys: Any, seed: int = 0) -> None:
    keys = np.unique(np.asarray(keys, np.int64))
    table.lookup(keys)
    grads = np.random.default_rng(seed).normal(size=(len(keys), table.dim))
    table.apply_gradients(keys, grads.astype(np.float32))


def collection(names: tuple[str, ...] = NAMES, name: str = "tables") -> EmbeddingCollection:
    features = [FeatureConfig(each, dim=DIM, hash=each == "tag") for each in names]
    return EmbeddingCollection(features, optimizer=optimizers.Adam(0.1), name=name)


def train_all(tables: EmbeddingCollection, count: int = 300) -> EmbeddingCollection:
    rng = np.random.default_rng(count)
    ids = {name: rng.integers(0, 1 << 40, count) for name in ("user", "item")}
    tags = np.array([f"tag {number}" for number in range(count)])
    for part in (slice(None), slice(count // 2)):
        found = tables.lookup({**{n: each[part] for n, each in ids.items()}, "tag": tags[part]})
        tables.apply_gradients(found, [rng.normal(size=rows.shape).astype("f") for rows in found.rows])
    return tables


def read(folder: Path) -> dict[str, Any]:
    """An exported folder's columns, by NumPy or Arrow alone."""
    if not (folder / "table.arrow").exists():
        return {path.stem: np.load(path) for path in folder.glob("*.npy")}
    table = pa.dataset.dataset(folder, format="arrow").to_table()
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    return {
        name: column.flatten().to_numpy().reshape(len(column), -1)
        if pa.types.is_fixed_size_list(column.type)
        else column.to_numpy()
        for name, column in columns.items()
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("form", FORMATS)
def test_the_columns_are_the_records_by_shard_and_key(tmp_path, form):
    table = new_table()
    train(table, np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 2000))
    done = checkpoint.export_table(table, "t", tmp_path / "t", format=form, state=True)
    columns = read(tmp_path / "t")
    assert set(columns) == {"keys", "values", "frequency", "slots", "last_step"}
    assert columns["values"].dtype == np.float32
    assert columns["frequency"].dtype == np.uint32
    keys = columns["keys"]
    assert np.lexsort((keys, logical_shards(keys))).tolist() == list(range(2000))
    records, order = sorted_records(table), np.argsort(keys)
    for name, other in {"keys": "keys", "values": "rows", "slots": "slots"}.items():
        np.testing.assert_array_equal(columns[name][order], records[other])
    for name in ("frequency", "last_step"):
        np.testing.assert_array_equal(columns[name][order], records[name])
    assert done.bytes == sum(map(len, contents(tmp_path / "t").values()))
    noted = json.loads((tmp_path / "t" / "_table.json").read_text())
    assert (noted["table"], noted["rows"], noted["slots"], noted["step"]) == ("t", 2000, ["m", "v"], 1)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "optimizer", [optimizers.SGD(0.1), optimizers.RowWiseAdagrad(0.1)], ids=["sgd", "row"]
)
@given(keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40, unique=True))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.shown_by(case="sgd-arrow")
def test_any_table_comes_back_to_the_last_bit(tmp_path_factory, form, optimizer, keys):
    table, again = new_table(optimizer), new_table(optimizer)
    for part in (keys, keys[::2]):
        if part:
            train(table, part)
    train(again, [77])  # replaced
    out = tmp_path_factory.mktemp("out") / "t"
    checkpoint.export_table(table, None, out, format=form, state=True)
    done = checkpoint.import_table(again, None, out, mode="replace", state=True)
    assert (done.rows, done.own, done.left_out) == (len(keys), len(keys), ())
    assert_same_tables(again, table)
    train(table, [5, *keys], seed=9)  # the step is the same too
    train(again, [5, *keys], seed=9)
    assert_same_tables(again, table)


@pytest.mark.parametrize("form", FORMATS)
@given(ids=st.lists(st.integers(0, 2**61 - 1), min_size=1, max_size=20, unique=True))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.shown_by(case="arrow")
def test_ids_of_a_merged_table_have_no_prefix_and_get_it_back(tmp_path_factory, form, ids):
    tables, again = collection(), collection()
    tables.lookup({"user": ids, "item": ids[::2], "tag": [1, 2]})
    folder = tmp_path_factory.mktemp("out")
    for name in NAMES:
        checkpoint.export_table(tables, name, folder / name, format=form, state=True)
        checkpoint.import_table(again, name, folder / name, state=True)
    assert sorted(read(folder / "user")["keys"]) == sorted(ids)
    assert sorted(read(folder / "item")["keys"]) == sorted(ids[::2])
    assert sorted(read(folder / "tag")["keys"]) == [1, 2]
    assert_same_tables(again.tables[0], tables.tables[0])


# Quick: each state in one format.
@pytest.mark.parametrize(
    ("form", "state"),
    slow_but(lambda form, state: (form == FORMATS[0]) == state, itertools.product(FORMATS, [False, True])),
)
def test_a_checkpoint_gives_the_bytes_that_the_model_gives(tmp_path, form, state):
    tables = train_all(collection())
    named = tables_by_name(tables)
    save(tmp_path / "ck" / "a", named, journal=1000)
    train_all(tables, 100)
    save(tmp_path / "ck" / "b", named, base=tmp_path / "ck" / "a", journal=1000)
    for name in NAMES:
        checkpoint.export_table(tables, name, tmp_path / "one" / name, format=form, state=state)
        checkpoint.export_table(tmp_path / "ck", name, tmp_path / "two" / name, format=form, state=state)
        assert contents(tmp_path / "one" / name) == contents(tmp_path / "two" / name)
    columns = read(tmp_path / "two" / "tag")
    assert ("slots" in columns) == state
    vectors = tables({"user": [0], "item": [0], "tag": ["tag 7"]})["tag"]
    place = columns["keys"].tolist().index(int(ops.hash_ids(["tag 7"])[0]))
    np.testing.assert_array_equal(columns["values"][place], vectors[0])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])  # quick: 2
def test_ranks_write_the_bytes_that_one_writes_and_import_what_they_own(tmp_path, form, size):
    whole = train_all(collection(), 900)
    checkpoint.export_table(whole, "item", tmp_path / "one", format=form, state=True)
    save(tmp_path / "ck", tables_by_name(whole))
    parts = [collection() for _ in range(size)]
    for rank, part in enumerate(parts):
        load(tmp_path / "ck", tables_by_name(part), rank=rank, world_size=size)
    place = {"world_size": size}
    made = run_thread_ranks(
        size,
        lambda rank, gather: checkpoint.export_table(
            parts[rank],
            "item",
            tmp_path / "many",
            format=form,
            state=True,
            rank=rank,
            gather=gather,
            **place,
        ),
    )
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    assert {each.description.rows for each in made} == {900}
    again = [collection() for _ in range(size)]
    done = run_thread_ranks(
        size,
        lambda rank, gather: checkpoint.import_table(
            again[rank], "item", tmp_path / "many", rank=rank, gather=gather, **place
        ),
    )
    assert sum(each.own for each in done) == 900
    for rank, each in enumerate(again):
        keys = sorted_records(each.tables[0])["keys"]
        assert len(keys) == done[rank].own > 0
        assert set(logical_shards(keys)) <= set(owned_shards(rank, size))


def test_an_error_of_one_rank_is_raised_by_all_and_leaves_nothing(tmp_path):
    parts = [new_table(), new_table()]
    first = np.flatnonzero(logical_shards(np.arange(100)) < 512)
    for part in parts:  # rank 1 doesn't own these keys
        train(part, first)
    errors = run_thread_ranks(
        2,
        lambda rank, gather: checkpoint.export_table(
            parts[rank], "t", tmp_path / "t", rank=rank, world_size=2, gather=gather
        ),
    )
    assert all(isinstance(each, ConfigError) and "rank 1" in str(each) for each in errors)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="2 ranks export together: pass gather="):
        checkpoint.export_table(parts[0], "t", tmp_path / "t", rank=0, world_size=2)


@pytest.mark.parametrize("form", FORMATS)
def test_half_rows_are_exported_as_the_float32_that_they_read_as(tmp_path, form):
    precision = policies.TwoPrecisions(threshold=3)
    table, again = new_table(precision=precision), new_table(precision=precision)
    for end in (30, 20, 10):
        train(table, range(end))
    checkpoint.export_table(table, "t", tmp_path / "t", format=form, state=True)
    checkpoint.import_table(again, "t", tmp_path / "t", state=True)
    assert int(again.statistics().half_rows) == int(table.statistics().half_rows) == 20
    assert_same_tables(again, table)


def test_a_killed_export_leaves_no_folder_and_an_old_one_as_it_was(tmp_path, monkeypatch):
    table = new_table()
    train(table, range(50))
    checkpoint.export_table(table, "t", tmp_path / "t")
    before = contents(tmp_path / "t")
    train(table, range(60))

    def fail(self: Any, *_: Any) -> None:
        raise OSError(28, "No space left on device", "keys.npy")

    monkeypatch.setattr(column_files.NpyWriter, "write", fail)
    for out, overwrite in (("new", False), ("t", True)):
        with pytest.raises(GmetaError, match=r"can't write keys.npy: No space left on device"):
            checkpoint.export_table(table, "t", tmp_path / out, format="npy", overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    assert contents(tmp_path / "t") == before


def test_existing_folders_stay_unless_they_are_tables_to_overwrite(tmp_path):
    table = new_table()
    train(table, range(50))
    (tmp_path / "t").mkdir()  # empty
    checkpoint.export_table(table, "t", tmp_path / "t")
    train(table, range(60))
    with pytest.raises(GmetaError, match="t exists already: name a folder that is to be made, or overwrite"):
        checkpoint.export_table(table, "t", tmp_path / "t")
    checkpoint.export_table(table, "t", tmp_path / "t", format="npy", overwrite=True)
    assert len(read(tmp_path / "t")["keys"]) == 60
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    with pytest.raises(GmetaError, match="mine exists already and isn't an exported table"):
        checkpoint.export_table(table, "t", tmp_path / "mine", overwrite=True)
    with pytest.raises(ConfigError, match="format must be one of npy, arrow, got 'csv'"):
        checkpoint.export_table(table, "t", tmp_path / "u", format="csv")  # type: ignore[arg-type]


def test_two_exports_of_one_folder_at_once_are_refused(tmp_path, monkeypatch):
    table, begun, go_on = new_table(), threading.Event(), threading.Event()
    train(table, range(50))
    write = column_files.ArrowWriter.write

    def slow(self: Any, columns: Any) -> None:
        begun.set()
        go_on.wait(60)
        write(self, columns)

    monkeypatch.setattr(column_files.ArrowWriter, "write", slow)
    first = threading.Thread(target=checkpoint.export_table, args=(table, "t", tmp_path / "t"))
    first.start()
    begun.wait(60)
    with pytest.raises(GmetaError, match="another run is preparing"):
        checkpoint.export_table(table, "t", tmp_path / "t")
    go_on.set()
    first.join()
    assert len(read(tmp_path / "t")["keys"]) == 50


def test_an_unknown_table_is_answered_by_those_that_there_are(tmp_path):
    tables = collection()
    with pytest.raises(ConfigError) as refused:
        checkpoint.export_table(tables, "shop", tmp_path / "t")
    assert str(refused.value) == (
        "EmbeddingCollection 'tables' has no table 'shop': it has 'item', 'tag', 'user'"
    )
    with pytest.raises(ConfigError, match="has the tables 'item', 'tag', 'user': name one of them"):
        checkpoint.export_table(tables, None, tmp_path / "t")
    save(tmp_path / "ck", tables_by_name(tables))
    with pytest.raises(ConfigError, match=r"checkpoint .*ck has no table 'tables/shop': it has 'item'"):
        checkpoint.export_table(tmp_path / "ck", "tables/shop", tmp_path / "t")


def test_tables_of_one_name_in_two_collections_are_told_apart_by_the_collection(tmp_path):
    one, two = collection(("user", "item"), "a"), collection(("user",), "b")
    two.lookup({"user": [7]})
    save(tmp_path / "ck", {**tables_by_name(one), **tables_by_name(two)})
    checkpoint.export_table(tmp_path / "ck", "b/user", tmp_path / "b", format="npy")
    assert read(tmp_path / "b")["keys"].tolist() == [7]
    checkpoint.export_table(tmp_path / "ck", "a/user", tmp_path / "a", format="npy")
    assert read(tmp_path / "a")["keys"].tolist() == []
    checkpoint.export_table(tmp_path / "ck", "item", tmp_path / "item")
    with pytest.raises(ConfigError, match="has no single table 'user': it has 'a/user', 'b/user', 'item'"):
        checkpoint.export_table(tmp_path / "ck", "user", tmp_path / "t")


def test_a_table_keeps_its_name_whatever_characters_it_has(tmp_path):
    name = "a/b+c"
    tables = EmbeddingCollection([FeatureConfig("x", TableConfig(name, 2)), FeatureConfig("y", dim=2)])
    tables.lookup({"x": [3], "y": [4]})
    save(tmp_path / "ck", tables_by_name(tables))
    checkpoint.export_table(tmp_path / "ck", name, tmp_path / "t", format="npy")
    assert read(tmp_path / "t")["keys"].tolist() == [3]


@pytest.mark.parametrize("tables", ["user", ["user", "user"], [], [3]])
def test_a_manifest_with_other_merged_tables_than_gmeta_writes_is_refused(tmp_path, tables):
    save(tmp_path / "ck", tables_by_name(collection()))
    manifest = Manifest.load(tmp_path / "ck")
    ((name, entry),) = manifest.tables.items()
    crafted = replace(entry, settings={**entry.settings, "tables": tables})
    replace(manifest, tables={name: crafted}).save(tmp_path / "ck")
    with pytest.raises(DataError, match="not what gmeta writes"):
        checkpoint.export_table(tmp_path / "ck", "user", tmp_path / "t")


def test_a_row_that_is_not_finite_is_refused_by_its_id_unless_it_is_asked_for(tmp_path):
    tables = collection()
    tables.lookup({"user": [7, 8], "item": [8, 9], "tag": ["a", "b"]})
    key = tables.tables[0].merged_keys.prefix_of("item") | 8
    tables.tables[0].apply_gradients([key], np.full([1, DIM], np.nan, "f"), 1.0, finite=False)
    told = "table 'item': the row of id 8 holds NaN or infinity: export an earlier checkpoint"
    save(tmp_path / "ck", tables_by_name(tables))
    for source in (tables, tmp_path / "ck"):
        with pytest.raises(NotFiniteError, match=told):
            checkpoint.export_table(source, "item", tmp_path / "item")
        assert not (tmp_path / "item").exists()
        checkpoint.export_table(source, "user", tmp_path / "user", overwrite=True)
    checkpoint.export_table(tables, "item", tmp_path / "item", format="npy", finite=False)
    assert np.isnan(read(tmp_path / "item")["values"]).any()

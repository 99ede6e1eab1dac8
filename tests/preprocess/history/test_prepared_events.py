"""Appends of prepared data sets: the same bytes as of the table that was prepared, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pyarrow as pa
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.cli import main
from gmeta.core.errors import ConfigError, DataError
from gmeta.preprocess import ColumnSpec, HistorySpec, PrepareConfig, TableSpec, prepare
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.history.cluster_append import append_history_on_spark
from gmeta.preprocess.history.generation import Generation
from gmeta.preprocess.history.reading import read_histories
from gmeta.preprocess.plan.column_values import hash_text
from support.data_files import EVENT_SPEC as SPEC
from support.data_files import event_table, parts, shuffled, write_table

GROUPS = {"what": ("item", "click"), "cost": ("price",)}
COLUMNS = {**{n: SPEC.columns[n] for n in ("user", "item", "price")}, "click": ColumnSpec(dtype="float32")}
KEPT = HistorySpec("user", "ts", groups=GROUPS, shards=3, stripe_events=5)


def shards_of(store):
    """All files of stripes and of indexes."""
    return {str(path.relative_to(store)): path.read_bytes() for path in store.glob("generations/*/shard-*")}


@settings(max_examples=10)
@given(
    rows=st.integers(4, 300),
    layout=st.sampled_from(["columnar", "example"]),
    codec=st.sampled_from([None, "zstd"]),
    batch_rows=st.sampled_from([None, 3]),
    cold_modulus=st.sampled_from([0, 2]),
    shards=st.integers(1, 3),
)
@pytest.mark.shown_by("test_columns_may_have_other_names_in_the_table")
def test_a_table_and_what_was_prepared_of_it_give_the_same_bytes(
    tmp_path_factory, rows, layout, codec, batch_rows, cold_modulus, shards
):
    """Two appends, the second with late events; as long as both splits have tasks."""
    folder = tmp_path_factory.mktemp("t")
    codec = codec if layout == "columnar" else None
    config = PrepareConfig(
        layout=layout, codec=codec, batch_rows=batch_rows, cold_modulus=cold_modulus, shards=shards
    )
    for day, table in enumerate(parts(shuffled(event_table(rows)), [rows // 2])):
        data = write_table(table, folder / f"{day}.parquet")
        try:
            prepare(data, folder / f"prepared-{day}", config, spec=SPEC)
        except DataError:  # a split without tasks
            return
        append_history(folder / "a", data, None if day else replace(KEPT, columns=COLUMNS))
        append_history(folder / "b", folder / f"prepared-{day}", None if day else KEPT)
    assert shards_of(folder / "a") == shards_of(folder / "b")
    mine, theirs = (Generation(folder / name).manifest for name in ("a", "b"))
    assert mine.spec == theirs.spec
    assert mine.shards == theirs.shards
    assert len(theirs.inputs) == sum(
        path.stat().st_size > 0 for path in (folder / "prepared-1").glob("*.tfrecord")
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    data = write_table(event_table(600), folder / "day.parquet")
    config = PrepareConfig(cold_modulus=2, batch_rows=10, layout="columnar")
    prepare(data, folder / "out", config, spec=SPEC)
    return folder / "out"


def test_splits_are_appended_one_by_one_or_together(prepared, tmp_path):
    append_history(tmp_path / "both", prepared, KEPT)
    append_history(tmp_path / "named", [prepared / "warm", prepared / "cold"], KEPT)
    assert shards_of(tmp_path / "both") == shards_of(tmp_path / "named")
    first = append_history(tmp_path / "apart", prepared / "warm", KEPT)
    second = append_history(tmp_path / "apart", prepared / "cold")
    assert first.events + second.events == second.total_events == 600
    with pytest.raises(DataError, match=r"generation 1 holds the events of warm-0.* already"):
        append_history(tmp_path / "apart", prepared)


def test_a_data_set_knows_its_user_and_time(prepared, tmp_path):
    spec = TableSpec("user", time="ts", columns={"item": ColumnSpec(hash=True), "price": ColumnSpec()})
    prepare(prepared.parent / "day.parquet", tmp_path / "out", PrepareConfig(), spec=spec)
    command = ["history", "append", str(tmp_path / "store"), "--data", str(tmp_path / "out" / "train")]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert "600 events in" in done.output
    assert Generation(tmp_path / "store").manifest.spec["time"] == "ts"
    command[2] = str(tmp_path / "other")
    done = CliRunner().invoke(main, [*command, "--shards", "2"])
    assert done.exit_code == 0, done.output
    assert len(Generation(tmp_path / "other").manifest.shards) == 2
    # A table goes on where a data set began: its text is hashed as it was.
    late = write_table(event_table(50, seed=1), tmp_path / "late.parquet")
    append_history(tmp_path / "store", late)
    found = read_histories(Generation(tmp_path / "store"), range(-3, 20), ["item", "born"]).columns
    assert set(found["item"][found["born"] == 2]) <= {hash_text(f"item {number}") for number in range(30)}
    assert len(found["item"]) == 650


def test_columns_may_have_other_names_in_the_table(tmp_path):
    table = pa.table({"uid": [5, 5, 6], "at": [3, 1, 2], "product": ["a", "b", "a"], "n": [1, 2, 3]})
    data = write_table(table, tmp_path / "t.parquet")
    columns = {
        "user": ColumnSpec(source="uid"),
        "ts": ColumnSpec(source="at"),
        "item": ColumnSpec(source="product"),
    }
    prepare(data, tmp_path / "out", PrepareConfig(), spec=TableSpec("user", time="ts", columns=columns))
    append_history(tmp_path / "a", data, HistorySpec("user", "ts", columns))
    append_history(tmp_path / "b", tmp_path / "out")
    assert shards_of(tmp_path / "a") == shards_of(tmp_path / "b")
    # A spec may also name the data set's own columns.
    other = {"who": ColumnSpec(source="user"), "what": ColumnSpec(source="item", hash=True)}
    append_history(tmp_path / "c", tmp_path / "out", HistorySpec("who", "ts", other))
    assert shards_of(tmp_path / "c") == shards_of(tmp_path / "b")


def test_rules_of_the_spec_hold_for_rows(prepared, tmp_path):
    spec = replace(KEPT, columns={"price": ColumnSpec(dtype="float32", max=100)})
    with pytest.raises(DataError, match=r"tfrecord: out of range: row [0-9]+: price must be <= 100"):
        append_history(tmp_path / "store", prepared, spec)
    done = append_history(tmp_path / "store", prepared, spec, on_bad="skip")
    assert done.left_out > 100
    assert done.events + done.left_out == 600


@pytest.mark.parametrize("layout", ["columnar", "example"])
def test_damage_ends_an_append_or_is_counted(prepared, tmp_path, layout):
    config = PrepareConfig(batch_rows=10, layout=layout, shards=1)
    prepare(prepared.parent / "day.parquet", tmp_path / "out", config, spec=SPEC)
    (shard,) = (tmp_path / "out").glob("*.tfrecord")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match=r"train-.*tfrecord at byte [0-9]+: .*fails its checksum"):
        append_history(tmp_path / "store", tmp_path / "out", KEPT)
    done = append_history(tmp_path / "store", tmp_path / "out", KEPT, on_bad="skip")
    assert 0 < done.left_out < 30
    assert done.events + done.left_out == 600
    index = shard.with_name(shard.name + ".gidx")
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"gidx.*cut or appended to"):
        append_history(tmp_path / "other", tmp_path / "out", KEPT, on_bad="skip")
    shard.unlink()
    with pytest.raises(DataError, match="the manifest names this shard, but it is missing"):
        append_history(tmp_path / "other", tmp_path / "out", KEPT)


def test_what_does_not_fit_is_refused(prepared, tmp_path):
    store, table = tmp_path / "store", prepared.parent / "day.parquet"
    with pytest.raises(ConfigError, match="column 'tags' holds lists"):
        append_history(store, prepared)
    with pytest.raises(ConfigError, match=r"has no split 'hot'; it has warm, cold"):
        append_history(store, prepared / "hot", KEPT)
    with pytest.raises(ConfigError, match="no column 'cost' in the table; it has user, "):
        append_history(store, prepared, replace(KEPT, groups={"a": ("cost",)}))
    with pytest.raises(ConfigError, match="column 'item' is numbers in the spec, and hashed text in"):
        append_history(store, prepared, replace(KEPT, columns={"item": ColumnSpec(dtype="int64")}))
    with pytest.raises(ConfigError, match="column 'user' is hashed text in the spec, and numbers in"):
        append_history(store, prepared, replace(KEPT, columns={"user": ColumnSpec(hash=True)}))
    for data in ([prepared, table], [table, prepared]):
        with pytest.raises(ConfigError, match=r"day.parquet is no prepared data set, and "):
            append_history(store, data, KEPT)
    with pytest.raises(ConfigError, match=r"tfrecord is given twice"):
        append_history(store, [prepared, prepared / "warm"], KEPT)
    copy = shutil.copytree(prepared, tmp_path / "copy")
    with pytest.raises(DataError, match=r"copy/\S+tfrecord: it is equal to .*its rows would occur twice"):
        append_history(store, [prepared, copy], KEPT)
    prepare(table, tmp_path / "no-time", PrepareConfig(), spec=replace(SPEC, time=None))
    with pytest.raises(ConfigError, match="was prepared without a time: name the column with --time"):
        append_history(store, tmp_path / "no-time")
    other = {**SPEC.columns, "price": ColumnSpec(dtype="float32", max=1e6)}
    prepare(table, tmp_path / "else", PrepareConfig(), spec=replace(SPEC, columns=other))
    with pytest.raises(ConfigError, match=r"else was prepared in another way than .*: append them one by"):
        append_history(store, [prepared, tmp_path / "else"], KEPT)
    with pytest.raises(ConfigError, match="is a prepared data set: append it with --engine duckdb"):
        append_history_on_spark(store, prepared / "warm", KEPT)
    job = ["--engine", "streaming", "--job", str(tmp_path / "job")]
    done = CliRunner().invoke(main, ["history", "append", str(store), "--data", str(prepared), *job])
    assert done.exit_code == 2
    assert "is a prepared data set: append it with --engine duckdb" in " ".join(done.output.split())
    assert not store.exists()

"""Tables of events become the same data set, whatever their format, order, files and the memory."""

import datetime as dt
import gzip
import json
import re
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.core.group_index import GroupIndex
from gmeta.core.schema import Column
from gmeta.preprocess import ColumnSpec, PrepareConfig, TableSpec, prepare
from gmeta.preprocess.config import no_progress
from gmeta.preprocess.local import duckdb_engine
from gmeta.preprocess.local import duckdb_engine as memory
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.plan.column_values import hash_text
from gmeta.preprocess.shape_spec import Explode, Shape
from gmeta.preprocess.source import ELEMENT, RECORD, BadRecords, join_rows
from gmeta.preprocess.tables.table_source import TableSource
from support import plan_in_memory
from support.data_files import EVENT_SPEC as SPEC
from support.data_files import event_table, parts, read_split, shuffled, write_table

CONFIG = PrepareConfig(batch_rows=8, shards=3, seed=5, layout="columnar")


def contents(folder):
    """The shards and their indexes."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if "tfrecord" in path.name}


def sort_key(row):
    price = np.float32(row["price"]).item()
    return (
        row["user"],
        row["ts"],
        hash_text(row["item"]),
        price,
        (len(row["tags"]), row["tags"]),
        float(row["click"]),
    )


def test_what_is_written_is_what_was_given(tmp_path):
    """Against plain Python: tasks, order, batches, columns."""
    table = event_table(500)
    summary = prepare(write_table(table, tmp_path / "t.parquet"), tmp_path / "out", CONFIG, spec=SPEC)
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.schema.columns == (
        Column("user"),
        Column("batch_id"),
        Column("ts"),
        Column("click", "float32"),
        Column("item"),
        Column("price", "float32"),
        Column("tags", is_list=True),
    )
    tasks = {}
    for row in sorted(table.to_pylist(), key=sort_key):
        tasks.setdefault(row["user"], []).append(row)
    found = {}
    for row in read_split(tmp_path / "out", "train"):
        found.setdefault(row.pop("user")[0], {}).setdefault(row.pop("batch_id")[0], []).append(row)
    assert found.keys() == tasks.keys()
    assert any(len(batches) > 3 for batches in found.values())
    for user, rows in tasks.items():
        pieces = np.array_split(np.arange(len(rows)), max(1, len(rows) // 8))
        assert sorted(found[user]) == list(range(len(pieces)))
        for number, piece in enumerate(pieces):
            assert found[user][number] == [
                {
                    "ts": [rows[place]["ts"]],
                    "click": [rows[place]["click"]],
                    "item": [hash_text(rows[place]["item"])],
                    "price": [np.float32(rows[place]["price"])],
                    "tags": rows[place]["tags"],
                }
                for place in piece
            ]
    assert (summary.rows_read, summary.rows, summary.tasks) == (500, 500, len(tasks))
    assert (manifest.seed, manifest.layout) == (5, "columnar")
    assert manifest.versions == {"plan": plan.PLAN_VERSION, "layout": 1}
    for shard in manifest.splits["train"].shards:
        assert GroupIndex.load(tmp_path / "out" / shard.name).checksum == shard.index


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The shards of one table, and the table."""
    folder, table = tmp_path_factory.mktemp("tables"), event_table(3000)
    prepare(write_table(table, folder / "t.parquet"), folder / "out", CONFIG, spec=SPEC)
    return contents(folder / "out"), table


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl", "t.csv.gz", "t.jsonl.gz"])
def test_every_format_gives_the_same_bytes(expected, tmp_path, name):
    shards, table = expected
    path = write_table(shuffled(table), tmp_path / name.removesuffix(".gz"))
    if name.endswith(".gz"):
        path.with_name(name).write_bytes(gzip.compress(path.read_bytes()))
    prepare(tmp_path / name, tmp_path / "out", CONFIG, spec=SPEC)
    assert contents(tmp_path / "out") == shards


@pytest.mark.parametrize("given_", ["folder", "pattern", "several"])
def test_a_table_may_be_many_files(expected, tmp_path, given_):
    shards, table = expected
    for number, part in enumerate(parts(shuffled(table), [0, 100, 2000])):
        write_table(part, tmp_path / "t" / f"day={number}" / "part.parquet")
    (tmp_path / "t" / "_SUCCESS").touch()
    (tmp_path / "t" / ".hidden.parquet").write_text("left alone")
    folder = tmp_path / "t"
    several = sorted(folder.glob("*/*.parquet"))
    data = {"folder": folder, "pattern": f"{folder}/*/part.parquet", "several": several}
    summary = prepare(data[given_], tmp_path / "out", CONFIG, spec=SPEC)
    assert contents(tmp_path / "out") == shards
    assert summary.rows_read == 3000
    names = Manifest.load(tmp_path / "out").config["inputs"]
    assert sorted(names) == [f"day={number}/part.parquet" for number in range(4)]


def test_little_memory_gives_the_same_bytes(expected, tmp_path, monkeypatch):
    """Many parts, many runs, and shards that are merged in pieces."""
    shards, table = expected
    monkeypatch.setattr(duckdb_engine, "_ROWS", 100)
    monkeypatch.setattr(memory, "RUN_SHARE", 10_000 / (256 << 20))
    monkeypatch.setattr(memory, "MERGE_SHARE", 5000 / (256 << 20))
    data = write_table(table, tmp_path / "t.csv")
    prepare(data, tmp_path / "out", CONFIG, spec=SPEC, memory_limit=memory.LEAST)
    assert contents(tmp_path / "out") == shards


@settings(max_examples=15)
@given(
    rows=st.integers(1, 300),
    seed=st.integers(0, 99),
    config=st.builds(
        PrepareConfig,
        seed=st.integers(0, 3),
        min_rows=st.integers(1, 4),
        max_rows=st.sampled_from([0, 60]),
        batch_rows=st.sampled_from([None, 4, 9]),
        shards=st.integers(1, 3),
        layout=st.sampled_from(["columnar", "example"]),
    ),
    unique=st.sampled_from([(), ("item",), ("item", "click")]),
    time=st.sampled_from(["ts", None, "price"]),
)
@pytest.mark.shown_by("test_what_is_written_is_what_was_given")
def test_the_engine_agrees_with_the_plan_in_memory(tmp_path_factory, rows, seed, config, unique, time):
    folder = tmp_path_factory.mktemp("both")
    data = write_table(event_table(rows, users=5, seed=seed), folder / "t.parquet")
    spec = TableSpec("user", time=time, label="click", unique=unique, columns=SPEC.columns)
    source = TableSource([data], spec, duckdb_engine.connect(1 << 30))
    (folder / "expected").mkdir()
    bad, plan_config = BadRecords("skip"), config.resolve(source.defaults)
    try:
        expected = plan_in_memory.run(source, plan_config, bad, no_progress, folder / "expected")
    except DataError as error:
        with pytest.raises(DataError, match=re.escape(str(error))):
            prepare(data, folder / "out", config, "skip", spec=spec)
        return
    summary = prepare(data, folder / "out", config, "skip", spec=spec)
    assert contents(folder / "out") == contents(folder / "expected")
    assert summary.task_sizes == expected.task_sizes
    assert {entry.reason: (entry.rows, entry.tasks) for entry in summary.left_out} == expected.left_out
    assert sum(kind.count for kind in summary.bad) == sum(bad.counts.values())
    assert summary.rows_read == rows


def test_a_hot_task_is_cut_like_any_other(tmp_path):
    table = event_table(4000, users=1)
    prepare(write_table(table, tmp_path / "t.parquet"), tmp_path / "out", CONFIG, spec=SPEC)
    (split,) = Manifest.load(tmp_path / "out").splits.values()
    assert split.groups >= 4000 // 16


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.jsonl"])
def test_without_a_spec_of_columns_all_numbers_and_text_are_taken(tmp_path, name):
    data = write_table(event_table(50).drop_columns(["tags"]), tmp_path / name)
    summary = prepare(data, tmp_path / "out", spec=TableSpec("user", time="ts"))
    manifest = Manifest.load(tmp_path / "out")
    assert {column.name for column in manifest.schema} == {
        *("user", "batch_id", "ts", "item", "price", "click", "unused")
    }
    assert "item" in manifest.roles.hashed
    assert summary.columns_hashed == manifest.roles.hashed
    assert (summary.columns, summary.columns_left_out) == (6, ())


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl", "t.csv"])
def test_types_that_formats_write_differently(tmp_path, name):
    """Booleans, dates and times, whole numbers among nulls."""
    table = pa.table(
        {
            "user": [1, 1],
            "ts": pa.array([dt.datetime(2024, 5, 1, 12), dt.datetime(2024, 5, 1, 11)], pa.timestamp("us")),
            "day": [dt.date(2024, 5, 1), dt.date(2024, 5, 2)],
            "click": [True, False],
        }
    )
    if name == "t.jsonl":
        rows = [{**row, "ts": str(row["ts"]), "day": str(row["day"])} for row in table.to_pylist()]
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        write_table(table, tmp_path / name)
    spec = TableSpec("user", time="ts", label="click", columns={"day": ColumnSpec()})
    prepare(tmp_path / name, tmp_path / "out", spec=spec)
    second = 10**6
    midnight = 1714521600 * second
    assert [(row["ts"], row["day"], row["click"]) for row in read_split(tmp_path / "out", "train")] == [
        ([midnight + 11 * 3600 * second], [midnight + 86400 * second], [0.0]),
        ([midnight + 12 * 3600 * second], [midnight], [1.0]),
    ]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (["2019-10-01 00:00:02 UTC", "2019-10-01 00:00:01 UTC", "2019-10-01 00:00:03 UTC"], [2, 1, 3]),
        (["2019-10-01T00:00:02+00:00", "2019-10-01 08:00:01+08:00", "2019-09-30T23:30:03-0030"], [2, 1, 3]),
        (["2019-10-01 00:00:02", "2019-10-01T00:00:01Z", "2019-10-01 01:00:03.000000999+01"], [2, 1, 3]),
    ],
)
def test_times_with_a_zone_are_ordered_as_utc(tmp_path, form, times, expected):
    table = pa.table({"user": [1, 1, 1], "ts": times, "item": [5, 6, 7]})
    prepare(write_table(table, tmp_path / f"t.{form}"), tmp_path / "out", spec=TableSpec("user", time="ts"))
    found = read_split(tmp_path / "out", "train")
    assert [row["item"][0] for row in found] == [6, 5, 7]
    assert [row["ts"][0] - 1569888000_000000 for row in found] == [s * 10**6 for s in sorted(expected)]


def test_whole_numbers_with_a_point_keep_their_digits(tmp_path):
    """As pandas writes ids beside nulls: float32 would merge them."""
    (tmp_path / "t.csv").write_text("user,id\n1,123456701.0\n1,123456702.0\n2,123456703.0\n")
    summary = prepare(tmp_path / "t.csv", tmp_path / "out", spec=TableSpec("user"))
    found = {row["id"][0] for row in read_split(tmp_path / "out", "train")}
    assert found == {123456701, 123456702, 123456703}
    assert "'id' holds whole numbers such as '123456701.0'" in summary.notes[0]


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        (",user,item\n0,1,5\n1,1,6\n", "column 1, which has no name"),
        ("user,item,\n1,5,\n1,6,\n", "column 3, which has no name"),
        ("Unnamed: 0,user,item\n0,1,5\n1,1,6\n", "Unnamed: 0"),
        ("user,item,brand\n1,5,\n1,6,NULL\n", "brand"),
    ],
)
def test_columns_without_a_name_or_a_value_are_left_out_and_named(tmp_path, text, left_out):
    (tmp_path / "t.csv").write_text(text)
    summary = prepare(tmp_path / "t.csv", tmp_path / "out", spec=TableSpec("user"))
    assert summary.columns_left_out == (left_out,)
    assert [column.name for column in Manifest.load(tmp_path / "out").schema] == ["user", "batch_id", "item"]
    assert sorted(row["item"][0] for row in read_split(tmp_path / "out", "train")) == [5, 6]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
@pytest.mark.shown_by(case="csv")
def test_the_order_of_files_and_rows_decides_no_type(tmp_path, form):
    """A word for a missing price, in any place, is asked about, and hashes no price of the other file."""
    one = write_table(pa.table({"user": [1, 1], "price": [0.5, 0.7]}), tmp_path / f"a.{form}")
    other = write_table(pa.table({"user": [2, 2], "price": ["-", "0.9"]}), tmp_path / f"b.{form}")
    if form == "jsonl":
        other.write_text('{"user": 2, "price": "-"}\n{"user": 2, "price": 0.9}\n')
    # A column of text in Parquet is text, unless the spec says otherwise.
    price = ColumnSpec(dtype="float32" if form == "parquet" else None)
    said = rf"b\.{form}.* null: .*price must be given, got '-'; give what stands for gaps"
    for place, files in enumerate(([one, other], [other, one])):
        with pytest.raises(DataError, match=said):
            prepare(files, tmp_path / "no", spec=TableSpec("user", columns={"price": price}))
        spec = TableSpec("user", columns={"price": replace(price, default=9)})
        prepare(files, tmp_path / f"out{place}", spec=spec)
        found = sorted(row["price"][0] for row in read_split(tmp_path / f"out{place}", "train"))
        assert found == [0.5, np.float32(0.7), np.float32(0.9), 9]


def test_a_column_that_only_some_files_have_is_not_lost(tmp_path):
    one = write_table(pa.table({"user": [1], "x": [1]}), tmp_path / "a.csv")
    other = write_table(pa.table({"user": [2]}), tmp_path / "b.csv")
    for files in ([one, other], [other, one]):
        with pytest.raises(
            ConfigError, match=r"column 'x' is in .*a\.csv, and not in .*b\.csv: name in --spec"
        ):
            prepare(files, tmp_path / "out", spec=TableSpec("user"))


def test_a_wide_table_is_what_a_narrow_one_would_be(tmp_path, monkeypatch):
    table = event_table(300)
    columns = {**SPEC.columns, **{f"x{place}": ColumnSpec() for place in range(6)}}
    for place in range(6):
        values = np.random.default_rng(place).integers(0, 9, 300) / (1 + place % 2)
        table = table.append_column(f"x{place}", pa.array(values if place % 2 else values.astype(np.int64)))
    data = write_table(table, tmp_path / "t.csv")
    for wide, unique in ((256, ()), (4, ()), (256, ("item", "x1")), (4, ("item", "x1"))):
        monkeypatch.setattr(duckdb_engine, "_WIDE", wide)
        spec = replace(SPEC, columns=columns, unique=unique)
        prepare(data, tmp_path / f"{wide}{unique}", CONFIG, "skip" if unique else "raise", spec=spec)
    assert contents(tmp_path / "4()") == contents(tmp_path / "256()")
    assert contents(tmp_path / f"4{unique}") == contents(tmp_path / f"256{unique}")


def test_a_file_without_a_header(tmp_path):
    (tmp_path / "t.csv").write_text("1;a;0.5\n2;b;1\n1;c;2\n")
    spec = TableSpec.load(_toml(tmp_path))
    prepare(tmp_path / "t.csv", tmp_path / "out", spec=spec)
    rows = read_split(tmp_path / "out", "train")
    expected = [(1, hash_text("a"), 0.5), (1, hash_text("c"), 2.0), (2, hash_text("b"), 1.0)]
    assert sorted((row["user"][0], row["item"][0], row["x"][0]) for row in rows) == sorted(expected)


def _toml(folder):
    (folder / "spec.toml").write_text(
        'task = "user"\n[columns.item]\nhash = true\n[columns.x]\ndtype = "float32"\n'
        '[csv]\nheader = false\ndelimiter = ";"\nnames = ["user", "item", "x"]\n'
    )
    return folder / "spec.toml"


def test_text_of_every_kind_is_hashed_alike(tmp_path):
    texts = ["plain", 'with "quotes", and commas', "Ünïcödé 漢字", " spaces ", "two\nlines", ""]
    table = pa.table({"user": [1] * 6, "ts": range(6), "item": texts})
    spec = TableSpec("user", time="ts", columns={"item": ColumnSpec(hash=True, default=0)})
    for name in ("t.parquet", "t.jsonl", "t.csv"):
        prepare(write_table(table, tmp_path / name), tmp_path / name[2:], spec=spec)
        got = [row["item"][0] for row in read_split(tmp_path / name[2:], "train")]
        # A CSV file doesn't tell an empty text from none.
        assert got[:5] == [hash_text(text) for text in texts[:5]]
        assert got[5] in (hash_text(""), 0)


def test_the_same_again_is_reused_and_another_spec_is_not(tmp_path):
    data = write_table(event_table(100), tmp_path / "t.parquet")
    prepare(data, tmp_path / "out", spec=SPEC)
    assert prepare(data, tmp_path / "out", spec=SPEC).reused
    shutil.copy(data, tmp_path / "copy.parquet")
    with pytest.raises(GmetaError, match=r"prepared otherwise .*other input files"):
        prepare(tmp_path / "copy.parquet", tmp_path / "out", spec=SPEC)
    with pytest.raises(GmetaError, match=r"prepared otherwise .table"):
        prepare(data, tmp_path / "out", spec=TableSpec("user"))


def test_splits_and_selection(tmp_path):
    table = event_table(2000)
    sizes = dict(zip(*np.unique(table["user"], return_counts=True), strict=True))
    config = PrepareConfig(cold_modulus=3, min_rows=50, max_rows=200)
    summary = prepare(write_table(table, tmp_path / "t.parquet"), tmp_path / "out", config, spec=SPEC)
    kept = {user for user, size in sizes.items() if 50 <= size <= 200}
    for split, cold in (("warm", False), ("cold", True)):
        tasks = {row["user"][0] for row in read_split(tmp_path / "out", split)}
        assert tasks == {user for user in kept if (user % 3 == 0) == cold}
        assert summary.splits[split].tasks == len(tasks)
    assert {entry.reason: entry.tasks for entry in summary.left_out} == {
        "task has fewer than 50 rows": sum(size < 50 for size in sizes.values()),
        "task has more than 200 rows": sum(size > 200 for size in sizes.values()),
    }


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("t.parquet", r"t\.parquet: name the column of the task, with --task COLUMN or --spec FILE"),
        ("nothing.parquet", "can't read it: No such file|not a MovieLens folder|can't list"),
    ],
)
def test_a_table_needs_a_task(tmp_path, data, said):
    write_table(event_table(10), tmp_path / "t.parquet")
    with pytest.raises((ConfigError, DataError), match=said):
        prepare(tmp_path / data, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "advice"), [("userId", "--task userId"), ("User-ID", "--task User-ID"), ("used", "")]
)
def test_without_a_task_a_column_of_users_is_pointed_out(tmp_path, name, advice):
    (tmp_path / "t.csv").write_text(f"{name},item,click\n1,5,0\n1,6,1\n")
    (note,) = prepare(tmp_path / "t.csv", tmp_path / "out", spec=TableSpec(label="click")).notes
    assert note.endswith(f"prepare again with {advice}" if advice else "for models that need no tasks")


def test_a_file_is_not_read_twice(tmp_path):
    data = write_table(event_table(10), tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match=r"t\.parquet is given twice"):
        prepare([data, tmp_path], tmp_path / "out", spec=SPEC)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A table that is larger than `SMALL`."""
    rng, rows = np.random.default_rng(0), 700_000
    columns = {"user": rng.integers(0, 5000, rows), "ts": rng.integers(0, 10**9, rows)}
    columns |= {f"x{place}": rng.integers(0, 2**62, rows) for place in range(20)}
    return write_table(pa.table(columns), tmp_path_factory.mktemp("wide") / "t.parquet")


SMALL = 96 << 20
OUT_OF_CORE = """
import resource, sys
from gmeta.cli import main
from gmeta.preprocess.local import duckdb_engine
duckdb_engine.DUCKDB_SHARE = {share}
if {limit}:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
main(["prepare", "--data", {data!r}, "--task", "user", "--time", "ts", "--layout", "columnar",
      "--memory-limit", "512MiB", "--out", {out!r}])
"""


def out_of_core(data, out, limit):
    program = OUT_OF_CORE.format(share=SMALL / (256 << 20), limit=limit, data=str(data), out=str(out))
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.slow
def test_rows_that_do_not_fit_into_memory(wide, tmp_path):
    prepare(wide, tmp_path / "whole", PrepareConfig(layout="columnar"), spec=TableSpec("user", time="ts"))
    done = out_of_core(wide, tmp_path / "out", 0)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.shown_by("cli/test_prepare.py::test_a_file_size_limit_is_one_line_and_leaves_nothing")
def test_a_disk_that_is_too_small_for_temporary_files(wide, tmp_path):
    done = out_of_core(wide, tmp_path / "out", 4 << 20)
    assert done.returncode == 2
    error = done.stderr.splitlines()[-1]
    assert re.match(
        r"gmeta: error: can't write temporary files while reading .*t\.parquet: .*too large", error
    )
    assert list(tmp_path.iterdir()) == []


FORMS = {
    "csv": lambda lists: (
        "user,items\n" + "".join(f"{user},{' '.join(map(str, items))}\n" for user, items in enumerate(lists))
    ),
    "jsonl": lambda lists: "".join(
        json.dumps({"user": user, "items": items}) + "\n" for user, items in enumerate(lists)
    ),
    "parquet": lambda lists: pa.table(
        {"user": range(len(lists)), "items": pa.array(lists, pa.list_(pa.int64()))}
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("explode", [True, False])
def test_rows_name_their_records_in_the_files(tmp_path, form, explode):
    """Records are numbered over all files, those without a row too; items count up over the files."""
    rng = np.random.default_rng(0)
    sizes = [rng.integers(0, 4, 3000), rng.integers(0, 4, 2000)]
    ends = np.cumsum(np.concatenate(sizes))
    lists = [range(end - size, end) for size, end in zip(np.concatenate(sizes), ends, strict=True)]
    lists = [[int(item) for item in each] for each in lists]
    for number, part in enumerate((lists[:3000], lists[3000:])):
        made = FORMS[form](part)
        path = tmp_path / f"{number}.{form}"
        path.write_text(made) if isinstance(made, str) else pq.write_table(made, path)
    shape = Shape(Explode("items", "x")) if explode else Shape()
    items = {} if explode else {"items": ColumnSpec(is_list=True)}
    with closing(duckdb_engine.connect(1 << 30)) as connection:
        spec = TableSpec("user", shape=shape, columns=items, defaults=("own",))
        source = TableSource([tmp_path], spec, connection, places=True)
        assert source.count_records() == 5000
        rows = join_rows([*source.chunks(BadRecords("raise"), no_progress)])
        if not explode:
            assert rows[RECORD].tolist() == list(range(5000))
            assert ELEMENT not in rows
            return
        assert rows["x"].tolist() == list(range(ends[-1]))
        assert rows[RECORD].tolist() == [number for number, each in enumerate(lists) for _ in each]
        assert rows[ELEMENT].tolist() == [place for each in lists for place in range(len(each))]

"""The preparation on Spark: the bytes of the other engines, from files, addresses and tables."""

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gmeta.cli import main
from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.core.schema import Column
from gmeta.preprocess import ColumnSpec, PrepareConfig, TableSpec, prepare
from gmeta.preprocess.cluster import spark_engine, spark_rows
from gmeta.preprocess.cluster.spark_engine import spark_errors, spark_session
from gmeta.preprocess.cluster.table_job import TableJob
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.plan.ranges import edges
from gmeta.preprocess.source import NUMBER, join_rows
from support import cluster_jobs
from support.cluster_jobs import run_jobs
from support.data_files import EVENT_SPEC as SPEC
from support.data_files import event_table, parts, shuffled, write_table

CONFIG = PrepareConfig(batch_rows=8, shards=2, seed=5, layout="columnar")


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    """Three workers, of which each task may fail once."""
    pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    warehouse = str(tmp_path_factory.mktemp("warehouse"))
    conf = {"spark.sql.warehouse.dir": warehouse, "spark.sql.files.maxPartitionBytes": "40000"}
    with spark_session("local[3,2]", conf) as session:
        yield session


WHOLE = {name: ColumnSpec(dtype="int64") for name in ("user", "ts")}


def contents(folder):
    """All files but the summary, whose examples name lines where an engine knows them."""
    kept = (".tfrecord", ".gidx", ".parquet")
    found = {path.name: path.read_bytes() for path in folder.rglob("*") if path.suffix in kept}
    return {**found, "manifest": json.loads((folder / "manifest.json").read_text())}


def test_all_engines_write_the_same_bytes(spark, tmp_path):
    """Two files of text with bad lines and repeated keys, in two splits, by the command line."""
    for number, table in enumerate(parts(shuffled(event_table(3000)), [1100])):
        path = write_table(table, tmp_path / "t" / f"day={number}" / "part.csv")
        with path.open("a") as file:
            file.write(",5,item,1.5,,1,x\n7,5,item,1.5,,1\n7,5,item,1.5,a|2,1,x\n")
    spec = replace(SPEC, unique=("item",))
    config = replace(CONFIG, cold_modulus=3, min_rows=2, max_rows=28)
    prepare([tmp_path / "t"], tmp_path / "duckdb", config, "skip", spec=spec)
    job = TableJob.of_files([tmp_path / "t"], tmp_path / "streaming", spec, config, "skip", ranges=4)
    run_jobs(job, tmp_path / "job")
    (tmp_path / "spec.toml").write_text(
        'task = "user"\ntime = "ts"\nlabel = "click"\nunique = ["item"]\n[columns.item]\nhash = true\n'
        '[columns.price]\ndtype = "float32"\n[columns.tags]\ndtype = "int64"\nis_list = true\n'
    )
    command = [
        "prepare",
        "--engine",
        "spark",
        "--data",
        str(tmp_path / "t"),
        "--out",
        str(tmp_path / "spark"),
    ]
    command += [
        "--spec",
        str(tmp_path / "spec.toml"),
        "--on-bad",
        "skip",
        "--layout",
        "columnar",
        "--seed",
        "5",
    ]
    command += ["--batch-rows", "8", "--shards", "2", "--cold-modulus", "3", "--min-rows", "2"]
    command += ["--max-rows", "28", "--ranges", "3"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output

    expected = contents(tmp_path / "duckdb")
    assert len(expected) == 10
    assert Manifest.load(tmp_path / "spark").texts.keys() == {"item"}
    assert contents(tmp_path / "streaming") == expected
    assert contents(tmp_path / "spark") == expected
    digests = {Manifest.load(tmp_path / name).digest for name in ("duckdb", "streaming", "spark")}
    assert len(digests) == 1
    dropped = Manifest.load(tmp_path / "spark").dropped
    assert dropped["part.csv: missing field"] == dropped["part.csv: null"] == 2
    assert dropped["task has more than 28 rows"] > 200
    left = {path.name for path in tmp_path.iterdir()}
    assert not any("partial" in name for name in left)
    assert "already prepared" in CliRunner().invoke(main, command).output


def test_a_hot_task_a_killed_worker_and_parquet(spark, tmp_path, monkeypatch):
    """Nine rows of ten are of one task and one time; a worker dies while it writes."""
    rows = 4000
    table = event_table(rows)
    user, ts = table["user"].to_numpy().copy(), table["ts"].to_numpy().copy()
    user[: rows * 9 // 10] = 5
    ts[: rows * 9 // 10] = 77
    table = table.set_column(0, "user", [user]).set_column(1, "ts", [ts])
    config = replace(CONFIG, layout="example", batch_rows=30)
    path = write_table(shuffled(table), tmp_path / "t.parquet")
    prepare(path, tmp_path / "a", config, spec=SPEC)
    seen = []
    monkeypatch.setattr(spark_rows, "write_shards", cluster_jobs.written_or_killed)
    monkeypatch.setattr(spark_engine, "edges", lambda counts: edges(seen.extend(counts) or seen))
    spark_engine.prepare_on_spark(path, tmp_path / "b", config, spec=SPEC, ranges=5)
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    assert (tmp_path / "killed").exists()
    of_range = [sum(rows for _, rows in count.ends) + sum(s * n for _, s, n in count.inner) for count in seen]
    assert sum(of_range) == rows
    assert len(of_range) == 5
    assert max(of_range) < 0.3 * rows


def test_a_table_of_the_catalogue(spark, tmp_path):
    table = event_table(500).drop_columns(["unused"])
    path = write_table(table, tmp_path / "t.parquet")
    prepare(path, tmp_path / "a", CONFIG, spec=SPEC)
    spark.sql("CREATE DATABASE shop")
    spark.read.parquet(str(path)).repartition(2).write.saveAsTable("shop.events")
    summary = spark_engine.prepare_on_spark("hive:shop.events", tmp_path / "b", CONFIG, spec=SPEC, ranges=2)
    ours, expected = contents(tmp_path / "b"), contents(tmp_path / "a")
    manifest = ours.pop("manifest")
    assert ours == {name: data for name, data in expected.items() if name != "manifest"}
    assert manifest["schema"] == expected["manifest"]["schema"]
    assert (summary.source, summary.rows_read) == ("shop.events", 500)
    assert manifest["config"]["inputs"]["shop.events"].startswith("sizes and times ")
    again = spark_engine.prepare_on_spark("hive:shop.events", tmp_path / "b", CONFIG, spec=SPEC)
    assert again.reused


def test_addresses_and_bad_records(spark, tmp_path):
    """What only the cluster can read: it says what the columns are, and a bad record ends the run."""
    path = write_table(event_table(50), tmp_path / "t" / "a b.csv")
    with path.open("a") as file:
        file.write("seven,5,item,1.5,,1,x\n")
    address = f"file://{tmp_path}/t/*.csv"
    spec = replace(SPEC, columns={**WHOLE, **SPEC.columns})
    with pytest.raises(
        DataError, match=r"a(%20| )b.csv: not a number: user must be a whole number, got 'seven'"
    ):
        spark_engine.prepare_on_spark(address, tmp_path / "out", CONFIG, spec=spec)
    assert not (tmp_path / "out").exists()
    lines = write_table(event_table(300), tmp_path / "t" / "c.jsonl")
    prepare(lines, tmp_path / "a", CONFIG, spec=spec)
    spark_engine.prepare_on_spark(f"file://{lines}", tmp_path / "b", CONFIG, spec=spec, ranges=2)
    ours, expected = contents(tmp_path / "b"), contents(tmp_path / "a")
    assert {**ours, "manifest": None} == {**expected, "manifest": None}
    with pytest.raises(DataError, match="no file has such a name"):
        spark_engine.prepare_on_spark(f"file://{tmp_path}/none/*.csv", tmp_path / "out", CONFIG, spec=SPEC)


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_types_are_decided_by_all_values_on_a_cluster_too(spark, tmp_path, form):
    """Odd values in the last rows of the last file; then times of two units, of which each has a file."""
    rows = 300
    table = pa.table(
        {
            "user": [number % 7 for number in range(rows)],
            "ts": [f"2014-02-27 10:{number // 60:02}:{number % 60:02} UTC" for number in range(rows)],
            "id": [123456701.0 + number for number in range(rows)],
            "mixed": ["7"] * (rows - 1) + ["x"],
            "share": [1.0] * (rows - 1) + [0.5],
            "none": pa.nulls(rows, pa.float64()),
        }
    )
    for number, part in enumerate(parts(table, [200])):
        write_table(part, tmp_path / "t" / f"{number}.{form}")
    address, spec = f"file://{tmp_path}/t/*.{form}", TableSpec("user", time="ts")
    prepare([tmp_path / "t"], tmp_path / "a", CONFIG, spec=spec)
    summary = spark_engine.prepare_on_spark(address, tmp_path / "b", CONFIG, spec=spec, ranges=2)
    ours, expected = contents(tmp_path / "b"), contents(tmp_path / "a")
    assert {**ours, "manifest": None} == {**expected, "manifest": None}
    assert ours["manifest"]["schema"] == expected["manifest"]["schema"]
    dtypes = {column.name: column.dtype for column in Manifest.load(tmp_path / "b").schema}
    assert (dtypes["id"], dtypes["share"], "none" in dtypes) == ("int64", "float32", False)
    assert any("'none' has no value" in note for note in summary.notes)
    for number, time in enumerate((1393545600, 1393804800000)):
        write_table(pa.table({"user": [1], "ts": [time]}), tmp_path / "u" / f"{number}.{form}")
    with pytest.raises(
        ConfigError, match=r"'ts', the time, holds seconds such as .* and milliseconds such as"
    ):
        spark_engine.prepare_on_spark(f"file://{tmp_path}/u/*.{form}", tmp_path / "c", CONFIG, spec=spec)


def test_numbers_that_json_rewrites_are_not_hashed_on_a_cluster(spark, tmp_path):
    write_table(pa.table({"user": [1, 2], "id": [9.0, 9007199254740993.0]}), tmp_path / "t" / "a.jsonl")
    spec = TableSpec("user", columns={"id": ColumnSpec(hash=True)})
    with pytest.raises(ConfigError, match=r"hash = true, and holds numbers with a point .* such as '9"):
        spark_engine.prepare_on_spark(f"file://{tmp_path}/t/*.jsonl", tmp_path / "a", CONFIG, spec=spec)


def test_errors_of_workers_are_one_line(spark):
    numbers = spark.range(1)
    with pytest.raises(DataError, match=r"^t.csv:7: nothing is right$"), spark_errors():
        numbers.mapInArrow(cluster_jobs.refuse, "id bigint").collect()
    with (
        pytest.raises(GmetaError, match=r"^a worker of Spark: OSError: .*No space left.*/full/out"),
        spark_errors(),
    ):
        numbers.mapInArrow(cluster_jobs.break_down, "id bigint").collect()
    with pytest.raises(GmetaError, match=r"^Spark: .*TABLE_OR_VIEW_NOT_FOUND"), spark_errors():
        spark.table("nowhere.nothing")


@pytest.mark.parametrize("data", [["a.csv", "hive:b"], ["hive:a", "hive:b"], ["a.csv", "hdfs://b"]])
def test_kinds_of_data_are_not_mixed(spark, tmp_path, data):
    with pytest.raises(ConfigError, match="give files, or addresses, or one hive:table"):
        spark_engine.prepare_on_spark(data, tmp_path / "out", spec=SPEC)


def test_a_missing_java_is_named(monkeypatch, tmp_path):
    pytest.importorskip("pyspark")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(GmetaError, match="needs Java 17"):
        spark_engine.prepare_on_spark("t.csv", tmp_path / "out", spec=SPEC)


def test_a_missing_spark_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(GmetaError, match=r"pip install 'gmeta\[spark\]'"):
        spark_engine.prepare_on_spark("t.csv", tmp_path / "out", spec=SPEC)


def test_a_range_of_repeated_rows_alone_is_nothing(tmp_path):
    """Where rows are ranges only because of rows that go, nothing is counted but those."""
    path = write_table(event_table(30), tmp_path / "t.parquet")
    job = TableJob.of_files([path], tmp_path / "out", replace(SPEC, unique=("item",)), CONFIG, "skip")
    columns = [*job.columns(), Column(spark_rows.AGAIN)]
    rows = {
        c.name: (np.ones(2, np.int64), np.arange(3)) if c.is_list else np.ones(2, c.dtype) for c in columns
    }
    (parcel,) = spark_rows.pack({**rows, NUMBER: np.zeros(2, np.int64)})
    batch = pa.RecordBatch.from_pydict({"salt": [0], "range": [3], "rows": [parcel]})
    (found,) = spark_rows.number_ranges(job, iter([batch]))
    assert found.to_pylist()[0] == {
        "range": 3,
        "count": None,
        "tally": found["tally"][0].as_py(),
        "rows": None,
    }
    assert '"REPEATED_KEY", 2' in found["tally"][0].as_py()
    assert list(spark_rows.place_pieces(job, {}, 1, np.zeros(2, np.int64), iter([found]))) == []


@given(rows=st.integers(1, 400), pieces=st.integers(1, 9), shards=st.integers(1, 5))
def test_a_shard_in_pieces_is_the_shard(rows, pieces, shards):
    """Pieces are sorted apart, and come one after another in the order of the shard."""
    key = plan.order_key(3, np.arange(rows), np.zeros(rows, np.int64))
    fine = plan.shard_of(key, shards * pieces)
    assert (fine // pieces == plan.shard_of(key, shards)).all()
    assert (np.diff(fine[np.argsort(key)]) >= 0).all()


def test_large_parcels_are_cut(monkeypatch):
    rows = {"a": np.arange(10_000), "b": (np.arange(20_000), np.arange(10_001) * 2)}
    monkeypatch.setattr(spark_rows, "_PARCEL_BYTES", 50_000)
    parcels = list(spark_rows.pack(rows))
    assert 5 < len(parcels) < 20
    found = join_rows([spark_rows.unpack(parcel) for parcel in parcels])
    assert (found["a"] == rows["a"]).all()
    assert (found["b"][0] == rows["b"][0]).all()
    assert (found["b"][1] == rows["b"][1]).all()

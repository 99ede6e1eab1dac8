"""Appends on a cluster: every engine writes the same bytes, whatever is cut where, killed or repeated."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.cli import main
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.preprocess import ColumnSpec, HistorySpec
from gmeta.preprocess.cluster.spark_engine import spark_session
from gmeta.preprocess.history import cluster_append
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.history.cluster_append import AppendJob, append_history_on_spark
from gmeta.preprocess.history.generation import Generation
from gmeta.preprocess.history.reading import verify_history
from gmeta.preprocess.history.streaming_append import plan_jobs
from support import cluster_jobs
from support.cluster_jobs import as_program, in_process, map_files, partitioned, run_append
from support.reference.history import draw_day, write_day

TYPES = {"user": "int64", "ts": "int64", "item": "int64", "price": "float32"}
SPEC = HistorySpec(
    "user",
    "ts",
    columns={name: ColumnSpec(dtype=dtype) for name, dtype in TYPES.items()},
    groups={"what": ("item",), "cost": ("price",)},
    shards=4,
    stripe_events=4,
)
EARLIER = 11
"""Days that a store has before the two days of a test."""
BAD = "x,5,1,0.5\n7,5,1\n7,5,1,0.5,9\n7,5,2,\n"  # a text, a field too few, one too many, nothing


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    """Two workers, of which each task may fail once."""
    pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    with spark_session("local[2,2]") as session:
        yield session


def write_csv(path, number, events=150, bad=""):
    """Write a day's events, of which some are late."""
    day = pq.read_table(write_day(path.with_suffix(".parquet"), draw_day(number, events, day=number)))
    csv.write_csv(day, path)
    with path.open("a") as file:
        file.write(bad)
    return path


def contents(store):
    """All files of a store."""
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def streamed(store, data, spec=None, on_bad="raise", **options):
    folder = store.with_suffix(".job")
    run_append(plan_jobs(folder, store, [str(path) for path in data], spec, on_bad=on_bad), folder, **options)


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """A store whose users have stripes that an append joins, and two more days."""
    folder = tmp_path_factory.mktemp("grown")
    for number in range(EARLIER):
        append_history(folder / "store", write_csv(folder / f"{number}.csv", number + 1, 60), SPEC)
    days = []
    for day in (4, 20):  # the first of them is late
        names = [folder / f"day={day}" / f"part-{part}.csv" for part in range(2)]
        names[0].parent.mkdir()
        days.append([write_csv(name, day, 200 + part, BAD) for part, name in enumerate(names)])
    expected = shutil.copytree(folder / "store", folder / "expected")
    for day in days:
        assert append_history(expected, day, on_bad="skip").left_out == 8
    places = np.concatenate([Generation(expected).open(shard).index().places for shard in range(4)])
    joined = (places["file"] == EARLIER + 2) & (places["born_first"] < EARLIER + 2)
    assert joined.sum() > 20
    assert verify_history(expected).faults == ()
    return folder / "store", days, contents(expected)


def test_streaming_writes_the_bytes_of_this_process(grown, tmp_path):
    store, days, expected = grown
    shutil.copytree(store, tmp_path / "store")
    for day in days:
        streamed(tmp_path / "store", day, on_bad="skip")
    assert contents(tmp_path / "store") == expected
    assert [path.name for path in (tmp_path / "store.job").iterdir() if path.is_dir()] == []


@pytest.mark.shown_by("test_streaming_writes_the_bytes_of_this_process")
def test_as_programs(grown, tmp_path):
    store, days, expected = grown
    shutil.copytree(store, tmp_path / "store")
    streamed(tmp_path / "store", days[0], on_bad="skip", run=as_program, pieces=1, reducers=1)
    first = {name: data for name, data in expected.items() if f"{EARLIER + 2:08d}" not in name}
    assert {**contents(tmp_path / "store"), "CURRENT": b""} == {**first, "CURRENT": b""}


def test_spark_writes_the_bytes_of_this_process(spark, grown, tmp_path, monkeypatch):
    """A worker dies while it writes, and the second day comes by the command line."""
    store, days, expected = grown
    shutil.copytree(store, tmp_path / "store")
    with monkeypatch.context() as patch:
        patch.setattr(cluster_append, "write_shards", cluster_jobs.appended_or_killed)
        done = append_history_on_spark(tmp_path / "store", days[0], on_bad="skip")
    assert (tmp_path / "killed").exists()
    assert (done.events, done.left_out) == (401, 8)
    command = ["history", "append", str(tmp_path / "store"), "--engine", "spark", "--on-bad", "skip"]
    for path in days[1]:
        command += ["--data", str(path)]
    ran = CliRunner().invoke(main, command)
    assert ran.exit_code == 0, ran.output
    assert "401 events in" in ran.output
    assert "8 bad records left out" in ran.output
    assert contents(tmp_path / "store") == expected


def test_spark_reads_parquet_addresses_and_tables(spark, grown, tmp_path):
    _, days, _ = grown
    day = days[0][0].with_suffix(".parquet")
    append_history(tmp_path / "expected", day, SPEC)
    append_history_on_spark(tmp_path / "file", day, SPEC)
    assert contents(tmp_path / "file") == contents(tmp_path / "expected")
    append_history_on_spark(tmp_path / "address", f"file://{day}", SPEC)
    files = [{n: d for n, d in contents(tmp_path / s).items() if "shard-" in n} for s in ("file", "address")]
    assert files[0] == files[1]
    with pytest.raises(DataError, match=r"generation 1 holds the events of file.* already"):
        append_history_on_spark(tmp_path / "address", f"file://{day}")


def test_a_bad_record_ends_an_append_on_spark(spark, grown, tmp_path):
    _, days, _ = grown
    with pytest.raises(DataError, match=r"part-0.csv: .*7,5,1"):
        append_history_on_spark(tmp_path / "store", days[0], SPEC)
    assert contents(tmp_path / "store") == {".lock": b""}


@settings(max_examples=8)
@given(
    events=st.integers(1, 80),
    pieces=st.integers(1, 4),
    reducers=st.integers(1, 5),
    shards=st.integers(1, 7),
    days=st.integers(1, 3),
)
@pytest.mark.shown_by("test_streaming_writes_the_bytes_of_this_process")
def test_no_cut_changes_a_byte(tmp_path_factory, events, pieces, reducers, shards, days):
    folder = tmp_path_factory.mktemp("cuts")
    spec = HistorySpec("user", "ts", shards=shards, stripe_events=3)
    for number in range(days):
        day = write_csv(folder / f"{number}.csv", number, events)
        append_history(folder / "a", day, spec)
        streamed(folder / "b", [day], spec, pieces=pieces, reducers=reducers)
    assert contents(folder / "a") == contents(folder / "b")


def test_a_reducer_that_fails_and_comes_again_changes_no_byte(grown, tmp_path, monkeypatch):
    """It fails when it has written a shard; another attempt does all of it; and then a third."""
    store, days, expected = grown
    shutil.copytree(store, tmp_path / "store")
    folder = tmp_path / "job"
    job = plan_jobs(folder, tmp_path / "store", [str(path) for path in days[0]], None, on_bad="skip")
    events = map_files("map", folder, days[0], 2, in_process, "append")
    whole = cluster_append.append_shard

    def fails(*arguments):
        whole(*arguments)
        raise OSError(28, "No space left on device")

    (part,) = partitioned(events, 1)
    with monkeypatch.context() as patch:
        patch.setattr(cluster_append, "append_shard", fails)
        with pytest.raises(OSError, match="No space left"):
            in_process("append", "reduce", folder, part, {})
    assert list((folder / "shards").glob("shard-*")) == []
    assert list((folder / "shards" / "_attempts").iterdir()) == []
    with pytest.raises(GmetaError, match="409 records were read, 8 of them bad, but 0 rows were sorted"):
        in_process("append", "finish", folder, b"", {})
    for _ in range(2):
        in_process("append", "reduce", folder, part, {})

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cluster_append, "finish_append", killed)
        with pytest.raises(KeyboardInterrupt):
            in_process("append", "finish", folder, b"", {})
    assert Generation(tmp_path / "store").manifest.generation == EARLIER
    for _ in range(2):
        said = in_process("append", "finish", folder, b"", {})
    assert said == f"generation {EARLIER + 1} of {tmp_path / 'store'}\n".encode()
    first = {name: data for name, data in expected.items() if f"{EARLIER + 2:08d}" not in name}
    assert {**contents(tmp_path / "store"), "CURRENT": b""} == {**first, "CURRENT": b""}
    assert AppendJob.load(folder) == job


def test_lost_events_are_noticed(grown, tmp_path):
    _, days, _ = grown
    folder = tmp_path / "job"
    plan_jobs(folder, tmp_path / "store", [str(path) for path in days[0]], SPEC, on_bad="skip")
    with pytest.raises(DataError, match="no tally of the records: No such file or directory; run the job"):
        in_process("append", "finish", folder, b"", {})
    parts = partitioned(map_files("map", folder, days[0], 2, in_process, "append"), 4)
    lost = next(part for part in parts if part and not part.startswith(b"!"))
    for part in parts:
        if part != lost:
            in_process("append", "reduce", folder, part, {})
    with pytest.raises(
        GmetaError, match=r"409 records were read, 8 of them bad, but [0-9]+ rows were sorted"
    ):
        in_process("append", "finish", folder, b"", {})
    assert not (tmp_path / "store" / "CURRENT").exists()


def test_a_job_does_not_undo_what_came_after_it(grown, tmp_path):
    _, days, _ = grown
    folder, store = tmp_path / "job", tmp_path / "store"
    job = plan_jobs(folder, store, [str(days[0][0])], SPEC, on_bad="skip")
    append_history(store, days[0][1], SPEC, on_bad="skip")
    with pytest.raises(GmetaError, match=r"another process has written to .* meanwhile: start again"):
        run_append(job, folder)
    with pytest.raises(DataError, match=r"generation 1 holds the events of part-1.csv already"):
        plan_jobs(folder, store, [str(days[0][1])], SPEC)
    with pytest.raises(ConfigError, match="watermark 5 is earlier than"):
        plan_jobs(folder, store, [str(days[0][0])], SPEC, watermark=5)
    with pytest.raises(ConfigError, match="was made with other shards and stripe_events: shards is 4"):
        plan_jobs(folder, store, [str(days[0][0])], HistorySpec("user", "ts", SPEC.columns, SPEC.groups, 16))


def test_bad_records_end_a_job_by_their_content(grown, tmp_path):
    _, days, _ = grown
    job = plan_jobs(tmp_path / "job", tmp_path / "store", [str(days[0][0])], SPEC)
    with pytest.raises(DataError, match=r"part-0.csv: .*fields? expected"):
        run_append(job, tmp_path / "job")
    endless = tmp_path / "endless.csv"
    endless.write_text(f"user,ts,item,price\n4,{2**63 - 1},1,0.5\n")
    job = plan_jobs(tmp_path / "job", tmp_path / "store", [str(endless)], SPEC)
    with pytest.raises(DataError, match="user 4 has an event at time 9223372036854775807"):
        run_append(job, tmp_path / "job")
    only = tmp_path / "only.csv"
    only.write_text("user,ts,item,price\nx,1,1,0.5\n")
    job = plan_jobs(tmp_path / "job", tmp_path / "store", [str(only)], SPEC, on_bad="skip")
    with pytest.raises(DataError, match="every record in it is bad"):
        run_append(job, tmp_path / "job")
    day = write_day(tmp_path / "day.parquet", draw_day(0, 5))
    job = plan_jobs(tmp_path / "job", tmp_path / "store", [str(day)], SPEC)
    with pytest.raises(DataError, match="only lines of text can be streamed; use --engine spark"):
        run_append(job, tmp_path / "job")


def test_the_command_line_describes_the_job(grown, tmp_path):
    _, days, _ = grown
    store, folder = tmp_path / "store", tmp_path / "job"
    command = ["history", "append", str(store), "--data", str(days[0][0].parent), "--on-bad", "skip"]
    command += ["--engine", "streaming"]
    done = CliRunner().invoke(main, [*command, "--user", "user", "--time", "ts"])
    assert done.exit_code == 2
    assert "--engine streaming needs --job" in done.output
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        command[2] = "store"
        done = CliRunner().invoke(
            main, [*command, "--user", "user", "--time", "ts", "--shards", "2", "--job", "job"]
        )
    # The two folders of the fixture hold Parquet files too.
    assert done.exit_code == 0, done.output
    assert "job: files 4, shards 2; run the job" in done.output
    assert AppendJob.load(folder).plan.store == str(store)
    for options, said in (
        (["--engine", "spark", "--job", "x"], "--job is for --engine streaming, not for spark"),
        (["--spark-master", "local"], "--spark-master is for --engine spark, not for duckdb"),
        (["--engine", "spark", "--memory-limit", "2GB"], "--memory-limit is for --engine duckdb, not for"),
    ):
        done = CliRunner().invoke(main, ["history", "append", str(store), "--data", "x", *options])
        assert done.exit_code == 2
        assert said in done.output


def test_a_missing_spark_is_named(monkeypatch, grown, tmp_path):
    _, days, _ = grown
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(GmetaError, match=r"pip install 'gmeta\[spark\]'"):
        append_history_on_spark(tmp_path / "store", days[0], SPEC)
    assert not Path(tmp_path / "store").exists()

"""The preparation as Hadoop Streaming runs it: the same bytes, whatever is cut where, killed or repeated."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.cli import main
from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.preprocess import PrepareConfig, prepare
from gmeta.preprocess.cluster.table_input import Tally
from gmeta.preprocess.cluster.table_job import TableJob
from gmeta.preprocess.source import Reason
from gmeta.preprocess.table_spec import ColumnSpec, CsvForm, TableSpec
from support.cluster_jobs import as_program, command, in_process, map_files, partitioned, run_jobs
from support.data_files import EVENT_SPEC as SPEC
from support.data_files import event_table, parts, shuffled, write_table

CONFIG = PrepareConfig(batch_rows=8, shards=3, seed=5, layout="columnar")
UNIQUE = replace(SPEC, unique=("item",))


def contents(folder):
    """All files but the summary, whose examples name lines where an engine knows them."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "summary.json"]
    found = {path.name: path.read_bytes() for path in files}
    return {**found, "manifest.json": json.loads(found["manifest.json"])}


def streamed(data, out, config=CONFIG, on_bad="raise", spec=SPEC, ranges=7, **options):
    job = TableJob.of_files(data, out, spec, config, on_bad, ranges=ranges)
    run_jobs(job, out.with_suffix(".job"), **options)
    return contents(out)


@settings(max_examples=12)
@given(
    rows=st.integers(1, 300),
    seed=st.integers(0, 99),
    config=st.builds(
        PrepareConfig,
        seed=st.integers(0, 3),
        cold_modulus=st.sampled_from([0, 2]),
        min_rows=st.integers(1, 4),
        max_rows=st.sampled_from([0, 60]),
        batch_rows=st.sampled_from([None, 4, 9]),
        shards=st.integers(1, 3),
        layout=st.sampled_from(["columnar", "example"]),
    ),
    unique=st.sampled_from([(), ("item",), ("item", "click")]),
    time_column=st.sampled_from(["ts", None, "price"]),
    name=st.sampled_from(["t.csv", "t.tsv", "t.jsonl"]),
    cuts=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9)),
)
@pytest.mark.shown_by("test_rules_of_columns_are_those_of_the_embedded_engine")
def test_the_bytes_are_those_of_the_embedded_engine(
    tmp_path_factory, rows, seed, config, unique, time_column, name, cuts
):
    folder = tmp_path_factory.mktemp("t")
    spec = replace(SPEC, unique=unique, time=time_column)
    if time_column == "price":
        spec = replace(spec, label=None)
    data = [write_table(event_table(rows, seed=seed), folder / name)]
    pieces, reducers, ranges = cuts

    def run():
        return streamed(data, folder / "b", config, "skip", spec, ranges, pieces=pieces, reducers=reducers)

    refused = None
    try:
        prepare(data, folder / "a", config, "skip", spec=spec)
    except DataError as error:  # a split without tasks
        refused = str(error).partition(": ")[2]
    if refused is None:
        assert run() == contents(folder / "a")
    else:
        with pytest.raises(DataError, match=re.escape(refused)):
            run()


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Two files of a table, and what becomes of them."""
    folder = tmp_path_factory.mktemp("table")
    for number, part in enumerate(parts(shuffled(event_table(2000)), [700])):
        write_table(part, folder / "t" / f"day={number}" / "part.csv")
    prepare([folder / "t"], folder / "out", CONFIG, "skip", spec=UNIQUE)
    return [folder / "t"], contents(folder / "out")


# Quick: test_the_bytes_are_those_of_the_embedded_engine, and
# tests/preprocess/history/test_append_engines.py, test_as_programs.
@pytest.mark.slow
def test_as_programs(table, tmp_path):
    data, expected = table
    options = {"run": as_program, "pieces": 1, "reducers": 2}
    assert streamed(data, tmp_path / "out", on_bad="skip", spec=UNIQUE, **options) == expected
    dropped = Manifest.load(tmp_path / "out").dropped
    assert dropped["part.csv: key given twice in a task"] > 100


@pytest.mark.parametrize("task", ["user", ""])
def test_rules_of_columns_are_those_of_the_embedded_engine(tmp_path, task):
    """Labels by values, times by a form, words for null, gaps, and rows without tasks."""
    (tmp_path / "t.csv").write_text(
        "user;ts;event;a;b\n1;1/2/2020;buy;;x\n1;1/3/2020;view;3;\n2;1/1/2020;buy;NULL;NULL\n"
    )
    columns = {"ts": ColumnSpec(format="%m/%d/%Y"), "event": ColumnSpec(values={"buy": 1, "*": 0})}
    form = CsvForm(null=("NULL",))
    spec = TableSpec(task, "ts", "event", columns=columns, rest=True, csv=form, defaults=("own",))
    prepare(tmp_path / "t.csv", tmp_path / "a", spec=spec)
    assert streamed([tmp_path / "t.csv"], tmp_path / "b", PrepareConfig(), spec=spec, ranges=2) == contents(
        tmp_path / "a"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("user::x\n1::2\n", "don't read the delimiter '::'"),
        ('[{"user": 1, "x": 2}]', "read UTF-8 text with a record a line"),
        ("{'user': 1, 'x': 2}\n", "read UTF-8 text with a record a line"),
        ("0 1 2\n1 3\n", "read UTF-8 text with a record a line"),
    ],
)
def test_files_that_workers_cannot_read_are_refused(tmp_path, text, said):
    (tmp_path / "t.txt").write_text(text)
    with pytest.raises(ConfigError, match=said):
        TableJob.of_files([tmp_path / "t.txt"], tmp_path / "out", TableSpec("user"), PrepareConfig(), "raise")


def ready_for_shards(data, folder, out, spec=UNIQUE):
    """Run all jobs but the last one, and return what its reducers are to read."""
    folder.mkdir()
    job = TableJob.of_files(data, out, spec, CONFIG, "skip", ranges=5)
    job.save(folder)
    files = [job.path_of(number) for number in range(len(job.files))]
    in_process("reduce", "bounds", folder, map_files("sample", folder, files, 1, in_process), {})
    rows = partitioned(map_files("rows", folder, files, 3, in_process), 2)
    numbered = [in_process("reduce", "tasks", folder, part, {}) for part in rows]
    placed = b"".join(in_process("map", "batches", folder, part, {}) for part in numbered)
    return partitioned(placed, 1)[0]


def test_a_killed_reducer_leaves_nothing_half_written(table, tmp_path):
    data, expected = table
    lines = ready_for_shards(data, tmp_path / "job", tmp_path / "out")
    shards = tmp_path / "job" / "shards"
    code = "from gmeta.preprocess.cluster import streaming_jobs as s; s._SPLIT = 1000; s.main_of_reducers()"
    reducer = subprocess.Popen(
        [sys.executable, "-c", code, "shards", "--job", tmp_path / "job"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "mapreduce_task_attempt_id": "attempt_1_r_0"},
    )
    reducer.stdin.write(lines[: len(lines) // 2])
    reducer.stdin.flush()
    deadline = time.monotonic() + 300
    while not list(shards.glob("_attempts/attempt_1_r_0-*/*.tmp")):  # a shard is being written
        assert time.monotonic() < deadline
        time.sleep(0.02)
    reducer.send_signal(signal.SIGKILL)
    reducer.wait()
    with pytest.raises(DataError, match="these shards aren't there: train-0000"):
        in_process("reduce", "finish", tmp_path / "job", b"", {})
    assert not (tmp_path / "out").exists()
    told = in_process("reduce", "shards", tmp_path / "job", lines, {})  # the second attempt
    again = in_process("reduce", "shards", tmp_path / "job", lines, {})  # a speculative one, too late
    assert told == again
    in_process("reduce", "finish", tmp_path / "job", b"", {})
    assert contents(tmp_path / "out") == expected
    manifest = Manifest.load(tmp_path / "out")
    said = [json.loads(line.split("\t")[1]) for line in told.decode().splitlines()]
    assert [one["name"] for one in said] == [shard.name for shard in manifest.splits["train"].shards]
    in_process("reduce", "finish", tmp_path / "job", b"", {})  # it is there: nothing to do


def test_finishing_needs_every_job(table, tmp_path):
    data, _ = table
    lines = ready_for_shards(data, tmp_path / "job", tmp_path / "out")
    in_process("reduce", "shards", tmp_path / "job", lines, {})
    job = tmp_path / "job"
    shard = next((job / "shards").glob("*.tfrecord"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=f"of a shard of {len(whole)} bytes"):
        in_process("reduce", "finish", job, b"", {})
    shard.write_bytes(whole)
    note = next((job / "counts").glob("*.json"))
    text = note.read_text()
    note.unlink()
    with pytest.raises(GmetaError, match="a job before this one hasn't ended"):
        in_process("reduce", "finish", job, b"", {})
    with pytest.raises(DataError, match="wasn't counted"):
        in_process("map", "batches", job, text_of_range(int(note.stem)), {})
    note.write_text(text)
    (job / "tally.json").rename(job / "tally")
    with pytest.raises(DataError, match="run the job of the tasks"):
        in_process("reduce", "finish", job, b"", {})
    assert not (tmp_path / "out").exists()


def text_of_range(number):
    return f"{number:06d}\t1\t1\t1\t1\t1\t\t0\t1\n".encode()


BAD = [
    ("7,5,item,1.5,,1,x", None),
    (",5,item,1.5,,1,x", "null"),
    ("seven,5,item,1.5,,1,x", "not a number"),
    ("7,5,item,nan,,1,x", "NaN"),
    ("7,5,item,1.5,,1", "missing field"),
    ("7,5,item,1.5,,1,x,y", "extra field"),
    ("7,5,item,1.5,1|a,1,x", "not a number"),
    ("9223372036854775808,5,item,1.5,,1,x", "out of range"),
]


def test_bad_records_are_counted_as_the_embedded_engine_counts_them(tmp_path, capfd):
    path = write_table(event_table(100), tmp_path / "t.csv")
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line, _ in BAD)
    summary = prepare([path], tmp_path / "a", CONFIG, "skip", spec=SPEC)
    assert {kind.reason for kind in summary.bad} == {reason for _, reason in BAD} - {None}
    capfd.readouterr()
    assert streamed([path], tmp_path / "b", on_bad="skip") == contents(tmp_path / "a")
    counted = [line for line in capfd.readouterr().err.splitlines() if "bad: not a number" in line]
    assert counted == ["reporter:counter:gmeta,bad: not a number,2"]


@pytest.mark.parametrize(("line", "reason"), BAD[1:])
def test_a_bad_record_ends_the_job(tmp_path, line, reason):
    path = write_table(event_table(20), tmp_path / "t.csv")
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(DataError, match=f"t.csv: {reason}: .*(--on-bad skip|hash = true)"):
        streamed([path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_repeated_key_ends_the_job(table, tmp_path):
    with pytest.raises(DataError, match=r"part.csv: key given twice in a task: user -?\d+ has another row"):
        streamed(table[0], tmp_path / "out", spec=UNIQUE)


def test_errors_are_one_line(table, tmp_path):
    mapper = [*command("map"), "rows", "--job", str(tmp_path)]
    done = subprocess.run(mapper, input=b"", capture_output=True)
    assert done.returncode == 2
    assert done.stderr.decode().startswith(f"gmeta-map rows: error: {tmp_path}/job.json: no description")
    assert done.stderr.count(b"\n") == 1


def test_programs_start_without_tensorflow():
    code = (
        "import sys, gmeta.preprocess.cluster.streaming_jobs;"
        "print(sorted({'tensorflow', 'matplotlib', 'duckdb', 'pyspark'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code]) == b"[]\n"


def test_a_hot_task_is_spread_over_reducers(tmp_path):
    """One task of one time: ranges of it are cut by the other columns."""
    rows = event_table(1000, users=1)
    rows = rows.set_column(1, "ts", [[5] * 1000])
    path = write_table(rows, tmp_path / "t.csv")
    prepare([path], tmp_path / "a", CONFIG, spec=SPEC)
    assert streamed([path], tmp_path / "b", ranges=5) == contents(tmp_path / "a")
    counts = [json.loads(p.read_text()) for p in (tmp_path / "b.job" / "counts").glob("*.json")]
    assert len(counts) == 5
    assert max(rows for count in counts for _, rows in count["count"]["ends"]) < 300


def test_a_file_is_found_by_what_a_cluster_calls_it(table, tmp_path):
    job = TableJob.of_files(table[0], tmp_path, SPEC, CONFIG, "skip")
    for number, file in enumerate(job.files):
        assert job.file_of(f"hdfs://nn:8020/data/t/day%3D{number}/part.csv") == number
        assert job.file_of(file.path) == number
    assert job.file_of(None) == 0
    job.save(tmp_path)
    assert TableJob.load(tmp_path) == job


def test_tallies_add_up_in_any_order():
    def tally(*messages):
        found = Tally(10)
        for message in messages:
            found.add(0, Reason.NULL, [message], 2)
        return found

    one, other = tally("c", "a"), tally("b", "d")
    ways = []
    for first, second in ((one, other), (other, one)):
        whole = Tally.from_json(first.to_json())
        whole.merge(second)
        ways.append(whole.to_json())
    assert ways[0] == ways[1]
    assert Tally.from_json(ways[0]).bad == 8


def test_a_job_needs_its_bounds(table, tmp_path):
    TableJob.of_files(table[0], tmp_path / "out", SPEC, CONFIG, "skip").save(tmp_path)
    with pytest.raises(DataError, match="run the job of the sample first"):
        in_process("map", "rows", tmp_path, b"", {})
    assert TableJob.load(tmp_path).name == "t"


def test_the_command_line_describes_the_jobs(table, tmp_path, runner):
    data, expected = table
    spec = tmp_path / "spec.toml"
    spec.write_text(
        'task = "user"\ntime = "ts"\nlabel = "click"\nunique = ["item"]\n[columns.item]\nhash = true\n'
        '[columns.price]\ndtype = "float32"\n[columns.tags]\ndtype = "int64"\nis_list = true\n'
    )
    options = [
        "--on-bad",
        "skip",
        "--batch-rows",
        "8",
        "--shards",
        "3",
        "--seed",
        "5",
        "--layout",
        "columnar",
    ]
    command = ["prepare", "--engine", "streaming", "--data", str(data[0]), "--spec", str(spec), *options]
    job, out = str(tmp_path / "job"), str(tmp_path / "out")
    done = runner.invoke(main, [*command, "--job", job, "--out", out, "--ranges", "4"])
    assert done.exit_code == 0, done.output
    assert "files 2, ranges 4, shards 3 a split" in done.output
    run_jobs(TableJob.load(tmp_path / "job"), tmp_path / "job")
    assert contents(tmp_path / "out") == expected
    done = runner.invoke(main, [*command, "--job", job, "--out", out])
    assert "already prepared" in done.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "streaming"], "--engine streaming needs --data, --task or --spec, and --job"),
        (["--engine", "streaming", "--resume"], "--resume is for --engine duckdb, not for streaming"),
        (["--spark-master", "local"], "--spark-master is for --engine spark, not for duckdb"),
        (["--job", "x"], "--job is for --engine streaming, not for duckdb"),
        (["--ranges", "3"], "--ranges is for --engine spark and streaming, not for duckdb"),
    ],
)
def test_options_of_other_engines_are_refused(runner, options, said):
    done = runner.invoke(main, ["prepare", "--out", "x", *options])
    assert done.exit_code == 2
    assert said in done.output


def test_ranges_are_bounded(table, tmp_path):
    with pytest.raises(ConfigError, match=r"ranges must be in 1\.\.999999, got 0"):
        TableJob.of_files(table[0], tmp_path, SPEC, CONFIG, "skip", ranges=0)


@pytest.fixture
def runner():
    return CliRunner()

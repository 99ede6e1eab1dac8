"""``gmeta prepare`` as a user meets it."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from rich.console import Console

from gmeta.cli import main
from gmeta.cli.prepare import PrepareProgress
from gmeta.core.data_manifest import Manifest
from gmeta.testing import edit, small_100k
from support.data_files import event_table, write_table


@pytest.fixture
def raw(tmp_path):
    return small_100k(tmp_path / "raw")


def run(*arguments):
    return CliRunner().invoke(main, ["prepare", *map(str, arguments)])


def test_it_prepares_and_shows_what_came_of_it(raw, tmp_path):
    result = run("--data", raw, "--out", tmp_path / "out", "--min-rows", 20, "--shards", 1)
    assert result.exit_code == 0, result.output
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.config["min_rows"] == 20
    assert len(manifest.splits["warm"].shards) == 1
    assert f"{manifest.splits['warm'].rows:,}" in result.stdout
    assert "left out: task has fewer than 20 rows" in result.stdout
    assert (tmp_path / "out" / "task_sizes.png").read_bytes().startswith(b"\x89PNG")
    assert "reading rows: " in result.stderr


@pytest.mark.parametrize("given", [[], ["--synthetic", "--data", "x"]])
def test_data_that_are_not_named_once_are_refused(tmp_path, given):
    result = run("--out", tmp_path / "out", *given)
    assert result.exit_code == 2
    assert "gmeta: error: name the data: --data FILES --task COLUMN" in result.stderr
    assert not (tmp_path / "out").exists()


def test_synthetic_data_are_prepared_and_kept(tmp_path):
    result = run("--synthetic", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "raw" / "u.data").exists()


def test_a_second_time_it_says_that_all_is_there(raw, tmp_path):
    run("--data", raw, "--out", tmp_path / "out")
    result = run("--data", raw, "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "already prepared, from the same files with the same settings" in result.stdout


def test_a_bad_line_is_one_line_of_error(raw, tmp_path):
    edit(raw, "u.data", {4: "1\t2\tfour\t5"})
    result = run("--data", raw, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert (
        f"gmeta: error: {raw / 'u.data'}:4: not a number: rating must be a number, got 'four'"
        in result.stderr
    )
    assert "Traceback" not in result.output


def test_bad_lines_that_are_skipped_are_named(raw, tmp_path):
    edit(raw, "u.data", dict.fromkeys(range(4, 9), "nothing"))
    result = run("--data", raw, "--out", tmp_path / "out", "--on-bad", "skip")
    assert result.exit_code == 0
    assert f"skipped: {raw / 'u.data'}:4: " in result.stdout
    assert "skipped: 2 more in u.data: missing field" in result.stdout
    assert "bad: missing field (u.data)" in result.stdout


@pytest.mark.parametrize("option", ["--seed", "--shards", "--cold-modulus", "--batch-rows"])
def test_a_setting_out_of_range_is_one_line_of_error(raw, tmp_path, option):
    result = run("--data", raw, "--out", tmp_path / "out", option, -1)
    assert result.exit_code == 2
    assert "gmeta: error: " + option[2:].replace("-", "_") in result.stderr


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    """A real signal, on a terminal, once the first bar is seen."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "gmeta", "prepare", "--synthetic", "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stderr=follower, stdout=follower) as process:
        os.close(follower)
        seen = b""
        while b"reading rows" not in seen:
            seen += os.read(leader, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
    os.close(leader)
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_is_one_line_and_leaves_nothing(tmp_path):
    """The operating system refuses a real write in the middle of a shard."""
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from gmeta.cli import main
main(["prepare", "--synthetic", "--out", {str(tmp_path / "out")!r}])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "gmeta: error: can't write " in result.stderr
    assert "File too large" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def table(tmp_path):
    return write_table(event_table(400), tmp_path / "t.parquet")


def test_a_table_by_options(table, tmp_path):
    result = run(
        "--data", table, "--task", "user", "--time", "ts", "--label", "click", "--out", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    assert "t.parquet: 400 rows" in result.stdout
    assert "sorting and cutting: 400 rows" in result.stderr
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.schema.task == "user"
    assert manifest.config["table"]["label"] == "click"
    assert (tmp_path / "out" / "task_sizes.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_by_a_spec_and_options_that_count_more(table, tmp_path):
    (tmp_path / "spec.toml").write_text('task = "user"\ntime = "price"\n[columns.item]\nhash = true\n')
    options = ["--spec", tmp_path / "spec.toml", "--time", "ts", "--unique", "item", "--on-bad", "skip"]
    result = run(
        "--data", table.parent / "*.parquet", *options, "--out", tmp_path / "out", "--layout", "columnar"
    )
    assert result.exit_code == 0, result.output
    manifest = Manifest.load(tmp_path / "out")
    assert [column.name for column in manifest.schema] == ["user", "batch_id", "ts", "item"]
    assert manifest.config["table"]["unique"] == ["item"]
    assert "bad: key given twice in a task (t.parquet)" in result.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--unique", "item"], "--unique is of a task: name its --task too"),
        (["--task", "user", "--no-header"], "--no-header needs the names of the columns"),
        (["--task", "user", "--join", "x.csv"], "--join 1 times and --on 0 times"),
        (["--task", "user", "--label", "click: a"], "no column 'click: a' in the table"),
        (["--task", "user", "--label", "click: a=b"], "'a=b' isn't VALUE=NUMBER"),
        (["--task", "user", "--core", "item"], "--core 'item': write it as COLUMN=K"),
        (["--task", "user", "--explode", "tags"], "write it as 'COLUMN: item-click'"),
        (["--task", "user", "--time-format", "%Y"], "--time-format is of the time"),
        (["--task", "user", "--where", "no > 3"], "--where 'no > 3': "),
        (["--task", "user", "--session-gap", "1"], "session_gap='1' must be a time such as 30m"),
        ([], "name the column of the task, with --task COLUMN or --spec FILE"),
        (["--task", "user", "--compress", "gzip"], "a compressed file can't be entered in the middle"),
        (["--task", "user", "--memory-limit", "much"], "memory limit must be a size such as 2GB"),
        (["--task", "user", "--min-rows", str(2**63)], "min_rows must be below 2^63"),
        (
            ["--task", "user", "--memory-limit", "9999999999GB"],
            "memory limit must be at least 512MiB and below",
        ),
        (["--task", "user", "--memory-limit", "1MB"], "memory limit must be at least 512MiB"),
        (["--task", "uid"], "no column 'uid' in the table; it has user, ts, item"),
        (["--spec", "/nowhere.toml"], "/nowhere.toml: can't be read: No such file"),
    ],
)
def test_options_that_make_no_sense(table, tmp_path, options, said):
    result = run("--data", table, "--out", tmp_path / "out", *options)
    assert result.exit_code == 2
    assert result.stderr.startswith("gmeta: error: ")
    assert said in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_kill_minus_nine_and_resume(table, tmp_path):
    """The command itself: killed when the first shard is there, then run again."""
    arguments = ["--data", table, "--task", "user", "--time", "ts", "--shards", 40, "--layout", "columnar"]
    assert run(*arguments, "--out", tmp_path / "whole").exit_code == 0
    command = [sys.executable, "-m", "gmeta", "prepare", *map(str, arguments), "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        partial = tmp_path / ".out.partial"
        while process.poll() is None and not list(partial.glob("*.gidx")):
            time.sleep(0.001)
        process.kill()
        process.wait()
    if (tmp_path / "out").exists():
        pytest.skip("it was done before it could be killed")
    result = run(*arguments, "--out", tmp_path / "out", "--resume")
    assert result.exit_code == 0, result.output
    found = {
        folder: sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        for folder in (tmp_path / "whole", tmp_path / "out")
    }
    names = found[tmp_path / "whole"]
    assert found[tmp_path / "out"] == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_bars_show_rows_rate_and_time_left():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with PrepareProgress(console) as progress:
        progress("read", 0, None)
        progress("read", 1000, 4000)
        time.sleep(0.01)
        progress("read", 2000, 4000)
        progress.bars.refresh()
    shown = console.file.getvalue()
    assert "reading rows" in shown
    assert "2000/4000" in shown
    assert "rows/s" in shown
    assert re.search(r"0:\d\d left", shown)

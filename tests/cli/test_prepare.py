"""``gmeta prepare`` as a user meets it."""

import os
import pty
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.core.manifest import Manifest
from gmeta.testing.movielens_files import edit, small_100k


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


def test_without_data_it_says_what_it_uses(tmp_path):
    result = run("--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "no --data: using a synthetic data set in MovieLens-100K's layout, seed 0" in result.stderr
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
    command = [sys.executable, "-m", "gmeta", "prepare", "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stderr=follower, stdout=follower) as process:
        os.close(follower)
        seen = b""
        while b"reading rows" not in seen:
            seen += os.read(leader, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    os.close(leader)
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_is_one_line_and_leaves_nothing(tmp_path):
    """The operating system refuses a real write in the middle of a shard."""
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from gmeta.cli import main
main(["prepare", "--out", {str(tmp_path / "out")!r}])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "gmeta: error: can't write " in result.stderr
    assert "File too large" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []

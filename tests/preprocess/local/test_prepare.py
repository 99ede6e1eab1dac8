"""The whole preparation: its output, its determinism, and what happens to a folder that is there."""

import errno
import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.preprocess import PrepareConfig, SyntheticConfig, prepare
from gmeta.preprocess.local.preparation import Journal
from gmeta.preprocess.movielens.movielens_source import SPEC
from gmeta.preprocess.shards import record_writer
from gmeta.preprocess.summary import PrepareSummary
from gmeta.testing import as_1m, small_100k
from support.data_files import read_split


@pytest.fixture
def raw(tmp_path):
    return small_100k(tmp_path / "raw")


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shards(folder):
    return {path.name: data for path, data in contents(folder).items() if path.suffix == ".tfrecord"}


def test_the_folder_is_a_whole_data_set(raw, tmp_path):
    summary = prepare(raw, tmp_path / "out", PrepareConfig(shards=3))
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.schema == SPEC.schema
    assert [shard.name for shard in manifest.splits["cold"].shards] == [
        f"cold-0000{number}-of-00003.tfrecord" for number in range(3)
    ]
    assert {name: (count.batches, count.rows) for name, count in summary.splits.items()} == {
        name: (split.groups, split.rows) for name, split in manifest.splits.items()
    }
    assert manifest.dropped == summary.dropped
    assert manifest.config["inputs"].keys() == {"u.data", "u.user", "u.item", "u.occupation"}
    assert all(split.tasks == split.batches for split in summary.splits.values())


def test_columns_join_the_attributes(raw, tmp_path):
    prepare(raw, tmp_path / "out")
    users = [line.split("|") for line in (raw / "u.user").read_text().splitlines()]
    items = [line.split("|") for line in (raw / "u.item").read_text().splitlines()]
    for row in read_split(tmp_path / "out", "cold"):
        assert set(row) == {column.name for column in SPEC.schema}
        user, item = users[row["task"][0] - 1], items[row["item"][0] - 1]
        assert row["gender"] == [user[2] == "M"]
        assert row["year"] == [int(item[2][-4:] or 0)]
        assert row["genre"] == [index for index, flag in enumerate(item[5:]) if flag == "1"]


def test_every_task_is_whole_in_time_order_and_in_its_split(raw, tmp_path):
    summary = prepare(raw, tmp_path / "out")
    table = np.loadtxt(raw / "u.data", dtype=np.int64)
    sizes = np.bincount(table[:, 0])
    kept = np.flatnonzero((sizes >= 13) & (sizes <= 100))
    found = {"warm": {}, "cold": {}}
    for split, tasks in found.items():
        for row in read_split(tmp_path / "out", split):
            tasks.setdefault(row["task"][0], []).append((row["item"][0], row["rating"][0]))
    assert sorted(found["cold"]) == [user for user in kept.tolist() if user % 5 == 0]
    assert sorted(found["warm"]) == [user for user in kept.tolist() if user % 5]
    for task, rows in (found["warm"] | found["cold"]).items():
        own = table[table[:, 0] == task]
        assert rows == [tuple(row) for row in own[np.lexsort((own[:, 1], own[:, 3]))][:, 1:3].tolist()]
    assert summary.task_sizes == dict(zip(*np.unique(sizes[1:], return_counts=True), strict=True))


@pytest.mark.parametrize("config", [PrepareConfig(), PrepareConfig(batch_rows=13, shards=3, seed=7)])
def test_the_order_of_the_ratings_lines_does_not_matter(raw, tmp_path, config):
    prepare(raw, tmp_path / "a", config)
    lines = (raw / "u.data").read_bytes().splitlines(keepends=True)
    random.Random(1).shuffle(lines)
    (raw / "u.data").write_bytes(b"".join(lines))
    for name in ("u.item", "u.user"):
        (raw / name).write_bytes(b"".join(reversed((raw / name).read_bytes().splitlines(keepends=True))))
    prepare(raw, tmp_path / "b", config)
    assert shards(tmp_path / "a") == shards(tmp_path / "b")


def test_two_runs_write_the_same_bytes(raw, tmp_path):
    prepare(raw, tmp_path / "a")
    prepare(raw, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_both_layouts_write_the_same_records(raw, tmp_path):
    prepare(raw, tmp_path / "a")
    prepare(as_1m(raw, tmp_path / "1m"), tmp_path / "b")
    assert shards(tmp_path / "a") == shards(tmp_path / "b")


def test_another_seed_permutes_the_same_batches(raw, tmp_path):
    prepare(raw, tmp_path / "a")
    prepare(raw, tmp_path / "b", PrepareConfig(seed=1))
    first, second = (b"".join(data for _, data in sorted(shards(tmp_path / x).items())) for x in "ab")
    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize("nothing", [None, []])
def test_no_data_are_refused(nothing, tmp_path):
    with pytest.raises(ConfigError, match=r"no data to prepare"):
        prepare(nothing, tmp_path / "out")


# Quick: tests/cli/test_prepare.py, test_synthetic_data_are_prepared_and_kept.
@pytest.mark.slow
def test_a_synthetic_set_is_prepared_and_kept(tmp_path):
    summary = prepare(SyntheticConfig(), tmp_path / "out")
    again = prepare(tmp_path / "out" / "raw", tmp_path / "again")
    assert summary.source == "synthetic"
    assert shards(tmp_path / "out") == shards(tmp_path / "again")
    assert again.splits == summary.splits
    assert summary.splits["warm"].tasks > 300
    assert summary.splits["cold"].tasks > 80
    assert prepare(SyntheticConfig(), tmp_path / "out").reused


def test_progress_ends_where_it_should(raw, tmp_path):
    seen = {}
    summary = prepare(
        raw,
        tmp_path / "out",
        progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)),
    )
    assert list(seen) == ["read", "sort", "write"]
    assert seen["read"][-1] == (summary.rows_read, summary.rows_read)
    assert seen["write"][-1] == (summary.rows, summary.rows)


def test_the_same_again_is_reused(raw, tmp_path):
    first = prepare(raw, tmp_path / "out")
    stamp = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    second = prepare(raw, tmp_path / "out")
    assert second == replace(first, reused=True, seconds=0.0)
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == stamp


def test_other_settings_or_input_are_refused_unless_told(raw, tmp_path):
    prepare(raw, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(
        GmetaError, match=r"prepared otherwise \(seed 0 there, 1 requested\): add --overwrite"
    ):
        prepare(raw, tmp_path / "out", PrepareConfig(seed=1))
    small_100k(raw, seed=5)
    with pytest.raises(GmetaError, match="other input files"):
        prepare(raw, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    assert not prepare(raw, tmp_path / "out", overwrite=True).reused
    assert shards(tmp_path / "out") != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw"]


def test_a_damaged_data_set_is_refused_unless_told(raw, tmp_path):
    prepare(raw, tmp_path / "out")
    next((tmp_path / "out").glob("warm-*")).unlink()
    with pytest.raises(GmetaError, match=r"is missing.*--overwrite"):
        prepare(raw, tmp_path / "out")
    prepare(raw, tmp_path / "out", overwrite=True)
    Manifest.load(tmp_path / "out")


def test_a_data_set_of_an_older_version_is_made_again_only_if_told(raw, tmp_path):
    prepare(raw, tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))
    said = r"a manifest of version 1, .*prepare the data again with this gmeta, with --overwrite$"
    with pytest.raises(GmetaError, match=said):
        prepare(raw, tmp_path / "out")
    prepare(raw, tmp_path / "out", overwrite=True)
    Manifest.load(tmp_path / "out")


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_data_set_is_never_replaced(raw, tmp_path, overwrite):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(GmetaError, match="it isn't a prepared data set"):
        prepare(raw, tmp_path / "out", overwrite=overwrite)
    with pytest.raises(GmetaError, match="is a file: name a folder"):
        prepare(raw, tmp_path / "out" / "thesis.tex", overwrite=overwrite)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_and_a_link_to_one_are_filled(raw, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    prepare(raw, tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    Manifest.load(tmp_path / "real")


@pytest.mark.parametrize("stage", ["read", "sort", "write"])
@pytest.mark.parametrize("before", ["nothing", "a data set"])
def test_ctrl_c_leaves_what_was_there(raw, tmp_path, stage, before):
    def interrupt(at, done, total):
        if at == stage:
            raise KeyboardInterrupt

    if before == "a data set":
        prepare(raw, tmp_path / "out")
    there = contents(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        prepare(raw, tmp_path / "out", PrepareConfig(seed=1), overwrite=True, progress=interrupt)
    assert contents(tmp_path) == there
    assert {path.name for path in tmp_path.iterdir()} <= {"raw", "out"}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (os, "write"),  # a run of sorted batches
        (np, "save"),  # its keys
        (record_writer.ShardFile, "put"),
        (record_writer, "write_atomically"),  # an index
        (os, "fsync"),
        (Journal, "add_shard"),
        (PrepareSummary, "save"),
        (Manifest, "save"),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(raw, tmp_path, monkeypatch, owner, name):
    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device", "a file")

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(GmetaError, match=r"^can't write .*: (No space left on device|the disk is full, .*)$"):
        prepare(raw, tmp_path / "out", PrepareConfig(layout="columnar"))
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_a_folder_that_cannot_be_made(raw, tmp_path):
    with pytest.raises(GmetaError, match=r"^can't write .*: (Not a directory|File exists)$"):
        prepare(raw, raw / "u.data" / "deep" / "out")


def test_a_selection_that_leaves_a_split_empty(raw, tmp_path):
    with pytest.raises(DataError, match=r"u\.data: of 60 tasks none is left for cold"):
        prepare(raw, tmp_path / "out", PrepareConfig(cold_modulus=61))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"seed": -1}, "seed"),
        ({"cold_modulus": 1}, "cold_modulus"),
        ({"min_rows": 0}, "min_rows"),
        ({"min_rows": 20, "max_rows": 19}, "max_rows"),
        ({"max_rows": -1}, "max_rows"),
        ({"min_rows": 13, "batch_rows": 12}, "batch_rows"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"layout": "rows"}, "layout"),
        ({"shards": 0}, "shards"),
    ],
)
def test_settings_that_are_refused(settings, name):
    with pytest.raises(ConfigError, match=name):
        PrepareConfig(**settings)


def test_a_summary_that_was_tampered_with(raw, tmp_path):
    prepare(raw, tmp_path / "out")
    (tmp_path / "out" / "summary.json").write_text("[]")
    with pytest.raises(DataError, match=r"summary\.json: not a summary.*--overwrite"):
        prepare(raw, tmp_path / "out")


def test_quantiles_of_the_task_sizes(raw, tmp_path):
    summary = prepare(raw, tmp_path / "out")
    sizes = np.bincount(np.loadtxt(raw / "u.data", dtype=np.int64)[:, 0])[1:]
    assert summary.size_quantiles() == np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1], method="lower").tolist()
    assert PrepareSummary.load(summary.out).task_sizes == summary.task_sizes


def test_tensorflow_is_never_imported(raw, tmp_path):
    program = f"""
import sys
from pathlib import Path
from gmeta.preprocess import prepare
prepare(Path({str(raw)!r}), Path({str(tmp_path / "out")!r}))
sys.exit(any(name in sys.modules for name in ("tensorflow", "keras", "tf_keras", "horovod")))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert (tmp_path / "out" / "manifest.json").exists()

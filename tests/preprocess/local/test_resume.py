"""A preparation that is killed goes on where it was, and leaves nothing half-written under its name."""

import fcntl
import os
import signal
import stat
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import GmetaError
from gmeta.preprocess import PrepareConfig, prepare
from gmeta.preprocess.local.group_sorter import ShardMerger
from gmeta.preprocess.local.preparation import FILE_NAME as JOURNAL
from support.data_files import EVENT_SPEC as SPEC
from support.data_files import event_table, write_table

CONFIG = PrepareConfig(batch_rows=8, shards=6, cold_modulus=3, layout="columnar")
PARTIAL = ".out.partial"


@pytest.fixture
def data(tmp_path):
    return write_table(event_table(2000), tmp_path / "t.parquet")


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def killed(data, tmp_path, patch):
    """Run a preparation that kills itself, kill -9, where ``patch`` says."""
    program = f"""
        import os, shutil, signal
        from gmeta.core import files
        from gmeta.preprocess import PrepareConfig, prepare
        from gmeta.preprocess.local import duckdb_engine
        from gmeta.preprocess.local.group_sorter import GroupSorter, ShardMerger
        from gmeta.preprocess.shards.record_writer import ShardFile
        from gmeta.preprocess.local.preparation import Journal
        from gmeta.core.data_manifest import Manifest
        from support.data_files import EVENT_SPEC as SPEC

        def kill(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        def after(owner, name, calls):
            real, count = getattr(owner, name), [0]
            def counted(*arguments, **named):
                if count[0] == calls:
                    kill()
                count[0] += 1
                return real(*arguments, **named)
            setattr(owner, name, counted)

        {patch}
        prepare({str(data)!r}, {str(tmp_path / "out")!r}, {CONFIG!r}, spec=SPEC)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert not (tmp_path / "out").exists()
    assert (tmp_path / PARTIAL).exists()


@pytest.fixture
def written(monkeypatch):
    """The names of the shards that are written from now on."""
    names = []
    real = ShardMerger.write

    def noted(merger, path, place, config):
        names.append(path.name)
        return real(merger, path, place, config)

    monkeypatch.setattr(ShardMerger, "write", noted)
    return names


@pytest.mark.parametrize(
    ("patch", "again"),
    [
        ("after(duckdb_engine, 'from_arrow', 1)", 12),
        pytest.param("after(GroupSorter, 'finish', 0)", 12, marks=pytest.mark.slow),  # quick: add_sorted
        ("after(Journal, 'add_sorted', 0)", 12),
        pytest.param("after(ShardMerger, 'write', 0)", 12, marks=pytest.mark.slow),  # quick: close
        pytest.param("after(ShardMerger, 'write', 4)", 8, marks=pytest.mark.slow),  # quick: close
        ("after(ShardFile, 'close', 4)", 8),  # in the middle of a shard
        ("after(Journal, 'add_shard', 4)", 8),  # a shard is there, but not noted
        ("after(Manifest, 'save', 0)", 0),
        ("after(shutil, 'rmtree', 1)", 0),  # all is written, some of what led there is removed
        ("after(files, 'put_in_place', 0)", 12),  # all but the name, and nothing known of it any more
    ],
)
@pytest.mark.shown_by(case=["after(Journal, 'add_sorted', 0)-12", "after(ShardFile, 'close', 4)-8"])
def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(data, tmp_path, written, patch, again):
    prepare(data, tmp_path / "whole", CONFIG, spec=SPEC)
    written.clear()
    killed(data, tmp_path, patch)
    summary = prepare(data, tmp_path / "out", CONFIG, spec=SPEC, resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert len(written) == again
    assert summary.rows == 2000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "t.parquet", "whole"]


def test_without_resume_leftovers_are_cleaned_up(data, tmp_path, written):
    killed(data, tmp_path, "after(ShardMerger, 'write', 4)")
    (tmp_path / PARTIAL / "stray").write_text("of another version")
    prepare(data, tmp_path / "out", CONFIG, spec=SPEC)
    assert len(written) == 12
    Manifest.load(tmp_path / "out")
    assert not (tmp_path / PARTIAL).exists()
    assert not (tmp_path / "out" / "stray").exists()


def test_other_settings_or_input_are_not_gone_on_with(data, tmp_path):
    killed(data, tmp_path, "after(ShardMerger, 'write', 4)")
    other = PrepareConfig(batch_rows=8, shards=6, cold_modulus=3, layout="columnar", seed=1)
    with pytest.raises(
        GmetaError, match=r"left from a run with other settings or input \(seed\): run without"
    ):
        prepare(data, tmp_path / "out", other, spec=SPEC, resume=True)
    write_table(event_table(2000, seed=1), data)
    with pytest.raises(GmetaError, match=r"other settings or input \(inputs\)"):
        prepare(data, tmp_path / "out", CONFIG, spec=SPEC, resume=True)
    prepare(data, tmp_path / "out", CONFIG, spec=SPEC)


def test_a_finished_shard_that_was_damaged_is_written_again(data, tmp_path, written):
    prepare(data, tmp_path / "whole", CONFIG, spec=SPEC)
    written.clear()
    killed(data, tmp_path, "after(ShardMerger, 'write', 4)")
    shards = sorted((tmp_path / PARTIAL).glob("*.tfrecord"))
    shards[0].write_bytes(b"")
    shards[1].with_name(shards[1].name + ".gidx").unlink()
    prepare(data, tmp_path / "out", CONFIG, spec=SPEC, resume=True)
    assert len(written) == 10
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("cut", [1, 5, 60])
@pytest.mark.shown_by(case="5")
def test_a_journal_whose_last_line_was_cut(data, tmp_path, cut):
    prepare(data, tmp_path / "whole", CONFIG, spec=SPEC)
    killed(data, tmp_path, "after(ShardMerger, 'write', 4)")
    journal = tmp_path / PARTIAL / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-cut])
    prepare(data, tmp_path / "out", CONFIG, spec=SPEC, resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_with_nothing_to_go_on_with_it_begins(data, tmp_path):
    prepare(data, tmp_path / "whole", CONFIG, spec=SPEC)
    prepare(data, tmp_path / "out", CONFIG, spec=SPEC, resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_run_that_is_to_be_resumed_keeps_what_it_has_when_it_fails(data, tmp_path, monkeypatch, written):
    real = os.fsync
    calls = iter(range(100))

    def full(descriptor):
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and next(calls) > 12:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(GmetaError, match="No space left on device"):
        prepare(data, tmp_path / "out", CONFIG, spec=SPEC, resume=True)
    monkeypatch.setattr(os, "fsync", real)
    before = len(written)
    assert (tmp_path / PARTIAL / JOURNAL).exists()
    prepare(data, tmp_path / "out", CONFIG, spec=SPEC, resume=True)
    assert 12 < len(written) < 12 + before + 1
    Manifest.load(tmp_path / "out")
    assert not (tmp_path / PARTIAL).exists()


def test_two_runs_of_one_name_do_not_mix(data, tmp_path):
    (tmp_path / PARTIAL).mkdir()
    (tmp_path / PARTIAL / "kept").write_text("of the other run")
    with (tmp_path / PARTIAL / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for resume in (False, True):
            with pytest.raises(GmetaError, match=r"another run is preparing .*out: wait for it"):
                prepare(data, tmp_path / "out", CONFIG, spec=SPEC, resume=resume)
    assert (tmp_path / PARTIAL / "kept").exists()


def test_what_stood_there_stays_until_the_new_one_is_whole(data, tmp_path):
    prepare(data, tmp_path / "out", PrepareConfig(layout="columnar"), spec=SPEC)
    before = contents(tmp_path / "out")
    program = f"""
        import os, signal
        from gmeta.preprocess import PrepareConfig, prepare
        from gmeta.preprocess.local.group_sorter import ShardMerger
        from support.data_files import EVENT_SPEC as SPEC
        ShardMerger.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        prepare({str(data)!r}, {str(tmp_path / "out")!r}, {CONFIG!r}, spec=SPEC, overwrite=True)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(program)]).returncode == -signal.SIGKILL
    assert contents(tmp_path / "out") == before
    prepare(data, tmp_path / "out", CONFIG, spec=SPEC, overwrite=True, resume=True)
    assert Manifest.load(tmp_path / "out").config["batch_rows"] == 8


def test_a_folder_that_may_not_be_written(data, tmp_path):
    if os.geteuid() == 0:
        target = "/proc/out"  # no one may make folders there
    else:
        (tmp_path / "locked").mkdir(mode=0o500)
        target = tmp_path / "locked" / "out"
    with pytest.raises(GmetaError, match=r"^can't write .*: [A-Z][a-z ]+$") as caught:
        prepare(data, target, CONFIG, spec=SPEC)
    assert "out" in str(caught.value)


def test_runs_are_not_part_of_the_data_set(data, tmp_path):
    prepare(data, tmp_path / "out", CONFIG, spec=SPEC)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    shards = {name for name in names if "tfrecord" in name}
    assert names - shards == {"manifest.json", "summary.json", "texts"}
    assert len(shards) == 24
    assert np.sum([name.endswith(".gidx") for name in shards]) == 12

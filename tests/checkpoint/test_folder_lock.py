"""One writer of a folder at a time: who is refused, who takes over, and what two writers leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gmeta import initializers, ops, optimizers
from gmeta.checkpoint import lock as module
from gmeta.checkpoint.lock import FILE_NAME, STALE, FolderLock, Writer
from gmeta.checkpoint.store import CheckpointStore
from gmeta.core.collectives.elastic import ELASTIC
from gmeta.core.errors import ConfigError
from gmeta.experiment.runs.run_folder import RunFolder
from support import warm

HOLDER = """
import sys, time
from pathlib import Path
from gmeta.checkpoint.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "the folder is written")
lock.take()
print("taken", flush=True)
if len(sys.argv) > 2: lock.release()
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / FILE_NAME


def hold(file: Path, *more: str) -> subprocess.Popen[str]:
    """Another process that has the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(file), *more], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "taken\n"
    return process


@pytest.fixture
def holder(file: Path) -> Iterator[subprocess.Popen[str]]:
    process = hold(file)
    yield process
    process.kill()
    process.wait()


def test_a_second_writer_is_refused_and_the_first_is_named(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    store = CheckpointStore(tmp_path)
    said = rf"{tmp_path} is written by process {holder.pid} on \S+, which has written since .*: wait for it"
    for write in (store.claim, lambda: store.save({"t": ops.HashTable(2, optimizers.SGD(0.1))}, 1)):
        with pytest.raises(ConfigError, match=said):
            write()
    assert store.checkpoints() == []  # readers don't ask
    with pytest.raises(ConfigError, match=f"is trained by process {holder.pid}"):
        RunFolder(tmp_path).lock.take()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_of_a_process_that_has_ended_is_free_at_once(file: Path, number: signal.Signals) -> None:
    process = hold(file)
    process.send_signal(number)
    process.wait()
    began = time.monotonic()
    with FolderLock(file, "it is written"):
        assert time.monotonic() - began < 1.0
        assert json.loads(file.read_text())["pid"] == os.getpid()


def test_a_lock_that_was_given_back_leaves_nothing(file: Path) -> None:
    process = hold(file, "release")
    try:
        time.sleep(0.2)
        assert not file.exists()
        with FolderLock(file, "it is written"):
            assert file.exists()
    finally:
        process.kill()
        process.wait()
    assert not file.exists()


def test_stores_of_a_process_are_one_writer_and_the_last_gives_the_folder_back(tmp_path: Path) -> None:
    first, second = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    first.claim()
    second.claim()
    second.claim()
    del first
    assert (tmp_path / FILE_NAME).exists()
    del second
    assert not (tmp_path / FILE_NAME).exists()


def test_a_forked_process_is_another_writer(file: Path) -> None:
    with FolderLock(file, "it is written") as lock:
        child = os.fork()
        if child == 0:
            try:
                lock.release()  # what is inherited isn't its own
                lock.take()
                os._exit(1)
            except ConfigError:
                os._exit(0)
            except BaseException:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert json.loads(file.read_text())["pid"] == os.getpid()
        lock.take()


def written(file: Path, writer: Writer, seconds_ago: float = 0.0) -> None:
    """A lock file as its writer leaves it that is on another machine, whose kernel locks aren't seen here."""
    file.write_text(json.dumps(asdict(writer)))
    then = time.time() - seconds_ago
    os.utime(file, (then, then))


def test_a_writer_on_another_machine_is_believed_until_it_gives_no_sign(file: Path) -> None:
    far = replace(Writer.here(), host="gpu7", machine="another", pid=1)
    written(file, far, STALE / 2)
    with pytest.raises(ConfigError, match=r"process 1 on gpu7, .* try again 60 s after that"):
        FolderLock(file, "it is written").take()
    written(file, far, STALE + 1)
    with FolderLock(file, "it is written"):
        assert json.loads(file.read_text())["host"] != "gpu7"


def test_a_process_number_that_is_used_again_is_no_writer(file: Path) -> None:
    written(file, replace(Writer.here(), began=Writer.here().began - 1))
    with FolderLock(file, "it is written"):
        assert json.loads(file.read_text())["began"] == Writer.here().began


def test_the_next_start_of_an_elastic_job_waits_for_no_sign(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ELASTIC, "one")
    written(file, replace(Writer.here(), host="gpu7", machine="another", pid=1))
    with FolderLock(file, "it is written"):
        pass
    written(file, replace(Writer.here(), host="gpu7", machine="another", pid=1, job="two"))
    with pytest.raises(ConfigError, match="on gpu7"):
        FolderLock(file, "it is written").take()


def test_a_file_of_another_kind_is_taken_over(file: Path) -> None:
    for content in ("", "[]", '{"pid": 3}', "\0" * 10):
        file.write_text(content)
        with FolderLock(file, "it is written"):
            assert json.loads(file.read_text())["pid"] == os.getpid()


def test_without_kernel_locks_what_is_written_has_to_do(
    file: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(module.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module.fcntl, "lockf", unsupported)
    with pytest.raises(ConfigError, match=f"process {holder.pid} on"):
        FolderLock(file, "it is written").take()
    holder.kill()
    holder.wait()
    with FolderLock(file, "it is written"):
        pass


def test_signs_are_given_while_the_lock_is_held(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BEAT", 0.01)
    with FolderLock(file, "it is written"):
        os.utime(file, (1, 1))
        deadline = time.monotonic() + 30
        while file.stat().st_mtime < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)


WRITER = r"""
import sys, time
import gmeta
import numpy as np
from gmeta import initializers, ops, optimizers
from gmeta.core.errors import ConfigError
from gmeta.checkpoint import lock
from gmeta.checkpoint.store import CheckpointStore, step_of

lock._PATIENCE = 0.01
root, first, until = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
saved = refused = 0
step = first
while time.monotonic() < until:
    store = CheckpointStore(root, keep=1000, max_increments=3)
    table = ops.HashTable(2, optimizers.SGD(1.0), initializers.Zeros())
    try:
        latest = store.latest()
        if latest is not None:
            step = max(step, step_of(latest))
            store.load({"t": table})
        for _ in range(3):
            step += 1
            table.lookup_keys(np.arange(step % 50, 300))
            info = store.save({"t": table}, step)
            print(info.folder.name, flush=True)
            saved += 1
    except ConfigError as error:
        refused += 1
        assert "written by process" in str(error) or "would come before it" in str(error), error
    del store
    time.sleep(0.001)
print(saved, refused, file=sys.stderr)
"""


@pytest.mark.slow
def test_every_checkpoint_that_two_writers_say_they_have_saved_can_be_loaded(tmp_path: Path) -> None:
    code = [sys.executable, "-c", WRITER, str(tmp_path)]
    seconds = float(os.environ.get("GMETA_TEST_WRITERS_SECONDS", "4"))
    writers = [
        subprocess.Popen(
            [*code, str(first), str(seconds)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for first in (0, 1)
    ]
    told = [writer.communicate(timeout=300) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], told
    saved = sorted(name for out, _ in told for name in out.split())
    store = CheckpointStore(tmp_path)
    assert saved == [path.name for path in store.checkpoints()]
    assert len(saved) > 5
    for path in store.checkpoints():
        store.load({"t": ops.HashTable(2, optimizers.SGD(1.0), initializers.Zeros())}, path)


@pytest.mark.ranks
def test_a_job_that_was_killed_goes_on_at_once(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal, gmeta\n"
        "from gmeta.checkpoint.store import CheckpointStore\n"
        "gmeta.init()\n"
        "CheckpointStore(sys.argv[1]).claim(); print('claimed', flush=True)\n"
        "len(sys.argv) > 2 and os.kill(os.getppid(), signal.SIGKILL)\n"
        "import time; time.sleep(3 * (len(sys.argv) > 2))\n"
    )
    command = [sys.executable, "-m", "gmeta", "launch", "--np", "2", "--", sys.executable, "-c", code]
    first = warm.run([*command, str(tmp_path), "die"], timeout=300)
    assert first.returncode != 0
    again = warm.run([*command, str(tmp_path)], timeout=300)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("claimed") == 2

"""A folder that is replaced is the old one or the new one, whenever the process is killed."""

import os
import signal
from pathlib import Path

import pytest

from gmeta.core import files
from gmeta.core.files import put_in_place, restore, stage_folder


def made(path, text):
    path.mkdir()
    (path / "a").write_text(text)
    return path


def in_a_killed_process(work):
    """Do the work in a child, which kills itself where ``Path.rename`` has been called twice."""
    child = os.fork()
    if not child:
        real, calls = Path.rename, []

        def rename(path, target):
            if calls:
                os.kill(os.getpid(), signal.SIGKILL)
            calls.append(path)
            return real(path, target)

        Path.rename = rename
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_killed_replacement_leaves_a_whole_folder(tmp_path, monkeypatch, exchanges):
    if not exchanges:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    new, old = made(tmp_path / "new", "new"), made(tmp_path / "out", "old")
    status = in_a_killed_process(lambda: put_in_place(new, old))
    assert os.WIFSIGNALED(status) != exchanges
    restore(old)
    assert (old / "a").read_text() == ("new" if exchanges else "old")


@pytest.mark.parametrize("exchanges", [True, False])
def test_the_old_folder_goes_once_the_new_one_is_there(tmp_path, monkeypatch, exchanges):
    if not exchanges:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    made(tmp_path / "out", "old")
    with stage_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("new")
    assert (tmp_path / "out" / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

import errno
import os

import pytest

from gmeta.core.files import remove_unfinished, write_atomically


def test_writes_text_and_bytes_into_a_new_folder(tmp_path):
    path = write_atomically(tmp_path / "a" / "b.txt", "α\n")
    assert path.read_bytes() == "α\n".encode()
    assert write_atomically(path, b"\x00").read_bytes() == b"\x00"
    assert list(path.parent.iterdir()) == [path]


def test_an_interruption_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = write_atomically(tmp_path / "a.json", "old")

    def interrupted(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_full_disk_is_told_with_the_file_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")  # as the system calls say it: without a name

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_atomically(tmp_path / "a.json", "new")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "a.json"))
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path):
    kept = [".lock", ".x.tmp", ".step-1.partial", "a.17.tmp", "b"]
    for name in (*kept, ".a.json.17.tmp"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".model.17.partial").mkdir()
    (tmp_path / ".model.17.partial" / "file").write_text("x")
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    remove_unfinished(tmp_path / "missing")

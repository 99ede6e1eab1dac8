"""Files of a folder, of an object store, and of another file system, behind one interface."""

from __future__ import annotations

import os
import uuid

import pytest

from gmeta.core import file_systems
from gmeta.core.errors import ConfigError, GmetaError
from gmeta.core.file_systems import open_files
from gmeta.core.files import LocalFiles
from support.stored_files import stored

KINDS = ("local", "s3", "hdfs", "memory")


@pytest.fixture(params=KINDS)
def opened(request, tmp_path):
    """A function that opens the same files again."""
    if request.param == "memory":
        pytest.importorskip("fsspec")
        address = f"memory://{uuid.uuid4().hex}/a"
        return lambda: open_files(address)
    if request.param == "local":
        return lambda: LocalFiles(tmp_path / "online")
    return lambda: stored(tmp_path, request.param)[0]


def fill(folder):
    folder.mkdir()
    (folder / "variables").mkdir()
    (folder / "variables/data").write_bytes(bytes(20 << 20))
    (folder / "end").write_bytes(b"end")


def test_files_and_folders_appear_are_read_and_disappear(opened):
    files = opened()
    assert files.list() == {}
    files.claim("used")
    files.write("deltas/1", b"first")
    files.write("top", b"")
    with files.folder("model/3", "end") as made:
        fill(made)
    sizes = {"deltas/1": 5, "top": 0, "model/3/variables/data": 20 << 20, "model/3/end": 3}
    assert opened().list() == sizes
    assert opened().read("deltas/1") == opened().path("deltas/1").read_bytes() == b"first"
    assert os.fspath(files.path("deltas/1")).endswith("/deltas/1")
    assert files.path("deltas/1").name == "1"
    with pytest.raises(FileNotFoundError):
        files.read("deltas/2")
    files.remove("model/3", "end")
    files.remove("deltas/1")
    files.remove("deltas/1")
    assert opened().list() == {"top": 0}


def test_a_folder_that_fails_leaves_nothing(opened):
    files = opened()

    def fail():
        with files.folder("model/3", "end") as made:
            fill(made)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert files.list() == {}


def test_a_second_writer_is_refused_or_takes_over(opened):
    first, second = opened(), opened()
    release = first.claim("another writes")
    first.write("a", b"1")
    if isinstance(first, LocalFiles):
        with pytest.raises(GmetaError, match="another writes"):
            second.claim("another writes")
        release()
    second.claim("another writes")
    second.write("b", b"2")
    if not isinstance(first, LocalFiles):
        with pytest.raises(ConfigError, match="has been taken over by another writer"):
            first.write("a", b"3")
        with pytest.raises(ConfigError, match="taken over"), first.folder("model/1", "end") as made:
            fill(made)
    assert second.read("a") == b"1"
    assert set(second.list()) == {"a", "b"}


@pytest.mark.parametrize("kind", ["s3", "hdfs"])
def test_the_last_file_of_a_folder_appears_last_and_disappears_first(tmp_path, kind):
    files, system = stored(tmp_path, kind)
    seen = []
    system.before = lambda operation, path: operation != "list" and seen.append((operation, path))
    with files.folder("model/3", "end") as made:
        fill(made)
    appears = "open_output_stream" if kind == "s3" else "move"
    assert [path.rpartition("/")[2] for operation, path in seen if operation == appears] == ["data", "end"]
    seen.clear()
    files.remove("model/3", "end")
    assert [operation for operation, _ in seen] == ["delete_file", "delete_dir"]
    assert seen[0][1].endswith("model/3/end")


@pytest.mark.parametrize("kind", ["s3", "hdfs"])
def test_what_a_killed_writer_has_left_is_removed(tmp_path, kind):
    files, system = stored(tmp_path, kind)

    def fail(operation, path):
        if operation in ("move", "delete_file") or (kind == "s3" and path.endswith("end")):
            raise SystemError("killed")

    system.before = fail
    with pytest.raises(GmetaError, match="killed"), files.folder("model/3", "end") as made:
        fill(made)
    assert "model/3/end" not in files.list()
    if kind == "hdfs":
        assert list(tmp_path.rglob("*.tmp"))
        stored(tmp_path, kind)[0].claim("used")
        assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(
                "When initiating multiple part upload for key 'x' in bucket 'b': AWS Error NO_SUCH_BUCKET "
                "during CreateMultipartUpload operation: The specified bucket does not exist"
            ),
            "NO_SUCH_BUCKET .*: create the bucket, or correct its name$",
        ),
        (
            OSError("AWS Error ACCESS_DENIED during PutObject operation: Access Denied\nmore"),
            "Access Denied: use credentials that may read, write, list and delete there$",
        ),
        (
            OSError("AWS Error NETWORK_CONNECTION during PutObject operation: curlCode: 7, Couldn't connect"),
            "connect: check the network and the endpoint$",
        ),
        (ValueError("of a package of fsspec"), "of a package of fsspec$"),
    ],
)
def test_an_error_is_one_line_with_the_address_and_advice(tmp_path, error, said):
    files, system = stored(tmp_path)

    def fail(operation, path):
        raise error

    system.before = fail
    with pytest.raises(GmetaError, match=f"^can't write s3://bucket/online/deltas/1: .*{said}") as raised:
        files.write("deltas/1", b"")
    assert "\n" not in str(raised.value)
    with pytest.raises(OSError, match=str(error).splitlines()[0].replace("(", r"\(")):
        files.list()


def test_an_address_is_checked_before_it_is_used(tmp_path, monkeypatch):
    assert str(open_files(f"file://{tmp_path}")) == str(tmp_path)
    monkeypatch.setattr(file_systems, "has_fsspec", lambda: False)
    with pytest.raises(ConfigError, match="pip install fsspec"):
        open_files("odd://host/x")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(ConfigError, match="JAVA_HOME isn't set"):
        open_files("hdfs://host/x")

"""Paths that TensorFlow can't read by itself, read through pyarrow and fsspec."""

from __future__ import annotations

import http.server
import io
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import tensorflow as tf

from gmeta.core import file_systems
from gmeta.core.errors import DataError
from gmeta.io import groups
from gmeta.io.readers.remote import locate, preflight, readable
from support.grouped_data import reading, write_folder

SIZES = ([13, 11, 14], [12, 15])


class Store(http.server.BaseHTTPRequestHandler):
    """The part of S3 that reads: sizes, ranges of bytes, and a list that is empty."""

    files: dict[str, bytes]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def answer(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        data = self.files.get(self.path)
        self.answer(404, b"") if data is None else self.answer(200, b"", len(data))

    def do_GET(self) -> None:
        data = self.files.get(self.path)
        if data is None:
            empty = "list-type" in self.path
            self.answer(200 if empty else 404, b"<ListBucketResult></ListBucketResult>" if empty else b"")
            return
        first, last = map(int, re.findall(r"\d+", self.headers["Range"]))
        self.answer(206, data[first : last + 1])


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The files of a server of S3, by the bucket and the key."""
    files: dict[str, bytes] = {}
    handler = type("Handler", (Store,), {"files": files})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("S3_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_REGION", "eu-west-1")
        file_systems.file_system.cache_clear()
        yield files
        server.shutdown()
    file_systems.file_system.cache_clear()


def arrays(dataset: tf.data.Dataset) -> list[list[object]]:
    return [
        [getattr(value, "flat_values", value).numpy().tolist() for value in tf.nest.flatten(element)]
        for element in dataset
    ]


@pytest.mark.parametrize("layout", ["columnar", "example"])
@pytest.mark.shown_by(case="example")
def test_a_split_in_s3_reads_as_a_local_one(bucket: dict[str, bytes], tmp_path: Path, layout: str) -> None:
    local = write_folder(tmp_path, *SIZES, layout=layout)
    bucket.update({f"/bucket/data/{file.name}": file.read_bytes() for file in local.parent.iterdir()})
    options = reading(groups_per_element=2, seed=3)
    assert arrays(groups("s3://bucket/data/warm", **options)) == arrays(groups(local, **options))


def test_what_is_not_in_s3_is_missing(bucket: dict[str, bytes]) -> None:
    with pytest.raises(DataError, match=r"^s3://bucket/x/manifest\.json: no manifest: No such file or dir"):
        groups("s3://bucket/x/warm")
    assert not locate("s3://bucket/x/warm").exists()
    bucket["/bucket/x/warm"] = b"first"
    assert locate("s3://bucket/x/warm").exists()
    assert locate("s3://bucket/x/warm").read_bytes() == b"first"
    bucket["/bucket/x/warm"] = b"another"  # which isn't what was opened before
    assert locate("s3://bucket/x/warm").read_bytes() == b"another"


class Files:
    """A file system as fsspec has them: files by their names, or the error that one raises."""

    protocol = "lent"

    def __init__(self, files: dict[str, bytes | BaseException]) -> None:
        self.files = files

    def info(self, path: str) -> dict[str, object]:
        if path not in self.files:
            raise FileNotFoundError(path)
        found = self.files[path]
        if isinstance(found, BaseException):
            raise found
        return {"name": path, "size": len(found), "type": "directory" if path.endswith("folder") else "file"}

    def isfile(self, path: str) -> bool:
        return path in self.files

    def open(self, path: str, mode: str) -> io.BytesIO:
        assert mode == "rb"
        return io.BytesIO(self.files[path])


@pytest.fixture
def fsspec(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes | BaseException]:
    """The files of an fsspec that knows one scheme, and needs a package for another."""
    files: dict[str, bytes | BaseException] = {}

    def find(scheme: str) -> type[Files]:
        if scheme == "sftp":
            raise ImportError('SFTPFileSystem requires "paramiko" to be installed')
        if scheme != "lent":
            raise ValueError(f"Protocol not known: {scheme}")
        return Files

    module = ModuleType("fsspec")
    module.__spec__ = SimpleNamespace()
    module.get_filesystem_class = find
    module.core = SimpleNamespace(url_to_fs=lambda root: (Files(files), "/" + root.partition("://")[2]))
    monkeypatch.setitem(sys.modules, "fsspec", module)
    monkeypatch.setitem(sys.modules, "tensorflow_io", None)
    file_systems.file_system.cache_clear()
    return files


def test_fsspec_reads_what_pyarrow_does_not_know(fsspec: dict[str, bytes | BaseException]) -> None:
    data = bytes(range(256)) * 1000
    fsspec["/host/a/file"] = data
    path = locate("lent://host/a/file")
    assert (path.exists(), path.stat().st_size, path.read_bytes()) == (True, len(data), data)
    assert tf.io.read_file("lent://host/a/file").numpy() == data
    with pytest.raises(
        FileNotFoundError, match=r"^\[Errno 2\] No such file or directory: 'lent://host/a/no'$"
    ):
        locate("lent://host/a/no").read_bytes()


def test_what_python_raises_is_said_in_one_line(fsspec: dict[str, bytes | BaseException]) -> None:
    fsspec.update({"/h/denied": PermissionError("denied\nmore"), "/h/folder": b""})
    with pytest.raises(DataError, match=r"^lent://h/denied: can't be read: denied; check the file system$"):
        locate("lent://h/denied").exists()
    assert tf.io.gfile.isdir("lent://h/folder")
    fsspec["/h/long"] = OSError("ä" * 1000)
    with pytest.raises(DataError, match=r"can't be read: ä{255}; check"):
        locate("lent://h/long").stat()
    with pytest.raises(tf.errors.UnimplementedError, match="lends its files to be read by their names"):
        tf.io.gfile.remove("lent://h/folder")
    fsspec["/h/stopped"] = KeyboardInterrupt()  # which TensorFlow's code can't hand on
    with pytest.raises(DataError, match="can't be read: KeyboardInterrupt; check"):
        locate("lent://h/stopped").stat()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("odd://h/x", "; neither pyarrow nor fsspec knows odd://; or copy the data"),
        (
            "sftp://h/x",
            '; fsspec needs a package for sftp://: SFTPFileSystem requires "paramiko" to be installed'
            "; or copy the data",
        ),
    ],
)
def test_what_nobody_reads_names_what_would(path: str, said: str, fsspec: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match=f"^{path}: no file system for ") as raised:
        preflight(path)
    assert str(raised.value).endswith(said)
    assert "\n" not in str(raised.value)


def test_the_packages_that_read_are_named(fsspec: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    found = readable()
    assert "gs" in found["TensorFlow"]
    assert "s3" in found["pyarrow"]
    assert found["fsspec"] == []
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert "fsspec" not in readable()


AHEAD = """
import gmeta, tensorflow as tf
from gmeta.io.readers import remote
import time

def slow(path, offset, count):
    time.sleep(0.2)
    return b"x" * min(count, 100 - offset)

remote._size, remote._part = (lambda path: 100), slow
assert remote.lend("abfs") is None
names = tf.data.Dataset.range(100).map(lambda i: tf.strings.join(["abfs://c@a/", tf.strings.as_string(i)]))
each = iter(names.map(tf.io.read_file, num_parallel_calls=4).prefetch(8))
next(each)
print("ended")
"""


@pytest.mark.shown_by("io/readers/test_groups.py::test_threads_end_with_the_iterator")
def test_python_ends_while_files_are_read_ahead() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AHEAD], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_fsspecs_own_files_in_memory() -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/host/a/file", b"of fsspec")
    assert locate("memory://host/a/file").read_text() == "of fsspec"

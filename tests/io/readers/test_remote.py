"""Prepared data in other file systems, and what is said before one that isn't whole is touched."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError, DataError
from gmeta.io import Balance, ReadOptions, groups, tasks
from gmeta.io.reader_stats import ReaderStats
from gmeta.io.readers.remote import RemotePath, locate, preflight
from support.grouped_data import reading, write_folder

SIZES = ([13, 11, 14], [12, 15])
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch, tmp_path):
    for name in ("JAVA_HOME", "HADOOP_HOME", "HADOOP_HDFS_HOME", "CLASSPATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION", "DEFAULT_REGION", "ROLE_ARN"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture(params=["columnar", "example"])
def both(request, tmp_path):
    """The same split in a local folder and in TensorFlow's file system in memory."""
    (tmp_path / "data").mkdir()
    local = write_folder(tmp_path / "data", *SIZES, layout=request.param)
    remote = f"ram://{tmp_path.name}-{request.param}/data"
    tf.io.gfile.makedirs(remote)
    for file in local.parent.iterdir():
        write(f"{remote}/{file.name}", file.read_bytes())
    return local, f"{remote}/warm"


def write(path, data):
    with contextlib.suppress(tf.errors.NotFoundError):
        tf.io.gfile.remove(path)  # a file in memory is otherwise added to
    with tf.io.gfile.GFile(path, "wb") as file:
        file.write(bytes(data))


def arrays(dataset):
    return [[np.asarray(getattr(v, "flat_values", v)) for v in tf.nest.flatten(e)] for e in dataset]


def assert_same(dataset, other):
    for element, expected in zip(arrays(dataset), arrays(other), strict=True):
        for value, wanted in zip(element, expected, strict=True):
            np.testing.assert_array_equal(value, wanted)


def test_a_split_reads_the_same_wherever_it_is(both):
    local, remote = both
    options = {"groups_per_element": 2, "seed": 3, "shard": (1, 2)}
    assert_same(groups(remote, **reading(**options)), groups(local, **reading(**options)))
    assert_same(tasks(remote, tasks_per_batch=2), tasks(local, tasks_per_batch=2))
    assert_same(groups(f"file://{local}"), groups(local))
    assert Balance.of(remote, sequences=3) == Balance.of(local, sequences=3)


def test_what_is_missing_or_bad_has_its_remote_name(both):
    _, remote = both
    folder = remote.rpartition("/")[0]
    shard = sorted(name for name in tf.io.gfile.listdir(folder) if name.endswith(".tfrecord"))[1]
    with tf.io.gfile.GFile(f"{folder}/{shard}", "rb") as file:
        data = bytearray(file.read())
    data[20] ^= 1
    write(f"{folder}/{shard}", data)
    stats = ReaderStats()
    read = [
        e["task"].numpy().tolist()
        for e in groups(remote, options=ReadOptions(shuffle=False, on_bad="skip", stats=stats))
    ]
    assert read in ([[0, 1, 2, 4]], [[0, 1, 2, 3, 4]])  # of an example group, one row
    (message,) = stats.read().messages
    assert message.startswith(f"{folder}/{shard} at byte 0: the record of ")
    write(f"{folder}/{shard}", data[:-1])
    with pytest.raises(DataError, match=f"^{folder}/{shard}: {len(data) - 1} bytes, the manifest says"):
        groups(remote)
    with pytest.warns(UserWarning, match=f"^{folder}/{shard}: not as long as the manifest says"):
        groups(remote, options=ReadOptions(on_bad="skip"))
    tf.io.gfile.remove(f"{folder}/{shard}")
    tf.io.gfile.remove(f"{folder}/{shard}.gidx")  # of a longer name, which would count as being in a folder
    with pytest.raises(
        DataError, match=f"^{folder}/{shard}: the manifest names this shard, but it is missing"
    ):
        groups(remote)
    tf.io.gfile.remove(f"{folder}/manifest.json")
    with pytest.raises(DataError, match=f"^{folder}/manifest.json: no manifest: No such file or directory"):
        groups(remote)
    with pytest.raises(ConfigError, match="has no split 'cold'"):
        groups(f"{both[0].parent}/cold")


def test_a_file_system_that_fails_is_not_an_empty_one(monkeypatch):
    def fail(path):
        raise tf.errors.UnavailableError(None, None, "the name node\ndoesn't answer")

    monkeypatch.setattr(tf.io.gfile, "stat", fail)
    with pytest.raises(
        DataError, match=r"^ram://x/y: can't be read: the name node doesn't answer; check the"
    ):
        RemotePath("ram://x/y").exists()


def test_a_library_that_is_not_found_is_told_from_a_file(monkeypatch):
    def fail(path, mode):
        raise tf.errors.NotFoundError(None, None, "Library (libhdfs.so) not found")

    monkeypatch.setattr(tf.io.gfile, "GFile", fail)
    with pytest.raises(
        DataError, match=r"^ram://x/manifest\.json: no manifest: Library \(libhdfs\.so\) not f"
    ):
        groups("ram://x/warm")


def test_paths_join_and_part():
    path = locate("ram://bucket/data/warm/")
    assert (str(path), path.name, str(path.parent / "a b")) == (
        "ram://bucket/data/warm",
        "warm",
        "ram://bucket/data/a b",
    )
    assert locate("data/warm") == Path("data/warm")
    assert locate(Path("data")) == Path("data")
    assert locate("file://localhost/data/warm") == Path("/data/warm")
    with pytest.raises(ConfigError, match="names no file of this machine"):
        locate("file://elsewhere/data/warm")


FAKE = """
import tensorflow as tf
from tests_scheme import known
_real = tf.io.gfile.get_registered_schemes
tf.io.gfile.get_registered_schemes = lambda: [*_real(), *known]
"""


@pytest.fixture
def tensorflow_io(tmp_path, monkeypatch):
    """A package of that name, which knows the schemes that are put into the list."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "tests_scheme.py").write_text("known = []\n")
    (folder / "tensorflow_io.py").write_text(FAKE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(tf.io.gfile, "get_registered_schemes", tf.io.gfile.get_registered_schemes)
    yield __import__("tests_scheme").known
    for name in ("tests_scheme", "tensorflow_io"):
        sys.modules.pop(name, None)


def test_a_scheme_that_nobody_knows(tensorflow_io):
    with pytest.raises(ConfigError) as raised:
        preflight("odd://h/x")
    said = str(raised.value)
    assert said.startswith("odd://h/x: no file system for odd://, but for abfs://, ")
    assert ", gs://, " in said
    assert ": tensorflow-io has none; " in said


def test_tensorflow_io_is_asked_where_tensorflow_does_not_know(tensorflow_io, both):
    tensorflow_io.append("odd")
    for path in both:
        groups(path)
    assert "tensorflow_io" not in sys.modules
    preflight("odd://h/x")
    assert "tensorflow_io" in sys.modules


def test_without_tensorflow_io_it_says_what_to_install(monkeypatch):
    for name in ("tensorflow_io", "fsspec"):
        monkeypatch.setitem(sys.modules, name, None)
    for number, advice in (
        ("2.16.2", "tensorflow-io isn't installed: `pip install 'tensorflow-io==0.37.*'`"),
        ("2.21.0", "tensorflow-io isn't installed, and the last one serves TensorFlow 2.16.*"),
    ):
        monkeypatch.setattr(tf, "__version__", number)
        with pytest.raises(ConfigError) as raised:
            preflight("odd://h/x")
        assert str(raised.value).endswith(
            f"{advice}; pyarrow doesn't know odd://, and fsspec, which knows more, isn't installed: "
            "`pip install fsspec`; or copy the data"
        )


def test_a_broken_tensorflow_io_says_so(tmp_path, monkeypatch):
    (tmp_path / "tensorflow_io.py").write_text("raise ImportError('no libtensorflow_io.so\\nmore')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"tensorflow-io can't be imported \(no libtensorflow_io\.so\); "):
        preflight("odd://h/x")


def test_hdfs_names_what_is_missing_one_by_one(tensorflow_io, tmp_path, monkeypatch):
    tensorflow_io.append("hdfs")
    path, java, hadoop = "hdfs://node/data/warm", tmp_path / "java", tmp_path / "hadoop"

    def says(text):
        with pytest.raises(ConfigError, match=text) as raised:
            preflight(path)
        assert str(raised.value).startswith(f"{path}: ")
        assert "\n" not in str(raised.value)
        assert "tensorflow_io" not in sys.modules  # nothing was touched

    says("JAVA_HOME isn't set: set JAVA_HOME")
    monkeypatch.setenv("JAVA_HOME", str(java))
    says(f"JAVA_HOME is {java}, which is no folder")
    java.mkdir()
    says("neither HADOOP_HOME nor HADOOP_HDFS_HOME is set")
    monkeypatch.setenv("HADOOP_HOME", str(hadoop))
    library = hadoop / "lib" / "native" / "libhdfs.so"
    says(f"there is no {library}: set HADOOP_HOME to a Hadoop with its native libraries")
    library.parent.mkdir(parents=True)
    library.touch()
    says(r'CLASSPATH isn\'t set, .*: export CLASSPATH="\$\(')
    monkeypatch.setenv("CLASSPATH", "a.jar")
    monkeypatch.setenv("HADOOP_HDFS_HOME", "")
    preflight(path)
    assert os.environ["HADOOP_HDFS_HOME"] == str(hadoop)  # where TensorFlow looks


@pytest.mark.shown_by("test_hdfs_names_what_is_missing_one_by_one")
def test_hdfs_without_hadoop_ends_in_one_line():
    code = "from gmeta.io import groups; groups('hdfs://node/data/warm')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "gmeta.core.errors.ConfigError: hdfs://node/data/warm: reading it needs Java, and JAVA_HOME isn't "
        "set: set JAVA_HOME to a Java's folder"
    )


def test_s3_wants_whole_credentials_and_advises_on_the_rest(tensorflow_io, monkeypatch, tmp_path):
    tensorflow_io.append("s3")
    with pytest.warns(
        UserWarning, match=r"^s3://b/k: found no credentials: set AWS_.*; no region: set AWS_REGION"
    ):
        preflight("s3://b/k")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY isn't set, AWS_ACCESS_KEY_ID is: set both"):
        preflight("s3://b/k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with pytest.warns(UserWarning, match=r"^s3://b/k: found no region: set AWS_REGION$"):
        preflight("s3://b/k")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    preflight("s3://b/k")

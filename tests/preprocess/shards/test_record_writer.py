"""RecordWriter: the bytes that protobuf makes, whole files or none, and one line for what is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import DataError
from gmeta.core.schema import Column, Schema
from gmeta.preprocess.shards import record_writer
from gmeta.preprocess.shards.record_writer import RecordWriter
from support.drawn_batches import as_columns, rows_of, schemas
from support.grouped_data import SCHEMA, grouped_columns, record_offsets


@st.composite
def tables(draw):
    """A schema, and rows of it as lists of lists."""
    schema = draw(schemas())
    return schema, draw(rows_of(schema, draw(st.integers(0, 6))))


def example(schema, row):
    made = tf.train.Example()
    for column, values in zip(schema, row, strict=True):
        feature = made.features.feature[column.name]
        (feature.int64_list if column.dtype == "int64" else feature.float_list).SetInParent()
        (feature.int64_list if column.dtype == "int64" else feature.float_list).value.extend(values)
    return made


def names(folder):
    return [path.name for path in folder.iterdir()]


def records(path):
    return list(tf.data.TFRecordDataset([str(path)]).as_numpy_iterator())


@given(tables())
def test_the_bytes_are_those_of_protobuf_and_tensorflow(tmp_path_factory, table):
    schema, rows = table
    folder = tmp_path_factory.mktemp("rows")
    with RecordWriter(folder / "ours", schema) as writer:
        writer.write(as_columns(schema, rows))
    with tf.io.TFRecordWriter(str(folder / "theirs")) as peer:
        for row in rows:
            peer.write(example(schema, row).SerializeToString(deterministic=True))
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()
    assert writer.rows == len(rows)
    assert writer.bytes == (folder / "ours").stat().st_size


def test_blocks_and_calls_leave_no_seam(tmp_path, monkeypatch):
    columns = grouped_columns([7, 40, 1])
    with RecordWriter(tmp_path / "one", SCHEMA) as one:
        one.write(columns)
    monkeypatch.setattr(record_writer, "_BLOCK", 300)  # two records or so
    with RecordWriter(tmp_path / "many", SCHEMA) as many:
        for start, stop in ((0, 7), (7, 7), (7, 48)):
            part = {}
            for name, values in columns.items():
                if isinstance(values, tuple):
                    flat, splits = values
                    part[name] = (
                        flat[splits[start] : splits[stop]],
                        splits[start : stop + 1] - splits[start],
                    )
                else:
                    part[name] = values[start:stop]
            many.write(part)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()
    assert many.rows == one.rows == 48


def test_python_lists_narrow_integers_and_strided_arrays_are_taken(tmp_path):
    schema = Schema((Column("task"), Column("batch_id"), Column("rating", "float32")))
    with RecordWriter(tmp_path / "x", schema) as writer:
        writer.write({"task": [1, 2], "batch_id": np.array([3, 4], np.uint8), "rating": [0.5, 1]})
        writer.write({"task": np.arange(4)[::2], "batch_id": np.arange(2), "rating": np.ones(2, np.float16)})
    assert records(tmp_path / "x") == [
        example(schema, row).SerializeToString(deterministic=True)
        for row in ([[1], [3], [0.5]], [[2], [4], [1]], [[0], [0], [1]], [[2], [1], [1]])
    ]


def test_it_needs_no_tensorflow():
    code = "import sys, gmeta.preprocess.shards.record_writer; sys.exit('tensorflow' in sys.modules)"
    path = os.pathsep.join(p for p in sys.path if p)
    assert (
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}).returncode == 0
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"item": None}, "missing column 'item'"),
        ({"extra": [1]}, "unknown column 'extra'"),
        ({"item": np.ones(3, np.float32)}, "column 'item' is int64, got float32"),
        ({"item": np.ones(3, np.uint64)}, "column 'item' is int64, got uint64"),
        ({"item": ["a", "b", "c"]}, "column 'item' is int64, got <U1"),
        ({"rating": np.ones(3)}, "column 'rating' is float32, got float64"),
        ({"rating": ["a", "b", "c"]}, "column 'rating' is float32, got <U1"),
        ({"item": np.ones((3, 1), int)}, r"column 'item' must be 1-D, got shape \(3, 1\)"),
        ({"item": ([1, 2, 3], [0, 1, 2, 3])}, "column 'item' has one value a record"),
        ({"item": [1, 2]}, "columns of different lengths: .*'item': 2"),
        ({"genre": [1, 2, 3]}, "column 'genre' is a list column, got list"),
        ({"genre": ([1, 2], [0, 1, 2])}, "columns of different lengths: .*'genre': 2"),
        ({"genre": ([1, 2], [0, 1, 1, 1])}, "column 'genre': row_splits must rise from 0 to 2"),
        ({"genre": ([1, 2], [1, 1, 1, 2])}, "column 'genre': row_splits must rise from 0 to 2"),
        ({"genre": ([1, 2], [0, 3, 1, 2])}, "column 'genre': row_splits must rise from 0 to 2"),
        ({"genre": ([1, 2], [])}, "column 'genre': row_splits must be 1-D integers"),
        ({"genre": ([1, 2], [0.0, 1.0, 1.0, 2.0])}, "column 'genre': row_splits must be 1-D integers"),
        ({"genre": ([0.5], [0, 1, 1, 1])}, "column 'genre' is int64, got float64"),
    ],
)
def test_wrong_columns_are_refused_and_nothing_is_written(tmp_path, change, says):
    good = grouped_columns([3])
    bad = {name: values for name, values in {**good, **change}.items() if values is not None}
    with RecordWriter(tmp_path / "x", SCHEMA) as writer:
        with pytest.raises(DataError, match=f"^{tmp_path}/x: {says}"):
            writer.write(bad)
        assert writer.bytes == 0
        writer.write(good)  # it goes on
    assert len(records(tmp_path / "x")) == 3


def test_the_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "x"
    path.write_text("what was there before")
    with RecordWriter(path, SCHEMA) as writer:
        writer.write(grouped_columns([3]))
        assert path.read_text() == "what was there before"
    assert len(record_offsets(path)) == 4
    assert names(tmp_path) == ["x"]
    writer.close()  # twice does nothing


def test_an_error_leaves_nothing_behind(tmp_path):
    (tmp_path / "x").write_text("what was there before")
    with pytest.raises(DataError), RecordWriter(tmp_path / "x", SCHEMA) as writer:
        writer.write(grouped_columns([3]) | {"extra": []})
    assert (tmp_path / "x").read_text() == "what was there before"
    assert names(tmp_path) == ["x"]


def test_a_forgotten_writer_leaves_nothing_behind(tmp_path):
    writer = RecordWriter(tmp_path / "x", SCHEMA)
    writer.write(grouped_columns([3]))
    assert len(names(tmp_path)) == 1
    del writer
    assert names(tmp_path) == []


def test_a_closed_writer_says_so(tmp_path):
    with RecordWriter(tmp_path / "x", SCHEMA) as writer:
        pass
    with pytest.raises(ValueError, match="the writer is closed"):
        writer.write(grouped_columns([3]))
    assert (tmp_path / "x").read_bytes() == b""


def test_two_writers_of_one_file_are_refused(tmp_path):
    with RecordWriter(tmp_path / "x", SCHEMA) as writer:
        writer.write(grouped_columns([3]))
        with pytest.raises(FileExistsError):
            RecordWriter(tmp_path / "x", SCHEMA)
    assert len(records(tmp_path / "x")) == 3


def test_a_folder_that_isnt_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        RecordWriter(tmp_path / "nowhere" / "x", SCHEMA)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full to write to")
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    full = os.open("/dev/full", os.O_WRONLY)
    writer = RecordWriter(tmp_path / "x", SCHEMA)
    os.dup2(full, writer._file.fileno())
    os.close(full)
    with pytest.raises(OSError, match="the disk is full") as raised:
        writer.write(grouped_columns([3]))
    assert raised.value.errno == 28
    assert raised.value.filename == str(tmp_path / "x")
    assert "\n" not in str(raised.value)
    assert names(tmp_path) == []
    with pytest.raises(ValueError, match="the writer is closed"):
        writer.write(grouped_columns([3]))

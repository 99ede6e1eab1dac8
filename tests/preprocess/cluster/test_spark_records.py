"""Files in pieces: every line and every row group is in one of them."""

import gzip

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import DataError
from gmeta.preprocess import PrepareConfig, TableSpec
from gmeta.preprocess.cluster import spark_rows
from gmeta.preprocess.cluster.spark_rows import FileSplit, cut_files, read_split
from gmeta.preprocess.cluster.table_job import TableJob

SPEC = TableSpec("user")


def job_of(folder, name, content):
    path = folder / name
    if isinstance(content, pa.Table):
        pyarrow.parquet.write_table(content, path, row_group_size=10)
    else:
        path.write_bytes(content)
    return TableJob.of_files([path], folder / "out", SPEC, PrepareConfig(), "raise")


LINES = st.lists(st.integers(0, 10**6), min_size=1, max_size=30)


@given(numbers=LINES, size=st.integers(1, 40), block=st.integers(1, 20), ends=st.booleans())
def test_every_line_is_in_one_piece(tmp_path_factory, numbers, size, block, ends):
    data = b"user\n" + b"\n".join(str(number).encode() for number in numbers) + b"\n" * ends
    job = job_of(tmp_path_factory.mktemp("t"), "t.csv", data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spark_rows, "_BLOCK", block)
        patch.setattr(spark_rows, "_LEAST", size)
        patch.setattr(spark_rows, "_MOST", size)
        pieces = cut_files(job, 2)
        assert len(pieces) == -(-len(data) // size)
        blocks = [given for piece in pieces for given in read_split(job, piece)]
    assert b"".join(blocks) == data
    assert all(block.endswith(b"\n") for block in blocks[:-1])


def test_row_groups_are_in_one_piece_and_unused_columns_are_not_read(tmp_path, monkeypatch):
    table = pa.table({"other": ["x"] * 95, "user": list(range(95))})
    job = job_of(tmp_path, "t.parquet", table)
    assert cut_files(job, 1) == [FileSplit(0, 0, 10)]
    monkeypatch.setattr(spark_rows, "_LEAST", 300)
    pieces = cut_files(job, 50)
    assert 3 <= len(pieces) <= 10
    batches = [batch for piece in pieces for batch in read_split(job, piece)]
    users = pa.chunked_array([batch.column(job.spec.columns["user"].source) for batch in batches])
    assert users.to_pylist() == list(range(95))


def test_a_compressed_file_is_one_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(spark_rows, "_LEAST", 3)
    data = b"user\n" + b"1\n" * 50
    job = job_of(tmp_path, "t.csv.gz", gzip.compress(data))
    (piece,) = cut_files(job, 50)
    assert b"".join(read_split(job, piece)) == data


@pytest.mark.parametrize("name", ["t.parquet", "t.csv.gz"])
def test_a_damaged_file_is_named(tmp_path, name):
    content = (
        pa.table({"user": [1, 2]}) if name == "t.parquet" else gzip.compress(b"user\n" + b"1234\n" * 999)
    )
    job = job_of(tmp_path, name, content)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=f"{name}: can't be read: "):
        list(read_split(job, *cut_files(job, 1)))

"""Files and columns of any name are those that were given, and a missing value of text has a name too."""

import gzip
import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gmeta.core.errors import ConfigError, DataError
from gmeta.preprocess import ColumnSpec, TableSpec, prepare
from gmeta.preprocess.plan.column_values import hash_text
from support.cells import slow_but
from support.data_files import read_split, write_table

ROWS = pa.table({"user": [1, 1], "item": [3, 4]})
SPECIAL = [*"*?[]{}\\'\"%#& ~,\n$;=", "[1]", "a*", "~a", "é"]


def items(out):
    return sorted(np.ravel([row["item"] for row in read_split(out, "train")]).tolist())


# Quick: csv, and one name for each other ending; the engine that is given a name is the same.
@pytest.mark.parametrize(
    ("special", "ending"),
    slow_but(
        lambda special, ending: ending == "csv" or special == SPECIAL[0],
        itertools.product(SPECIAL, ["csv", "csv.gz", "parquet", "jsonl"]),
    ),
)
def test_a_file_is_the_one_that_was_named(tmp_path, special, ending):
    folder = tmp_path / "in"
    folder.mkdir()
    # What the name would match if it were a pattern stands beside it.
    decoys = pa.table({"user": [9], "item": [9]})
    for name in ("data1", "dataa", "dataab", "data", "dataaa"):
        write_table(decoys, folder / f"{name}.{ending.removesuffix('.gz')}")
    given = folder / f"{special}data{special}.{ending}"
    plain = write_table(ROWS, tmp_path / f"plain.{ending.removesuffix('.gz')}")
    given.write_bytes(gzip.compress(plain.read_bytes()) if ending.endswith(".gz") else plain.read_bytes())
    prepare(given, tmp_path / "out", spec=TableSpec("user"))
    assert items(tmp_path / "out") == [3, 4]


@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_each_file_of_a_folder_is_read_once(tmp_path, ending):
    folder = tmp_path / "in[1]"
    folder.mkdir()
    for number, name in enumerate(("a*", "ab", "a?", "a[b]")):
        write_table(pa.table({"user": [1], "item": [number]}), folder / f"{name}.{ending}")
    prepare(folder, tmp_path / "out", spec=TableSpec("user"))
    assert items(tmp_path / "out") == [0, 1, 2, 3]


def test_an_error_names_the_file_as_it_was_given(tmp_path):
    path = tmp_path / "a[1].parquet"
    path.write_bytes(b"PAR1 no parquet PAR1")
    with pytest.raises(DataError) as caught:
        prepare(path, tmp_path / "out", spec=TableSpec("user"))
    assert str(caught.value).startswith(f"{path}: ")
    assert "gmeta-" not in str(caught.value)


@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_columns_that_differ_in_case_are_refused(tmp_path, ending):
    path = tmp_path / f"t.{ending}"
    table = pa.table({"user": [1], "Item": [2], "item": [3]})
    if ending == "parquet":
        pq.write_table(table, path)
    elif ending == "csv":
        path.write_text("user,Item,item\n1,2,3\n")
    else:
        path.write_text('{"user": 1, "Item": 2, "item": 3}\n')
    with pytest.raises(ConfigError, match=r"t\.\w+: the \w+ has columns 'Item' and 'item', which"):
        prepare(path, tmp_path / "out", spec=TableSpec("user"))


@pytest.mark.parametrize("default", ["unknown", "", "é", 7])
@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
@pytest.mark.shown_by(case="csv-unknown")
def test_a_missing_text_has_the_hash_of_its_default(tmp_path, ending, default):
    table = pa.table({"user": [1, 1, 1], "ts": [1, 2, 3], "item": ["a", None, "b"]})
    path = write_table(table, tmp_path / f"t.{ending}")
    spec = TableSpec("user", time="ts", columns={"item": ColumnSpec(default=default)})
    prepare(path, tmp_path / "out", spec=spec)
    found = np.array([row["item"] for row in read_split(tmp_path / "out", "train")]).ravel().tolist()
    missing = hash_text(default) if isinstance(default, str) else default
    assert found == [hash_text("a"), missing, hash_text("b")]

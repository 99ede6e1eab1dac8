"""Rows as lines: read back as they were, and sorted by bytes as their numbers are."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.schema import Column
from gmeta.preprocess.cluster import row_text
from gmeta.preprocess.cluster.row_text import TextForm, parse_lines
from gmeta.preprocess.source import Reason
from gmeta.preprocess.table_spec import ColumnSpec, TableSpec

INTS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(width=32, allow_nan=False)
COLUMNS = [
    Column("i"),
    Column("f", "float32"),
    Column("a", is_list=True),
    Column("b", "float32", is_list=True),
]


@given(
    st.lists(st.tuples(INTS, FLOATS, st.lists(INTS, max_size=3), st.lists(FLOATS, max_size=3)), min_size=1)
)
def test_rows_are_read_back_bit_by_bit(rows):
    ints, floats, *lists = zip(*rows, strict=True)
    columns = {"i": np.array(ints, np.int64), "f": np.array(floats, np.float32)}
    for name, dtype, cells in (("a", np.int64, lists[0]), ("b", np.float32, lists[1])):
        splits = np.cumsum([0, *map(len, cells)])
        columns[name] = np.array([value for cell in cells for value in cell], dtype), splits
    sink = io.BytesIO()
    number = np.arange(len(rows)) * 7 % 1000
    row_text.write_rows(sink, row_text.keys(number, [columns["i"]]), columns, COLUMNS)
    assert sink.getvalue().count(b"\n") == len(rows)
    again, found = row_text.read_rows(sink.getvalue(), COLUMNS)
    assert again.tolist() == number.tolist()
    for name, values in columns.items():
        for one, other in zip(
            values if isinstance(values, tuple) else [values],
            found[name] if isinstance(found[name], tuple) else [found[name]],
            strict=True,
        ):
            assert one.tobytes() == other.astype(one.dtype).tobytes()


@given(st.lists(st.tuples(st.integers(0, 999_999), INTS, INTS), min_size=1))
def test_bytes_of_keys_sort_as_numbers(rows):
    number, *sort = np.array(rows, np.int64).T
    keys = row_text.keys(number, sort).to_pylist()
    assert [row for _, row in sorted(zip(keys, rows, strict=True))] == sorted(rows)
    assert all(key > row_text.TALLY for key in keys)


@given(st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b" "))), st.integers(1, 12))
def test_blocks_are_whole_lines(lines, size):
    data = b"".join(line + b"\n" for line in lines) + b"the end"
    found = list(row_text.blocks(io.BytesIO(data), size))
    assert b"".join(found) == data
    assert all(block.endswith(b"\n") for block in found[:-1])


SPEC = TableSpec(
    "user",
    columns={
        "user": ColumnSpec("user", dtype="int64", is_list=False),
        "name": ColumnSpec("name", hash=True, dtype="int64", is_list=False),
        "tags": ColumnSpec("tags", dtype="int64", is_list=True),
    },
)
CSV = TextForm("csv", ("user", "other", "name", "tags"), ",", '"')


def parsed(lines, form=CSV):
    records, refused = [], []
    for batch, wrong in parse_lines(lines, form, SPEC):
        records += batch.to_pylist()
        refused += wrong
    return [tuple(record.values()) for record in records], refused


def test_lines_of_csv_are_text_and_the_header_goes_wherever_it_is():
    header = b"\xef\xbb\xbfuser,other,name,tags\r\n"
    lines = header + b'1,x,"a, ""b""",3|4\r\n\r\n2,,,\n' + header[3:] + b"user,x,n,\n"
    assert parsed(lines) == (
        [("1", 'a, "b"', "3|4"), ("2", None, None), ("user", "n", None)],
        [],
    )


def test_lines_that_are_not_records_are_told_apart():
    records, refused = parsed(b"1,x,a,3\n1,x\n2,x,b\xff,4\n1,x,a,3,5\n3,x,c,5\n")
    assert records == [("1", "a", "3"), ("3", "c", "5")]
    found = {one.reason: one.message for one in refused}
    assert found.pop(Reason.MALFORMED).endswith(r"'2,x,b\\xff,4'")
    assert found == {
        Reason.MISSING_FIELD: "4 fields expected, got 2: '1,x'",
        Reason.EXTRA_FIELD: "4 fields expected, got 5: '1,x,a,3,5'",
    }


def test_lines_of_json_keep_their_digits():
    lines = b'{"user": 9007199254740993, "name": "a", "tags": [1, 2.50]}\n\n{"tags": null, "user": true}\n'
    lines += b'{"user": 1, "tags": 3}\n5\n{"no": 1}\n{"user": 1\n'
    records, refused = parsed(lines, TextForm("json"))
    assert records == [
        ("9007199254740993", "a", ["1", "2.50"]),
        ("true", None, None),
        ("1", None, [None]),
    ]
    assert [one.reason for one in refused] == [Reason.MALFORMED] * 3
    assert "'{\"user\": 1'" in refused[-1].message


@pytest.mark.parametrize("lines", [b"", b"\n\n", b"user,other,name,tags\n"])
def test_there_may_be_no_record(lines):
    assert parsed(lines) == ([], [])

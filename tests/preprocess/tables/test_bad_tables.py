"""Whatever can be wrong with a table: an error with its file and place, or counted by its reason."""

import json
import os

import pyarrow as pa
import pyarrow.parquet
import pytest

from gmeta.core.data_manifest import Manifest, Texts
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.preprocess import ColumnSpec, TableSpec, prepare
from gmeta.preprocess.local import duckdb_engine
from gmeta.preprocess.shape_spec import Join, Shape
from gmeta.preprocess.tables import table_scan
from support.data_files import read_split, write_table

SPEC = TableSpec(
    "user",
    time="ts",
    label="click",
    columns={
        "user": ColumnSpec(dtype="int64"),
        "price": ColumnSpec(dtype="float32", min=0, max=100),
        "ts": ColumnSpec(dtype="int64"),
    },
)
GOOD = {"user": 7, "ts": 5, "click": 1, "price": 2.5}
ROWS = 20
# What becomes of the row, the reason, and what is said.
BAD_ROWS = [
    ({"user": None}, "null", "user must be given, got None"),
    ({"click": None}, "null", "click must be given"),
    ({"price": -1}, "out of range", "price must be >= 0, got "),
    ({"price": 1000}, "out of range", "price must be <= 100, got "),
]
BAD_TEXT = [
    ({"user": "seven"}, "not a number", "user must be a whole number, got 'seven'"),
    ({"user": 7.5}, "not a number", "user must be a whole number, got '7.5'"),
    ({"user": 2**63}, "out of range", "user must be an int64, got '9223372036854775808'"),
    ({"click": "yes"}, "not a number", "click must be a number, got 'yes'"),
    ({"click": "NaN"}, "NaN", "click must be a number, got 'NaN'"),
]


def text_file(path, row, at):
    rows = [{**GOOD, "ts": number, **(row if number == at else {})} for number in range(ROWS)]
    if path.suffix == ".csv":
        lines = [
            "user,ts,click,price",
            *(",".join("" if v is None else str(v) for v in r.values()) for r in rows),
        ]
    else:
        lines = [json.dumps(r) for r in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def assert_counted(data, out, reason, count=1, spec=SPEC):
    summary = prepare(data, out, on_bad="skip", spec=spec)
    assert {kind.reason: kind.count for kind in summary.bad} == {reason: count}
    assert summary.rows_read == summary.rows + count
    assert len(read_split(out, "train")) == summary.rows
    assert sum(Manifest.load(out).dropped.values()) == count
    return summary.bad[0].examples


def test_a_field_that_ends_in_a_backslash_where_backslashes_escape_quotes(tmp_path):
    """As in Book-Crossing's books; the advice that is given makes the line a record."""
    (tmp_path / "r.csv").write_text("u;i;y\n1;a;0\n1;b;1\n")
    text = '"i";"title";"by"\n"a";"A \\"very\\" good one";"X"\n"b";"Level 4\\";C. W"\n'
    (tmp_path / "books.csv").write_text(text)
    (tmp_path / "mended.csv").write_text(text.replace('4\\"', '4\\\\"'))
    said = r'3 fields expected, got 2, where \\" is a quote inside a field \(\\\\" ends one\): '
    with pytest.raises(DataError, match=r"books\.csv:3: missing field: " + said):
        prepare(tmp_path / "books.csv", tmp_path / "out", spec=TableSpec("i"))
    spec = TableSpec("u", shape=Shape(joins=(Join(str(tmp_path / "books.csv"), "i"),)))
    with pytest.raises(DataError, match=r"books\.csv:3: " + said + ".*mend the side table"):
        prepare(tmp_path / "r.csv", tmp_path / "out", spec=spec)
    assert prepare(tmp_path / "mended.csv", tmp_path / "out", spec=TableSpec("i")).rows == 2
    assert "Level 4\\" in Texts.of(tmp_path / "out").table("title")["text"].to_pylist()


@pytest.mark.parametrize(
    "name", ["t.csv", pytest.param("t.jsonl", marks=pytest.mark.shown_by("test_a_bad_value_in_text"))]
)
@pytest.mark.parametrize(("row", "reason", "said"), BAD_ROWS + BAD_TEXT)
def test_a_bad_value_in_text(tmp_path, name, row, reason, said):
    data = text_file(tmp_path / name, row, 11)
    line = 13 if name == "t.csv" else 12
    with pytest.raises(DataError) as caught:
        prepare(data, tmp_path / "out", spec=SPEC)
    assert str(caught.value).startswith(f"{data}:{line}: {reason}: {said}")
    remedy = "hash = true for its column" if row == {"user": "seven"} else "--on-bad skip"
    assert remedy in str(caught.value)
    assert not (tmp_path / "out").exists()
    (example,) = assert_counted(data, tmp_path / "out", reason)
    assert example.startswith(f"{data}:{line}: {said}")


@pytest.mark.parametrize(
    ("row", "reason", "said"),
    [*BAD_ROWS, ({"click": float("nan")}, "NaN", "click must be a number, got nan")],
)
def test_a_bad_value_in_parquet(tmp_path, row, reason, said):
    rows = [{**GOOD, "ts": number, **(row if number == 11 else {})} for number in range(ROWS)]
    columns = {name: [r[name] for r in rows] for name in GOOD}
    columns["click"] = pa.array(columns["click"], pa.float64())
    data = write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(DataError) as caught:
        prepare(data, tmp_path / "out", spec=SPEC)
    assert str(caught.value).startswith(f"{data}: {reason}: row 12: {said}")
    (example,) = assert_counted(data, tmp_path / "out", reason)
    assert example.startswith(f"{data}: row 12: {said}")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("7,5,1", "missing field"),
        ("7,5,1,2.5,extra", "extra field"),
        ('7,5,1,"2.5', "malformed line"),
        ("7,5,1,\xff", "malformed line"),
    ],
)
def test_a_malformed_csv_line(tmp_path, line, reason):
    data = text_file(tmp_path / "t.csv", {}, 0)
    lines = data.read_bytes().splitlines(keepends=True)
    place = len(lines) if '"' in line else 10  # an open quote takes all that follows
    lines[place - 1] = line.encode("latin-1") + b"\n"
    data.write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=rf"t\.csv:{place}: {reason}: .*; mend it, or leave .* --on-bad skip"):
        prepare(data, tmp_path / "out", spec=SPEC)
    (example,) = assert_counted(data, tmp_path / "out", reason)
    assert example.startswith(f"{data}:{place}: ")


@pytest.mark.parametrize("line", [2, 9, ROWS + 1])
def test_the_error_of_a_row_with_too_few_fields_names_its_file_among_several(tmp_path, line):
    data = tmp_path / "log"
    data.mkdir()
    _, second, _ = (text_file(data / name, {}, 0) for name in ("a.csv", "b.csv", "c.csv"))
    lines = second.read_text().splitlines(keepends=True)
    second.write_text("".join([*lines[: line - 1], "7,5,1\n", *lines[line:]]))
    said = f"{second}:{line}: missing field: 4 fields expected, got 3: '7,5,1'; mend it, or leave"
    with pytest.raises(DataError) as caught:
        prepare(data, tmp_path / "out", spec=SPEC)
    assert str(caught.value).startswith(said)
    (example,) = assert_counted(data, tmp_path / "out", "missing field")
    assert example == f"{second}:{line}: 4 fields expected, got 3: '7,5,1'"


def test_lines_are_counted_as_an_editor_does(tmp_path):
    """Blank lines, refused lines, fields that span lines, and Windows' ends."""
    text = 'user,ts,click,price,note\r\n1,1,1,1,"two\r\nlines"\r\n\r\n2,2\r\n3,3,bad,3,x\r\n4,4,1,4,x\r\n'
    (tmp_path / "t.csv").write_bytes(text.encode())
    summary = prepare(tmp_path / "t.csv", tmp_path / "out", on_bad="skip", spec=SPEC)
    examples = {kind.reason: kind.examples[0].split(": ")[0] for kind in summary.bad}
    assert examples == {"missing field": f"{tmp_path}/t.csv:5", "not a number": f"{tmp_path}/t.csv:6"}
    assert (summary.rows_read, summary.rows) == (4, 2)


@pytest.mark.parametrize("number", [7, 130_000], ids=["in the first batch", "in a later one"])
@pytest.mark.shown_by(case="in the first batch")
def test_a_line_that_is_not_json(tmp_path, number):
    data = tmp_path / "t.jsonl"
    lines = [json.dumps(GOOD)] * (number + 5)
    lines[number - 1] = lines[0][:-9]
    data.write_text("\n".join(lines))
    with pytest.raises(DataError, match=rf"t\.jsonl:{number}: malformed line: not JSON: "):
        prepare(data, tmp_path / "out", spec=SPEC)
    (example,) = assert_counted(data, tmp_path / "out", "malformed line")
    assert example.startswith(f"{data}:{number}: ")


@pytest.mark.parametrize("deep", ["[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000])
def test_a_column_of_json_that_is_nested_deeply_is_left_out(tmp_path, deep):
    data = tmp_path / "t.jsonl"
    data.write_text(f'{json.dumps(GOOD)[:-1]}, "x": {deep}}}\n{json.dumps(GOOD)}\n')
    assert prepare(data, tmp_path / "out", spec=SPEC).rows == 2


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
@pytest.mark.parametrize("bad", ["2014-02-30 10:00:00", "0000-00-00 00:00:00", "2014-02-28 24:00:00"])
@pytest.mark.shown_by(case="2014-02-30 10:00:00-t.csv")
def test_an_impossible_date_takes_no_other_row_with_it(tmp_path, name, bad):
    times = ["2014-02-27 10:00:00", bad, "2014-03-02"]
    data = write_table(pa.table({"user": [1, 2, 3], "ts": times, "click": [1, 0, 1]}), tmp_path / name)
    spec = TableSpec("user", time="ts", label="click")
    with pytest.raises(DataError, match=rf"ts must be a date and time that exist, got '{bad}'"):
        prepare(data, tmp_path / "out", spec=spec)
    assert_counted(data, tmp_path / "out", "not a number", spec=spec)
    found = sorted(row["ts"][0] // 10**6 for row in read_split(tmp_path / "out", "train"))
    assert found == [1393495200, 1393718400]


@pytest.mark.shown_by("test_records_that_an_engine_loses_are_missed")
def test_a_line_of_more_than_the_parsers_buffer_is_counted(tmp_path, monkeypatch):
    """DuckDB's rejects don't name such a line: with --on-bad skip it was not even counted."""
    data = tmp_path / "t.csv"
    data.write_text("user,item\n1,a\n2," + "x" * 33_000_000 + "\n3,5\n")
    assert prepare(data, tmp_path / "text", spec=TableSpec("user")).rows == 3
    spec = TableSpec("user", columns={"item": ColumnSpec(dtype="int64")})
    data.write_text("user,item\n1,4\n2," + "x" * 33_000_000 + "\n3,5\n")
    (example,) = assert_counted(data, tmp_path / "out", "not a number", spec=spec)
    assert example.startswith(f"{data}:3: item must be a whole number, got 'xxx")
    assert len(example) < 500
    monkeypatch.setattr(table_scan, "_LONGEST", 1 << 20)
    with pytest.raises(
        DataError, match=r"it has a record of 33,000,00\d bytes, and at most 1,048,576 can be"
    ):
        prepare(data, tmp_path / "long", "skip", spec=spec)


@pytest.mark.parametrize("on_bad", ["raise", "skip"])
def test_records_that_an_engine_loses_are_missed(tmp_path, monkeypatch, on_bad):
    data = text_file(tmp_path / "t.csv", {}, 0)
    monkeypatch.setattr(table_scan.CsvScan, "count", lambda scan: ROWS + 1)
    with pytest.raises(
        DataError, match=rf"t\.csv: it has {ROWS + 1} records, and {ROWS} were read; mend its"
    ):
        prepare(data, tmp_path / "out", on_bad=on_bad, spec=SPEC)


def test_more_than_memory_and_disk_hold_is_refused_before_it_is_read(tmp_path, monkeypatch):
    """A page of Parquet may hold as many equal values as it likes."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 70_000, pa.int32()), pa.array(["y" * 1_000_000]))
    users = pa.array([1] * 70_000)
    pa.parquet.write_table(pa.table({"user": users, "item": texts}), tmp_path / "bomb.parquet")
    with pytest.raises(DataError, match=r"bytes unpack to 70,00\d,\d+,\d+, more than 1,000 times as many"):
        prepare(tmp_path / "bomb.parquet", tmp_path / "out", spec=TableSpec("user"))
    # A column that isn't read takes no room.
    number = TableSpec("user", columns={"user": ColumnSpec()})
    assert prepare(tmp_path / "bomb.parquet", tmp_path / "out", spec=number).rows == 70_000
    monkeypatch.setattr(duckdb_engine, "_COMPRESSION", 0)
    with pytest.raises(
        GmetaError, match=r"70,000 rows take .* bytes to sort, and there are .* of disk: name"
    ):
        prepare(tmp_path / "bomb.parquet", tmp_path / "other", spec=number)


def test_many_bad_rows_are_counted_and_the_first_named(tmp_path):
    rows = [{**GOOD, "user": None if number % 2 else 7} for number in range(1000)]
    data = write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    examples = assert_counted(data, tmp_path / "out", "null", 500)
    assert [example.split(": ")[1] for example in examples] == ["row 2", "row 4", "row 6"]


def two_files(folder, second):
    write_table(pa.Table.from_pylist([GOOD] * 4), folder / "t" / "a.parquet")
    write_table(second, folder / "t" / "b.parquet")
    return folder / "t"


def test_a_column_that_a_later_file_lacks(tmp_path):
    data = two_files(tmp_path, pa.Table.from_pylist([GOOD] * 3).drop_columns(["price"]))
    with pytest.raises(DataError, match=r"b\.parquet: missing column: row 1: there is no column 'price'"):
        prepare(data, tmp_path / "out", spec=SPEC)
    assert_counted(data, tmp_path / "out", "missing column", 3)
    spec = TableSpec("user", columns={"price": ColumnSpec(default=9)})
    prepare(data, tmp_path / "filled", spec=spec)
    assert sorted(row["price"][0] for row in read_split(tmp_path / "filled", "train")) == [2.5] * 4 + [9] * 3


def test_a_column_of_another_type_in_a_later_file(tmp_path):
    table = pa.Table.from_pylist([GOOD] * 3)
    lists = table.set_column(1, "ts", pa.array([[1], [2], [3]]))
    with pytest.raises(
        DataError, match=r"b\.parquet: wrong type: row 1: ts must be int64, not list<.*got \[1\]"
    ):
        prepare(two_files(tmp_path, lists), tmp_path / "out", spec=SPEC)
    assert_counted(tmp_path / "t", tmp_path / "out", "wrong type", 3)
    # Another type that holds the same numbers is fine.
    text = table.set_column(1, "ts", pa.array(["1", "2", "3"]))
    prepare(two_files(tmp_path, text), tmp_path / "text", spec=SPEC)
    assert len(read_split(tmp_path / "text", "train")) == 7


@pytest.mark.parametrize("on_bad", ["raise", "skip"])
class TestWhatEndsTheRunUnderEitherRule:
    """Files that can't be read at all, and specs that don't fit."""

    def assert_refused(self, data, tmp_path, on_bad, said, spec=SPEC, error=DataError):
        with pytest.raises(error, match=said) as caught:
            prepare(data, tmp_path / "out", on_bad=on_bad, spec=spec)
        assert "\n" not in str(caught.value)
        assert not any("out" in path.name for path in tmp_path.iterdir())

    def test_a_file_that_is_missing(self, tmp_path, on_bad):
        self.assert_refused(tmp_path / "t.csv", tmp_path, on_bad, r"t\.csv: can't read it: No such file")
        self.assert_refused(tmp_path / "*.csv", tmp_path, on_bad, r"\*\.csv: no file has such a name")
        (tmp_path / "empty").mkdir()
        self.assert_refused(tmp_path / "empty", tmp_path, on_bad, "empty: the folder has no file of a table")

    @pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
    def test_a_file_that_is_empty(self, tmp_path, on_bad, name):
        (tmp_path / name).touch()
        self.assert_refused(tmp_path / name, tmp_path, on_bad, rf"{name}: the file is empty")

    @pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
    def test_a_table_without_rows(self, tmp_path, on_bad, name):
        data = write_table(pa.table({column: pa.array([], pa.int64()) for column in GOOD}), tmp_path / name)
        self.assert_refused(data, tmp_path, on_bad, rf"{name}: there is no row in it")

    def test_a_parquet_file_that_was_cut(self, tmp_path, on_bad):
        data = write_table(pa.Table.from_pylist([GOOD] * 100), tmp_path / "t.parquet")
        data.write_bytes(data.read_bytes()[:-20])
        self.assert_refused(
            data, tmp_path, on_bad, r"t\.parquet: can't be read: No magic bytes.*fetch it again"
        )

    def test_a_parquet_file_with_other_bytes_inside(self, tmp_path, on_bad):
        data = write_table(pa.table({name: range(5000) for name in GOOD}), tmp_path / "t.parquet")
        content = bytearray(data.read_bytes())
        content[100:2000] = b"\x99" * 1900
        data.write_bytes(content)
        self.assert_refused(data, tmp_path, on_bad, r"t\.parquet: can't be read: .*fetch it again")

    def test_content_of_no_format(self, tmp_path, on_bad):
        (tmp_path / "t.orc").write_text("x")
        said = r"t\.orc: its content shows no format: name it with --format csv"
        self.assert_refused(tmp_path / "t.orc", tmp_path, on_bad, said, error=ConfigError)

    def test_a_header_that_names_a_column_twice(self, tmp_path, on_bad):
        (tmp_path / "t.csv").write_text("user,ts,ts\n1,2,3\n")
        self.assert_refused(
            tmp_path / "t.csv", tmp_path, on_bad, r"t\.csv:1: the first line names 'ts' twice"
        )

    def test_a_task_that_no_column_is(self, tmp_path, on_bad):
        data = write_table(pa.Table.from_pylist([GOOD]), tmp_path / "t.parquet")
        said = r"t\.parquet: no column 'uid' in the table; it has user, ts, click, price"
        self.assert_refused(data, tmp_path, on_bad, said, TableSpec("uid"), ConfigError)

    def test_nothing_but_bad_rows(self, tmp_path, on_bad):
        data = write_table(pa.Table.from_pylist([{**GOOD, "price": 500}] * 3), tmp_path / "t.parquet")
        said = "out of range" if on_bad == "raise" else "of 0 tasks none is left for train"
        self.assert_refused(data, tmp_path, on_bad, said)


def test_a_file_that_changes_while_it_is_read(tmp_path):
    data = text_file(tmp_path / "t.csv", {}, 0)

    def change(stage, done, total):
        if stage == "sort":
            os.utime(data, ns=(0, 0))

    with pytest.raises(DataError, match=r"t\.csv: t\.csv changed while it was read; start again"):
        prepare(data, tmp_path / "out", spec=SPEC, progress=change)
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_a_key_that_repeats_is_named_with_its_line(tmp_path):
    text = "user,ts,click,price,item\n1,1,1,1,5\n1,2,1,1,6\n2,1,1,1,5\n1,9,1,1,5\n"
    (tmp_path / "t.csv").write_text(text)
    spec = TableSpec("user", time="ts", unique=("item",))
    said = r"t\.csv:5: key given twice in a task: user 1 has another row of item 5, which comes first"
    with pytest.raises(DataError, match=said):
        prepare(tmp_path / "t.csv", tmp_path / "out", spec=spec)
    assert_counted(tmp_path / "t.csv", tmp_path / "out", "key given twice in a task", spec=spec)

"""Types are decided by all values of all files, so that no value is lost, merged or misread."""

import csv
import io
import json

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.preprocess import ColumnSpec, TableSpec
from gmeta.preprocess.plan.column_types import Doubt, decide
from gmeta.preprocess.plan.column_values import numbers
from gmeta.preprocess.source import Reason
from gmeta.preprocess.tables import table_files, type_survey
from gmeta.preprocess.tables.table_source import TableSource
from support.data_files import write_table

CONNECTION = duckdb.connect()
INT, FLOAT, HASH = ("int64", False), ("float32", False), ("int64", True)


def decided(data, spec=None):
    with duckdb.connect() as connection:
        return TableSource([data], spec or TableSpec("user"), connection).spec


def text_file(path, values, name="x"):
    """Write a column of JSON values, beside the task."""
    if path.suffix == ".jsonl":
        lines = [json.dumps({"user": 1, name: value}) for value in values]
    else:
        lines = [f"user,{name}", *(f"1,{'' if value is None else value}" for value in values)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    "name", ["t.csv", pytest.param("t.jsonl", marks=pytest.mark.shown_by("test_what_values_of_text_decide"))]
)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["7", "-8"], {"t.csv": INT, "t.jsonl": HASH}),
        ([123456701.0, 123456702.0, None], INT),
        ([1, 2.5, 1e-3], FLOAT),
        ([True, False], INT),
        (["2014-02-27", "2014-02-30 10:00:00"], INT),
        (["a", "-", "7"], HASH),
        (["007", "7"], HASH),
        (["1e5", "1f5"], HASH),
        ([16777217, 0.5], "fractions such as '0.5' .* and whole numbers that float32 would round such as"),
        ([2**63, 7], HASH),
        ([float(2**53 - 1)], INT),
        ([float(2**53)], "a floating-point number may have rounded"),  # 2^53 + 1 is rounded to it
        (["2014-02-27", 7], r"dates such as '\"?2014-02-27\"?' .* and numbers such as '7'"),
        (["2014-02-27", "noon"], 'dates such as .* and text such as .* dtype = "int64"'),
    ],
)
def test_what_values_of_text_decide(tmp_path, name, values, expected):
    data = text_file(tmp_path / name, values)
    expected = expected[name] if isinstance(expected, dict) else expected
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=rf"{name}: column 'x' holds .*{expected}"):
            decided(data)
    else:
        column = decided(data).columns["x"]
        assert (column.dtype, column.hash) == expected


@pytest.mark.parametrize("column", [None, ColumnSpec(hash=True)], ids=["undecided", "hashed"])
@pytest.mark.parametrize("first", [[["i1"], "i2", "i3"], ["i3", ["i1"], "i2"], ["i2", [[6]]]])
def test_a_list_among_single_values_is_refused_with_one_of_each(tmp_path, column, first):
    data = text_file(tmp_path / "t.jsonl", first)
    spec = None if column is None else TableSpec("user", columns={"x": column})
    with pytest.raises(ConfigError, match=r"holds lists such as .* and single values such as '\"?i\d\"?'"):
        decided(data, spec)


def test_single_values_are_not_shown_by_elements_of_lists(tmp_path):
    lists, single = text_file(tmp_path / "a.jsonl", [[1, 2]]), text_file(tmp_path / "b.csv", [5])
    expected = pytest.raises(ConfigError, match=r"single values such as '5' \(.*b.csv:2")
    with duckdb.connect() as connection, expected:
        assert TableSource([lists, single], TableSpec("user"), connection).spec


@pytest.mark.parametrize("value", [9.0, 9007199254740993.0])
def test_numbers_that_json_rewrites_are_not_hashed(tmp_path, value):
    spec = TableSpec("user", columns={"x": ColumnSpec(hash=True)})
    with pytest.raises(
        ConfigError, match=r"hash = true, and holds numbers with a point .* write ids as text"
    ):
        decided(text_file(tmp_path / "t.jsonl", ["a", value]), spec)


def test_advice_about_text_among_numbers_fits_what_can_be_hashed(tmp_path):
    whole = write_table(pa.table({"user": [1], "x": [9.0]}), tmp_path / "a.parquet")
    text = write_table(pa.table({"user": [1], "x": ["i"]}), tmp_path / "b.parquet")
    expected = pytest.raises(ConfigError, match="text is bad, or write ids as text")
    with duckdb.connect() as connection, expected:
        assert TableSource([whole, text], TableSpec("user"), connection).spec


@pytest.mark.parametrize("missing", ["-", "NULL", "n/a", "NaN", "\\N"])
def test_a_word_for_a_missing_number_makes_no_text(tmp_path, missing):
    assert decided(text_file(tmp_path / "t.csv", [0.5, missing])).columns["x"].dtype == "float32"


def test_what_parquet_files_decide(tmp_path):
    """A floating-point type remains one, unless float32 would merge ids."""
    table = pa.table(
        {
            "user": [1.0, 2.0],
            "price": [5.0, None],
            "id": [123456701.0, 5.0],
            "share": [123456701.0, 0.5],
            "big": pa.array([1, 2**63], pa.uint64()),
            "none": pa.nulls(2),
            "__index_level_0__": [0, 1],
        }
    )
    spec = decided(write_table(table, tmp_path / "t.parquet"))
    assert {name: column.dtype for name, column in spec.columns.items()} == {
        **{"user": "int64", "price": "float32", "id": "int64", "share": "float32", "big": "int64"}
    }
    assert spec.unused == ("none", "__index_level_0__")
    assert [note.split(" holds ")[0].split(":")[0] for note in spec.notes] == [
        "column 'id'",
        "column 'none' has no value",
        "column '__index_level_0__', which pandas made of a column without a name",
    ]
    with pytest.raises(ConfigError, match="'none' has no value: leave it out, or give a default"):
        decided(tmp_path / "t.parquet", TableSpec("user", columns={"none": ColumnSpec()}))
    given_ = TableSpec("user", columns={"none": ColumnSpec(default="unknown")})
    assert decided(tmp_path / "t.parquet", given_).columns["none"].hash


def test_lists_that_are_all_empty_have_the_type_that_their_file_declares(tmp_path):
    kinds = {"ids": pa.int64(), "prices": pa.float32(), "words": pa.string()}
    table = pa.table(
        {"user": [1, 2], **{name: pa.array([[], []], pa.list_(kind)) for name, kind in kinds.items()}}
    )
    path = write_table(table, tmp_path / "t.parquet")
    assert decided(path).unused == tuple(kinds)
    named = decided(path, TableSpec("user", columns={name: ColumnSpec() for name in kinds})).columns
    assert {
        name: (column.dtype, column.is_list, column.hash) for name, column in named.items() if name in kinds
    } == {
        **{"ids": ("int64", True, False), "prices": ("float32", True, False), "words": ("int64", True, True)}
    }


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (["1393545600", "1393804800000"], "seconds such as '1393545600' .*t.csv:2. and milliseconds such as"),
        (["1393545600", "2014-03-02"], r"dates such as '2014-03-02' .*t.csv:3\) and seconds"),
        (["1.5"], "'ts', the time, holds fractions"),
        (["noon"], "'ts', the time, holds text such as 'noon' .*2014-02-27T10:00:00"),
    ],
)
def test_times_in_several_units_are_refused(tmp_path, times, said):
    data = text_file(tmp_path / "t.csv", times, "ts")
    with pytest.raises(ConfigError, match=said):
        decided(data, TableSpec("user", time="ts"))
    # What is outside of its bounds is bad, and so of no unit.
    if times[0] == "1393545600" and len(times[1]) > 10:
        decided(data, TableSpec("user", time="ts", columns={"ts": ColumnSpec(max=1e10)}))


VALUE = st.one_of(
    st.integers(-(2**64), 2**64).map(str),
    st.floats(allow_nan=False).map(repr),
    st.integers(0, 10**9).map(lambda n: f"{n}.0"),
    st.sampled_from(["", "-", "NULL", "nan", "007", "true", "x", "2014-02-30", "1e3", " 5 ", "+7", "1e400"]),
    st.datetimes().map(str),
    st.text(max_size=3),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(VALUE, min_size=1, max_size=5))
def test_a_decided_type_holds_each_value(values):
    """In the type that they decide, values are neither bad nor, if they are numbers, another one's."""
    array = pa.array(values, pa.string())
    probe = type_survey.Probe("x", "feature", ColumnSpec(), "x", type_survey.TEXT)
    with CONNECTION.cursor() as cursor:
        cursor.register("t", pa.table({"x": array}))
        found = type_survey.survey(cursor, "t", [probe])["x"]
    kind = decide(found, "feature")
    if isinstance(kind, Doubt) or pa.types.is_string(kind) or pa.types.is_null(kind):
        return
    whole = not pa.types.is_floating(kind)
    parsed = numbers(array, ColumnSpec(dtype="int64" if whole else "float32", default=-1), hashed=False)
    for reason, rows, expected in (fault for fault in parsed.faults if fault[1].any()):
        large = reason is Reason.OUT_OF_RANGE and not whole
        assert large or "exist" in expected, (reason, [values[row] for row in np.flatnonzero(rows)])


FIELD = st.text('ab,"\n\r 7', max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(FIELD, FIELD), max_size=6), st.sampled_from(["\n", "\r\n"]), st.integers(1, 40))
def test_records_are_counted_as_a_parser_of_csv_does(tmp_path_factory, rows, end, block):
    text = io.StringIO(newline="")
    for row in rows:  # Python before 3.13 quotes a return only if lines end with one
        line = io.StringIO(newline="")
        csv.writer(line, lineterminator="\r\n").writerow(row)
        text.write(line.getvalue().removesuffix("\r\n") + end)
    path = tmp_path_factory.mktemp("count") / "t.csv"
    path.write_bytes(text.getvalue().encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_files, "_BLOCK", block)
        found = table_files.count_csv(path, ",", '"')
    assert found.full == len(rows)


def test_many_columns_and_few_are_surveyed_alike(tmp_path, monkeypatch):
    columns = {f"x{n}": [n, [0.5, "a", "2014-02-28", 7][n % 4]] for n in range(20)}
    rows = [
        ["user", *columns],
        *(["1", *(str(column[row]) for column in columns.values())] for row in (0, 1)),
    ]
    (tmp_path / "t.csv").write_text("\n".join(map(",".join, rows)))
    spec = TableSpec("user", columns={name: ColumnSpec() for n, name in enumerate(columns) if n % 4 != 2})
    few = decided(tmp_path / "t.csv", spec)
    monkeypatch.setattr(type_survey, "_FEW", 3)
    assert decided(tmp_path / "t.csv", spec) == few
    assert few.columns["x1"].hash
    assert few.columns["x0"].dtype == "float32"

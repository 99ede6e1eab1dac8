"""Records become rows: what each type becomes, and what is refused with which words."""

import datetime as dt
import decimal
import hashlib
import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.preprocess.plan.column_values import hash_text
from gmeta.preprocess.plan.normalisation import normalise
from gmeta.preprocess.source import Reason
from gmeta.preprocess.table_spec import ColumnSpec, TableSpec

INT64 = st.integers(-(2**63), 2**63 - 1)


def one(values, kind=None, **column):
    """What becomes of one column: values, and (reason, rows) of each fault."""
    array = pa.array(values, kind)
    spec = TableSpec("task", columns={"task": ColumnSpec(), "x": ColumnSpec(**column)})
    batch = pa.record_batch({"task": pa.array(range(len(array))), "x": array})
    found = normalise(batch, spec.resolve(batch.schema))
    x = found.columns["x"]
    assert found.columns["task"].tolist() == found.rows.tolist()
    return x, [(fault.reason, fault.rows.tolist()) for fault in found.faults]


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([1, -5], pa.int8(), [1, -5]),
        ([2**32 - 1], pa.uint32(), [2**32 - 1]),
        ([2**63 - 1, 2**63, 2**64 - 1], pa.uint64(), [2**63 - 1, -(2**63), -1]),
        ([decimal.Decimal(2**64 - 1), decimal.Decimal(3)], pa.decimal128(20, 0), [-1, 3]),
        ([True, False], pa.bool_(), [1, 0]),
        ([3.0, 1 - 2.0**53], pa.float64(), [3, 1 - 2**53]),
        ([decimal.Decimal("12")], pa.decimal128(5, 0), [12]),
        ([decimal.Decimal(2**62 + 1)], pa.decimal128(38, 0), [2**62 + 1]),
        (["12", "-9223372036854775808", " 7 ", "+8", "5.0", "-6."], pa.string(), [12, -(2**63), 7, 8, 5, -6]),
        (["1970-01-02", "1970-01-01 00:00:01.5", "7"], pa.string(), [864 * 10**8, 1_500_000, 7]),
        (["true", "False", "1"], pa.string(), [1, 0, 1]),
        (["1970-01-01T00:00:02Z"], pa.string(), [2_000_000]),
        ([dt.datetime(1970, 1, 1, 0, 0, 1)], pa.timestamp("ns"), [1_000_000]),
        ([dt.date(1970, 1, 2)], pa.date32(), [86_400_000_000]),
        (pa.array(["5", "6", "5"]).dictionary_encode(), None, [5, 6, 5]),
    ],
)
def test_what_becomes_an_int64(values, kind, expected):
    x, faults = one(values, kind, dtype="int64")
    assert (x.dtype, x.tolist(), faults) == (np.int64, expected, [])


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([0.1], pa.float64(), [np.float32(0.1)]),
        ([0.5], pa.float32(), [0.5]),
        ([0.5], pa.float16(), [0.5]),
        ([7, -1], pa.int64(), [7, -1]),
        ([True], pa.bool_(), [1]),
        (["true", "FALSE", "0.5"], pa.string(), [1, 0, 0.5]),
        (["0.1", "1e3", " .5", "-2"], pa.string(), [np.float32(0.1), 1000, 0.5, -2]),
    ],
)
def test_what_becomes_a_float32(values, kind, expected):
    x, faults = one(np.array(values, np.float16) if kind == pa.float16() else values, kind, dtype="float32")
    assert (x.dtype, x.tolist(), faults) == (np.float32, expected, [])


@given(st.lists(st.one_of(INT64, st.none())))
def test_whole_numbers_are_the_same_from_every_type_that_holds_them(numbers):
    expected = [number for number in numbers if number is not None]
    null = [(Reason.NULL, [place for place, number in enumerate(numbers) if number is None])]
    texts = [None if number is None else str(number) for number in numbers]
    for given_, kind in ((numbers, pa.int64()), (texts, pa.string())):
        x, faults = one(given_, kind, dtype="int64")
        assert (x.tolist(), faults) == (expected, null if len(expected) < len(numbers) else [])


@given(st.lists(st.floats(width=64, allow_nan=False, allow_infinity=False)))
def test_a_double_is_the_same_as_its_text(numbers):
    as_numbers = one(numbers, pa.float64(), dtype="float32")
    as_text = one([repr(number) for number in numbers], pa.string(), dtype="float32")
    assert as_numbers[0].tobytes() == as_text[0].tobytes()
    assert as_numbers[1] == as_text[1]


def test_there_is_one_zero():
    assert one([-0.0, 0.0], pa.float64(), dtype="float32")[0].tobytes() == bytes(8)


@pytest.mark.parametrize(
    ("values", "kind", "column", "reason", "rows"),
    [
        ([1, None], pa.int64(), {}, Reason.NULL, [1]),
        ([1.0, None], pa.float64(), {"dtype": "int64"}, Reason.NULL, [1]),
        ([1.0, np.nan], pa.float64(), {}, Reason.NAN, [1]),
        ([1.0, np.nan], pa.float64(), {"dtype": "int64"}, Reason.NAN, [1]),
        (["1", "nan"], pa.string(), {"dtype": "float32"}, Reason.NAN, [1]),
        (["1", "inf"], pa.string(), {"dtype": "float32"}, Reason.OUT_OF_RANGE, [1]),
        ([1.0, 1e39], pa.float64(), {}, Reason.OUT_OF_RANGE, [1]),
        ([1.0, 1.5], pa.float64(), {"dtype": "int64"}, Reason.NOT_A_NUMBER, [1]),
        ([1.0, 2.0**53 + 2], pa.float64(), {"dtype": "int64"}, Reason.OUT_OF_RANGE, [1]),
        (["1", "one"], pa.string(), {"dtype": "int64"}, Reason.NOT_A_NUMBER, [1]),
        (["1", "3.7"], pa.string(), {"dtype": "int64"}, Reason.NOT_A_NUMBER, [1]),
        (["1", "1970-02-30"], pa.string(), {"dtype": "int64"}, Reason.NOT_A_NUMBER, [1]),
        (["1", "0x10"], pa.string(), {"dtype": "int64"}, Reason.NOT_A_NUMBER, [1]),
        (["0X1", "7"], pa.string(), {"dtype": "int64"}, Reason.NOT_A_NUMBER, [0]),
        (["1", ""], pa.string(), {"dtype": "int64"}, Reason.NULL, [1]),
        (["1", "-"], pa.string(), {"dtype": "float32"}, Reason.NULL, [1]),
        (["1", "9223372036854775808"], pa.string(), {"dtype": "int64"}, Reason.OUT_OF_RANGE, [1]),
        (["1", "1_0"], pa.string(), {"dtype": "float32"}, Reason.NOT_A_NUMBER, [1]),
        ([decimal.Decimal("1.5")], pa.decimal128(5, 1), {"dtype": "int64"}, Reason.NOT_A_NUMBER, [0]),
        ([1, 7], pa.int64(), {"max": 5}, Reason.OUT_OF_RANGE, [1]),
        ([1, -7], pa.int64(), {"min": 0}, Reason.OUT_OF_RANGE, [1]),
        ([0.5, 1.5], pa.float64(), {"min": 0, "max": 1}, Reason.OUT_OF_RANGE, [1]),
        ([{"a": 1}], pa.struct({"a": pa.int64()}), {"dtype": "int64"}, Reason.WRONG_TYPE, [0]),
        ([[1]], pa.list_(pa.int64()), {"dtype": "float32", "is_list": False}, Reason.WRONG_TYPE, [0]),
        ([1], pa.int64(), {"is_list": True}, Reason.WRONG_TYPE, [0]),
        ([1.5], pa.float64(), {"hash": True}, Reason.WRONG_TYPE, [0]),
        ([[1], [2, None]], pa.list_(pa.int64()), {}, Reason.NULL, [1]),
        ([[1], [2, 9, 9]], pa.list_(pa.int64()), {"max": 5}, Reason.OUT_OF_RANGE, [1]),
        (["1|2", "3|x"], pa.string(), {"dtype": "int64", "is_list": True}, Reason.NOT_A_NUMBER, [1]),
    ],
)
def test_what_is_refused(values, kind, column, reason, rows):
    x, faults = one(values, kind, **column)
    assert faults == [(reason, rows)]
    assert (len(x[1]) - 1 if isinstance(x, tuple) else len(x)) == len(values) - len(rows)


def test_a_fault_says_what_was_expected_and_received():
    batch = pa.record_batch({"user": [1, 2], "clicks": ["5", "many"]})
    spec = TableSpec("user", columns={"n": ColumnSpec("clicks", "int64", max=9)}).resolve(batch.schema)
    (fault,) = normalise(batch, spec).faults
    assert fault.describe(1) == "clicks must be a whole number, got 'many'"


def test_uint64_are_ids_but_no_times_and_no_labels():
    values = pa.array([1, 2**63], pa.uint64())
    batch = pa.record_batch({"user": values, "at": values})
    spec = TableSpec("user", time="at", columns={"at": ColumnSpec(dtype="int64")}).resolve(batch.schema)
    found = normalise(batch, spec)
    assert [(each.reason, each.rows.tolist()) for each in found.faults] == [(Reason.OUT_OF_RANGE, [1])]
    assert "at must be an int64" in found.faults[0].message


def test_a_record_is_counted_once_however_much_is_wrong_with_it():
    batch = pa.record_batch({"a": pa.array([None, 1]), "b": pa.array([None, None], pa.int64())})
    found = normalise(batch, TableSpec("a", columns={"b": ColumnSpec()}).resolve(batch.schema))
    assert [(fault.reason, fault.rows.tolist()) for fault in found.faults] == [
        (Reason.NULL, [0]),
        (Reason.NULL, [1]),
    ]


@pytest.mark.parametrize(
    ("values", "kind", "column", "expected"),
    [
        ([1, None], pa.int64(), {}, [1, 9]),
        ([1.0, None, np.nan], pa.float64(), {}, [1, 9, 9]),
        ([1.0, None, np.nan], pa.float64(), {"dtype": "int64"}, [1, 9, 9]),
        (["1", None, "nan"], pa.string(), {"dtype": "float32"}, [1, 9, 9]),
        ([None, None], pa.null(), {}, [9, 9]),
    ],
)
def test_a_default_takes_the_place_of_null_and_nan(values, kind, column, expected):
    x, faults = one(values, kind, default=9, **column)
    assert (x.tolist(), faults) == (expected, [])


def test_a_column_that_is_missing():
    spec = TableSpec("a", columns={"b": ColumnSpec()}).resolve(pa.schema({"a": pa.int64(), "b": pa.int64()}))
    found = normalise(pa.record_batch({"a": [1, 2]}), spec)
    assert [(fault.reason, fault.rows.tolist()) for fault in found.faults] == [
        (Reason.MISSING_COLUMN, [0, 1])
    ]
    assert found.faults[0].describe(0) == "there is no column 'b'"
    schema = pa.schema({"a": pa.int64(), "b": pa.int64(), "c": pa.list_(pa.int64())})
    spec = TableSpec("a", columns={"b": ColumnSpec(default=4), "c": ColumnSpec()}).resolve(schema)
    found = normalise(pa.record_batch({"a": [1, 2]}), spec)
    assert found.columns["b"].tolist() == [4, 4]
    assert found.columns["c"][1].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([[1, 2], [], None, [3]]), [[1, 2], [], [], [3]]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)), [[1, 2], [3, 4]]),
        (pa.array([[0], [1, 2], [5]]).slice(1), [[1, 2], [5]]),
        (pa.array(["1|2", "", None, "3"]), [[1, 2], [], [], [3]]),
        (pa.array([None, None]), [[], []]),
    ],
)
def test_lists(array, expected):
    (values, splits), faults = one(array, None, is_list=True, dtype="int64")
    assert faults == []
    assert [values[a:b].tolist() for a, b in itertools.pairwise(splits)] == expected


@given(st.text())
def test_the_hash_is_half_of_md5(text):
    assert hash_text(text) % 2**64 == int.from_bytes(hashlib.md5(text.encode()).digest()[8:], "little")


def test_ids_of_text_are_hashed_alone_in_lists_and_by_the_engine():
    assert one(["abc", "abc", "d"], hash=True)[0].tolist() == [hash_text("abc")] * 2 + [hash_text("d")]
    assert one([7, -7], hash=True)[0].tolist() == [hash_text("7"), hash_text("-7")]
    assert one([["x", "y"], None], hash=True)[0][0].tolist() == [hash_text("x"), hash_text("y")]
    batch = pa.record_batch({"u": pa.array([hash_text("abc") % 2**64], pa.uint64())})
    spec = TableSpec("u", columns={"u": ColumnSpec(hash=True)}).resolve(pa.schema({"u": pa.string()}))
    assert normalise(batch, spec, hashed={"u"}).columns["u"].tolist() == [hash_text("abc")]

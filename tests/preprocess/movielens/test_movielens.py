"""The files of MovieLens: layouts, attributes, and joining them to ratings."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import DataError
from gmeta.preprocess.movielens.movielens_folder import ML_1M, ML_100K, detect, open_folder
from gmeta.preprocess.movielens.movielens_records import (
    GENRES,
    AttributeTable,
    area,
    item_row_1m,
    item_row_100k,
    user_row_1m,
    user_row_100k,
)
from gmeta.preprocess.movielens.movielens_source import map_rating
from gmeta.preprocess.source import BadRecord, BadRecords, Reason, gather_ragged
from gmeta.testing import ITEMS, USERS, as_1m, small_100k


def flags(*genres):
    return [b"1" if index in genres else b"0" for index in range(len(GENRES))]


@pytest.mark.parametrize(
    ("age", "bucket"),
    [
        (b"7", 0),
        (b"17", 0),
        (b"18", 1),
        (b"24", 1),
        (b"25", 2),
        (b"35", 3),
        (b"45", 4),
        (b"50", 5),
        (b"55", 5),
        (b"56", 6),
    ],
)
def test_user_of_100k(age, bucket):
    assert user_row_100k([b"1", age, b"M", b"writer", b"T8H1N"], {b"artist": 0, b"writer": 1}) == (
        1,
        bucket,
        1,
        29,
    )


@pytest.mark.parametrize(("group", "bucket"), [(b"1", 0), (b"18", 1), (b"56", 6)])
def test_user_of_1m(group, bucket):
    assert user_row_1m([b"1", b"F", group, b"10", b"48067"]) == (0, bucket, 10, 4)


def test_item_of_100k():
    line = [b"543", b"Mis\xe9rables, Les (1995)", b"01-Jan-1995", b"", b"http://x", *flags(8, 12)]
    assert item_row_100k(line) == (1995, (8, 12))


def test_item_of_100k_without_a_date():
    assert item_row_100k([b"267", b"unknown", b"", b"", b"", *flags(0)]) == (0, (0,))


def test_item_of_1m_in_either_encoding():
    assert item_row_1m([b"1", b"Toy Story (1995)", b"Animation|Children's|Comedy"]) == (1995, (3, 4, 5))
    assert item_row_1m([b"2", "Les Misérables (1995)".encode(), b"Drama"]) == (1995, (8,))
    assert item_row_1m([b"3", "Les Misérables (1934) (1995)".encode("latin-1"), b""]) == (1995, (0,))
    assert item_row_1m([b"4", b"untitled", b"War"]) == (0, (17,))


@pytest.mark.parametrize(
    ("parse", "fields", "reason"),
    [
        (
            lambda f: user_row_100k(f, {b"writer": 0}),
            [b"1", b"x", b"M", b"writer", b"1"],
            Reason.NOT_A_NUMBER,
        ),
        (
            lambda f: user_row_100k(f, {b"writer": 0}),
            [b"1", b"20", b"X", b"writer", b"1"],
            Reason.UNKNOWN_CODE,
        ),
        (
            lambda f: user_row_100k(f, {b"writer": 0}),
            [b"1", b"20", b"M", b"baker", b"1"],
            Reason.UNKNOWN_CODE,
        ),
        (user_row_1m, [b"1", b"F", b"18", b"21", b"48067"], Reason.UNKNOWN_CODE),
        (item_row_100k, [b"1", b"t", b"1995", b"", b"", *flags(1)], Reason.NOT_A_NUMBER),
        (item_row_100k, [b"1", b"t", b"", b"", b"", *flags(1)[1:], b"2"], Reason.UNKNOWN_CODE),
        (item_row_1m, [b"1", b"t (1995)", b"Drama|Soap"], Reason.UNKNOWN_CODE),
    ],
)
def test_attributes_that_are_refused(parse, fields, reason):
    with pytest.raises(BadRecord) as caught:
        parse(fields)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("code", "number"),
    [(b"05201", 0), (b"94043", 9), (b"V3N4P", 31), (b"v3n4p", 31), (b"", 36), (b"-1", 36), (b"\xe9", 36)],
)
def test_area(code, number):
    assert area(code) == number


@given(
    lists=st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=8),
    data=st.data(),
)
def test_gather_ragged(lists, data):
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=12))
    values = np.array([value for row in lists for value in row], np.int64)
    splits = np.cumsum([0, *map(len, lists)])
    got, got_splits = gather_ragged((values, splits), np.array(rows, np.int64))
    assert [got[a:b].tolist() for a, b in itertools.pairwise(got_splits)] == [lists[row] for row in rows]


def test_a_table_joins_by_id_whatever_the_order_of_its_lines():
    rows = {30: (3, (1, 2)), 10: (1, ()), 20: (2, (9,))}
    table = AttributeTable.build(("size", "tags"), rows, {30: 1, 10: 2, 20: 3})
    joined = table.take(np.array([20, 30, 20, 10]))
    assert joined["size"].tolist() == [2, 3, 2, 1]
    assert [part.tolist() for part in joined["tags"]] == [[9, 1, 2, 9], [0, 1, 3, 4, 4]]


def test_layouts_are_told_apart_by_the_ratings_file(tmp_path):
    small = small_100k(tmp_path / "small")
    assert detect(small) is ML_100K
    assert detect(as_1m(small, tmp_path / "1m")) is ML_1M


def test_both_layouts_give_the_same_tables(tmp_path):
    small = small_100k(tmp_path / "small")
    ours, theirs = open_folder(small, BadRecords()), open_folder(as_1m(small, tmp_path / "1m"), BadRecords())
    for ids, a, b in ((USERS, ours.users, theirs.users), (ITEMS, ours.items, theirs.items)):
        every = np.arange(1, ids + 1)
        np.testing.assert_array_equal(a.ids, every)
        for name, column in a.take(every).items():
            other = b.take(every)[name]
            for x, y in zip(column, other, strict=True) if isinstance(column, tuple) else [(column, other)]:
                np.testing.assert_array_equal(x, y, err_msg=name)


def test_a_folder_of_another_kind(tmp_path):
    (tmp_path / "ratings.csv").write_text("userId,movieId\n")
    with pytest.raises(DataError, match=r"looked for u\.data .* or ratings\.dat .*, found ratings\.csv$"):
        detect(tmp_path)


def test_the_folder_above_the_right_one(tmp_path):
    small_100k(tmp_path / "inside")
    with pytest.raises(DataError, match=r"did you mean .*inside\?"):
        detect(tmp_path)


def test_a_folder_of_both_kinds(tmp_path):
    as_1m(small_100k(tmp_path), tmp_path)
    with pytest.raises(DataError, match="holds both"):
        detect(tmp_path)


@pytest.mark.parametrize(("name", "words"), [("nowhere", "No such file"), ("file", "Not a directory")])
def test_no_folder(tmp_path, name, words):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=words):
        detect(tmp_path / name)


@pytest.mark.parametrize("name", ["u.item", "u.user", "u.occupation"])
def test_a_missing_file(tmp_path, name):
    small_100k(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: can't read it: No such file"):
        open_folder(tmp_path, BadRecords("skip"))


@pytest.mark.parametrize("name", ["u.data", "u.item", "u.user", "u.occupation"])
def test_an_empty_file(tmp_path, name):
    small_100k(tmp_path)
    (tmp_path / name).write_bytes(b"\n\n")
    with pytest.raises(DataError, match=rf"{name}: the file is empty"):
        open_folder(tmp_path, BadRecords("skip"))


IDS = range(1, 10)


@pytest.mark.parametrize(
    ("form", "line"), [(ML_100K.ratings, b"2\t7\t4\t881250949"), (ML_1M.ratings, b"2::7::4::881250949")]
)
def test_map_reads_both_forms(form, line):
    assert map_rating(line, form, IDS, IDS) == (2, 7, 4.0, 881250949)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"2\t7\t4", Reason.MISSING_FIELD),
        (b"2\t7\t4\t5\t6", Reason.EXTRA_FIELD),
        (b"2\t7\tgood\t5", Reason.NOT_A_NUMBER),
        (b"2\t7\tnan\t5", Reason.NOT_A_NUMBER),
        (b"2\t7\t\t5", Reason.NOT_A_NUMBER),
        (b"2\t7\t4_0\t5", Reason.NOT_A_NUMBER),
        (b"2\t7\t1e99\t5", Reason.OUT_OF_RANGE),
        (b"2\t7\t0\t5", Reason.OUT_OF_RANGE),
        (b"2\t7\t5.5\t5", Reason.OUT_OF_RANGE),
        (b"2\t7\t-3\t5", Reason.OUT_OF_RANGE),
        (b"2\t7\t4\t-5", Reason.NOT_A_NUMBER),
        (b"2\t7\t4\t9999999999999999999", Reason.OUT_OF_RANGE),
        (b"2\t7\t4\t\xb2", Reason.NOT_A_NUMBER),
        (b"+2\t7\t4\t5", Reason.NOT_A_NUMBER),
        (b"\xff\xfe2\t7\t4\t5", Reason.NOT_A_NUMBER),
        (b"77\t7\t4\t5", Reason.UNKNOWN_USER),
        (b"2\t77\t4\t5", Reason.UNKNOWN_ITEM),
    ],
)
def test_map_refuses(line, reason):
    with pytest.raises(BadRecord) as caught:
        map_rating(line, ML_100K.ratings, IDS, IDS)
    assert caught.value.reason is reason
    assert str(caught.value)


@pytest.mark.parametrize(("text", "stars"), [(b"0.5", 0.5), (b"3.5", 3.5), (b"5", 5.0), (b"4.0", 4.0)])
def test_map_takes_half_stars(text, stars):
    assert map_rating(b"2\t7\t" + text + b"\t5", ML_100K.ratings, IDS, IDS).rating == stars

"""Files of public data sets are read as they are, whatever their ending."""

import json

import pytest

from gmeta.core.errors import ConfigError, DataError
from gmeta.preprocess import ColumnSpec, TableSpec, prepare
from gmeta.preprocess.plan.normalisation import hash_text
from gmeta.preprocess.table_spec import CsvForm
from support.data_files import read_split

ROWS = [{"u": 1, "i": 5, "y": 1.0}, {"u": 1, "i": 6, "y": 0.0}, {"u": 2, "i": 7, "y": 1.0}]
PLAIN = TableSpec("u", label="y")
HEADLESS = TableSpec("u", label="y", csv=CsvForm(header=False, names=("u", "i", "y")))
TYPED = "u:token,i:token,y:float"
LINES = [json.dumps(row) for row in ROWS]
MOVIELENS = [
    {"user_id": 1, "item_id": 5, "rating": 4.0, "timestamp": 97},
    {"user_id": 2, "item_id": 6, "rating": 3.0, "timestamp": 98},
]
PAIRS = [
    {"user_id": 0, "item_id": 7, "position": 0},
    {"user_id": 0, "item_id": 8, "position": 1},
    {"user_id": 1, "item_id": 7, "position": 2},
]


def written(delimiter, header="u,i,y"):
    return "\n".join([header, "1,5,1", "1,6,0", "2,7,1", ""]).replace(",", delimiter)


@pytest.mark.parametrize(
    ("name", "text", "spec", "right"),
    [
        ("a.dat", written(","), PLAIN, ROWS),
        ("a.txt", written("\t"), PLAIN, ROWS),
        ("a.data", written(";"), PLAIN, ROWS),
        ("a.csv", written(";"), PLAIN, ROWS),
        ("a.csv", written("|"), PLAIN, ROWS),
        ("a.log", written("::"), PLAIN, ROWS),
        ("a", written("::").partition("\n")[2], HEADLESS, ROWS),
        ("a.csv", written(" "), TableSpec("u", label="y", csv=CsvForm(delimiter=" ")), ROWS),
        ("a.inter", written("\t", TYPED), PLAIN, ROWS),
        ("a.csv", written(",", TYPED), PLAIN, ROWS),
        ("a.json", "\n".join(LINES), PLAIN, ROWS),
        ("a.json", f" [{', '.join(LINES)}] ", PLAIN, ROWS),
        ("a.txt", json.dumps(ROWS, indent=2), PLAIN, ROWS),
        ("a.json", "\n".join(map(repr, ROWS)), PLAIN, ROWS),
        ("a.dat", "\n".join(LINES), PLAIN, ROWS),
        ("u.data", "1\t5\t4\t97\n2\t6\t3\t98\n", TableSpec("user_id", label="rating"), MOVIELENS),
        ("ratings.dat", "1::5::4::97\n2::6::3::98\n", TableSpec("user_id", label="rating"), MOVIELENS),
        ("train.txt", "0 7 8\n1 7\n2\n", TableSpec("user_id"), PAIRS),
    ],
)
def test_the_content_decides_the_format(tmp_path, name, text, spec, right):
    (tmp_path / name).write_text(text)
    prepare(tmp_path / name, tmp_path / "out", spec=spec)
    kept = [{key: row[key][0] for key in right[0]} for row in read_split(tmp_path / "out", "train")]
    assert sorted(kept, key=str) == sorted(right, key=str)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "cp1252"])
def test_text_of_other_encodings_has_the_same_hashes(tmp_path, encoding):
    (tmp_path / "a.csv").write_text("u;city\n1;São Paulo\n", encoding=encoding)
    form = CsvForm(encoding=None if encoding == "utf-16" else encoding)
    prepare(tmp_path / "a.csv", tmp_path / "out", spec=TableSpec("u", csv=form))
    assert read_split(tmp_path / "out", "train")[0]["city"] == [hash_text("São Paulo")]


def test_a_backslash_before_a_quote_within_a_field_escapes_it(tmp_path):
    (tmp_path / "a.csv").write_text('"u","t"\n"1","The \\"best\\" one, \\\\ so"\n')
    spec = TableSpec("u", columns={"t": ColumnSpec(hash=True)})
    prepare(tmp_path / "a.csv", tmp_path / "out", spec=spec)
    assert read_split(tmp_path / "out", "train")[0]["t"] == [hash_text('The "best" one, \\ so')]


def test_bad_records_of_translated_files_have_their_lines(tmp_path):
    (tmp_path / "a.log").write_text("u::y\n1::1\n2::x\n")
    with pytest.raises(DataError, match=r"a\.log:3: not a number: y must be a number, got 'x'"):
        prepare(
            tmp_path / "a.log",
            tmp_path / "out",
            spec=TableSpec("u", columns={"y": ColumnSpec(dtype="float32")}),
        )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.dat", "1,2\n3,4\n", "its first line holds numbers and no names.*--no-header --columns"),
        ("a.txt", "one word\n", "name it by --format or --delimiter"),
        ("a.txt", "a,b\nc\nd,e,f\ng;h\n", "different numbers of fields by any delimiter.*--delimiter"),
        ("a.json", '[{"u": 1}, {"u"', "ends early, or its value 2 is malformed"),
    ],
)
def test_what_is_ambiguous_is_refused_by_the_flag_that_settles_it(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises((ConfigError, DataError), match=said):
        prepare(tmp_path / name, tmp_path / "out", spec=TableSpec("u"))


@pytest.mark.parametrize(
    ("ending", "names", "separator"),
    [
        ("csv", [["userId", "movieId", "rating", "timestamp"], ["movieId", "title", "genres"]], ","),
        ("dat", [], "::"),
    ],
)
def test_large_editions_of_movielens_are_read_with_their_films(tmp_path, ending, names, separator):
    ratings = [["1", "5", "4.5", "97"], ["2", "6", "3", "98"]]
    movies = [["5", "A (1999)", "Drama|War"], ["6", "B (2001)", "(no genres listed)"]]
    for name, rows, own in zip(("ratings", "movies"), (ratings, movies), names or ([], []), strict=True):
        lines = [separator.join(row) for row in ([own] if own else []) + rows]
        (tmp_path / f"{name}.{ending}").write_text("\n".join(lines) + "\n")
    prepare(tmp_path, tmp_path / "out")
    rows = sorted(read_split(tmp_path / "out", "train"), key=lambda row: row["rating"])
    assert rows[1]["genres"] == [hash_text("Drama"), hash_text("War")]
    assert rows[1]["title"] == [hash_text("A (1999)")]
    assert [row["rating"] for row in rows] == [[3.0], [4.5]]

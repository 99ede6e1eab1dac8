"""The texts behind hashes, and titles: what is kept of them by each engine, and what of damaged files."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.core.data_manifest import Manifest, Texts, texts_file
from gmeta.core.errors import ConfigError, DataError
from gmeta.preprocess import ColumnSpec, PrepareConfig, SyntheticConfig, TableSpec, prepare
from gmeta.preprocess.cluster.table_job import TableJob
from gmeta.preprocess.plan.column_values import hash_text
from gmeta.preprocess.plan.normalisation import Normalised
from gmeta.preprocess.plan.texts import TextCollector, find_titles
from support.cluster_jobs import run_jobs
from support.data_files import write_table

ODD = ["plain", 'a "quoted" one', "comma, semicolon;", "ünï çødé 漢字 🎬", " spaces ", "007", "NULL", "<b>"]
TAGS = [["x", "ü y"], [], ["x"], ["z"]]
SPEC = TableSpec(
    "user",
    time="ts",
    columns={
        "user": ColumnSpec(hash=True, default="nobody"),
        "item": ColumnSpec(hash=True),
        "city": ColumnSpec(hash=True, gaps=True),
        "tags": ColumnSpec(hash=True, is_list=True),
    },
)


def table() -> pa.Table:
    rows = len(ODD)
    return pa.table(
        {
            "user": ["ann", None, "bob", "ann"] * (rows // 4),
            "ts": np.arange(rows),
            "item": ODD,
            "city": ["Bern", None, "Ulm", "Bern"] * (rows // 4),
            "tags": pa.array([TAGS[n % 4] for n in range(rows)], pa.list_(pa.string())),
        }
    )


def texts_of(folder: Path, column: str) -> dict[int, str]:
    found = Texts.of(folder).table(column)
    assert found["value"].to_pylist() == sorted(found["value"].to_pylist())
    return dict(zip(found["value"].to_pylist(), found["text"].to_pylist(), strict=True))


def hashes(*texts: str) -> dict[int, str]:
    return {hash_text(text): text for text in texts}


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_each_hash_comes_back_as_its_text(tmp_path, name):
    path = write_table(table(), tmp_path / name)
    prepare(path, tmp_path / "out", spec=SPEC)
    assert texts_of(tmp_path / "out", "user") == hashes("ann", "bob", "nobody")
    assert texts_of(tmp_path / "out", "item") == hashes(*ODD)
    assert texts_of(tmp_path / "out", "city") == hashes("Bern", "Ulm", "")
    assert texts_of(tmp_path / "out", "tags") == hashes("x", "ü y", "z")
    if name != "t.parquet":
        job = TableJob.of_files([path], tmp_path / "streamed", SPEC, PrepareConfig(), "raise", ranges=2)
        run_jobs(job, tmp_path / "job", pieces=3)
        for column in SPEC.columns:
            own, other = (tmp_path / folder / texts_file(column) for folder in ("out", "streamed"))
            assert own.read_bytes() == other.read_bytes()
        assert Manifest.load(tmp_path / "out") == Manifest.load(tmp_path / "streamed")


def test_names_are_texts_or_digits_and_bad_records_leave_none(tmp_path):
    (tmp_path / "t.csv").write_text("user,n,item\nann,1,a\nbob,x,b\nann,2,c\nann,2,c\n")
    spec = TableSpec("user", columns={"n": ColumnSpec(dtype="int64"), "item": ColumnSpec(hash=True)})
    prepare(tmp_path / "t.csv", tmp_path / "out", on_bad="skip", spec=spec)
    texts = Texts.of(tmp_path / "out")
    assert texts.name("item", [hash_text("c"), 5, hash_text("b")]) == ["c", "5", str(hash_text("b"))]
    assert texts.name("n", [1]) == ["1"]
    assert texts.name("item", []) == []
    assert texts.kinds("n") == []


@pytest.mark.parametrize("parts", [1, 3])
def test_of_two_texts_with_one_hash_the_first_in_order_is_kept_and_counted(tmp_path, parts):
    """As real collisions are too rare, the values are given."""
    spec = TableSpec(
        "user", columns={"user": ColumnSpec(source="user", dtype="int64", hash=True, is_list=False)}
    )
    batch = pa.record_batch({"user": ["b", "a", "c", "b"]})
    found = Normalised({"user": np.array([7, 7, 9, 7])}, np.arange(4), ())
    whole = TextCollector(spec)
    for number in range(parts):
        part = TextCollector(spec)
        part.add(
            batch.slice(number),
            Normalised({"user": found.columns["user"][number:]}, np.arange(4 - number), ()),
        )
        part.save(tmp_path / "parts")
    whole.load(tmp_path / "parts")
    assert whole.write(tmp_path) == [
        "1 hashes in user stand for several texts each, of which the first in order is kept"
    ]
    assert pq.read_table(tmp_path / texts_file("user")).to_pydict() == {"value": [7, 9], "text": ["a", "c"]}


def test_a_column_with_more_than_the_limit_is_left_out_and_named(tmp_path):
    path = write_table(table(), tmp_path / "t.csv")
    size = sum(len(text.encode()) + 8 for text in ODD)
    for limit, kept in ((size, True), (size - 1, False)):
        spec = replace(SPEC, texts_limit=limit)
        summary = prepare(path, tmp_path / f"out{limit}", spec=spec)
        assert ("item" in Manifest.load(tmp_path / f"out{limit}").texts) == kept
        said = [note for note in summary.notes if note.startswith(f"item has more than {limit:,} bytes")]
        assert len(said) == (not kept)
        assert "user" in Manifest.load(tmp_path / f"out{limit}").texts
        job = TableJob.of_files([path], tmp_path / f"s{limit}", spec, PrepareConfig(), "raise", ranges=2)
        run_jobs(job, tmp_path / f"job{limit}")
        assert Manifest.load(tmp_path / f"s{limit}") == Manifest.load(tmp_path / f"out{limit}")


def gmeta(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def test_options_and_the_key_of_a_spec(tmp_path):
    path = write_table(table().drop_columns(["tags"]), tmp_path / "t.csv")
    given = ["prepare", "--data", path, "--out", tmp_path / "out", "--task", "user", "--default", "own"]
    given += ["--default", "user=nobody"]
    gmeta(*given)
    assert (tmp_path / "out" / "texts").is_dir()
    assert "texts_limit" in gmeta(*given, "--no-texts", code=2)  # the data set there has texts
    gmeta(*given, "--no-texts", "--overwrite")
    assert not (tmp_path / "out" / "texts").exists()
    assert not Manifest.load(tmp_path / "out").texts
    assert "item has more than 20 bytes" in gmeta(*given, "--texts-limit", "20B", "--overwrite")
    (tmp_path / "s.toml").write_text('texts_limit = "1KB"\ntask = "user"\n')
    assert TableSpec.load(tmp_path / "s.toml").texts_limit == 1000
    (tmp_path / "s.toml").write_text("texts_limit = 0\n")
    gmeta(*given, "--spec", tmp_path / "s.toml", "--overwrite")
    assert not (tmp_path / "out" / "texts").exists()
    gmeta(*given, "--spec", tmp_path / "s.toml", "--overwrite", "--texts")
    assert (tmp_path / "out" / "texts").exists()
    assert "leave one out" in gmeta(*given, "--no-texts", "--texts-limit", "1MB", code=2)
    assert "texts_limit must be a size" in gmeta(*given, "--texts-limit", "many", code=2)
    assert "write it as COLUMN=TITLE" in gmeta(*given, "--title", "item", code=2)


def test_damaged_missing_and_foreign_files_are_named(tmp_path):
    path = write_table(table(), tmp_path / "t.csv")
    prepare(path, tmp_path / "out", spec=SPEC)
    file = tmp_path / "out" / texts_file("item")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert Texts.of(tmp_path / "out").name("city", [hash_text("Ulm")]) == ["Ulm"]
    with pytest.raises(DataError, match=r"item\.parquet: damaged: its digest isn't that of the manifest"):
        Texts.of(tmp_path / "out").name("item", [1])
    assert "item.parquet: damaged" in gmeta("inspect", tmp_path / "out", "--verify", code=2)
    file.write_bytes(content[:-1])
    with pytest.raises(DataError, match="the manifest says"):
        Manifest.load(tmp_path / "out")
    file.unlink()
    with pytest.raises(DataError, match="this file of texts, but it is missing"):
        Manifest.load(tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    manifest["texts"]["item"]["name"] = "../item.parquet"
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="must be a path inside the folder"):
        Manifest.load(tmp_path / "out")


MOVIES = 'movieId,title,genres\n1,"Toy ""Story"" (1995)",a|b\n2,Héat (1995),b\n3,Heat (1995),\n'
RATINGS = "userId,movieId,rating,timestamp\n" + "".join(
    f"{u},{m},4,{u + m}\n" for u in (1, 2) for m in (1, 2, 3)
)


def test_a_side_table_names_the_items(tmp_path):
    (tmp_path / "ratings.csv").write_text(RATINGS)
    (tmp_path / "movies.csv").write_text(MOVIES)
    summary = prepare(tmp_path, tmp_path / "out")
    assert "'title' is taken to name movieId in reports" in summary.notes
    texts = Texts.of(tmp_path / "out")
    assert texts.name("movieId", [2, 1, 4]) == ["Héat (1995)", 'Toy "Story" (1995)', "4"]
    assert texts.kinds("movieId") == ["title"]
    said = gmeta("inspect", tmp_path / "out")
    assert "column movieId: int64, 1 to 3\n  texts of 3 values:\n    1  'Toy \"Story\" (1995)'" in said
    assert "column rating: float32, label, 4 to 4" in said
    found = json.loads(gmeta("inspect", tmp_path / "out", "--json"))
    assert found["columns"][0]["roles"] == ["task"]
    assert "texts of" not in gmeta("inspect", tmp_path / "out", "--top", 0)


@pytest.mark.parametrize("given", [None, {"item": "name"}])
def test_titles_that_differ_for_an_item(tmp_path, given):
    """A column that only its name makes a title isn't one then; a title that was named has one of them."""
    path = tmp_path / "t.csv"
    path.write_text("user,item,item_name,name\n1,a,A,X\n1,b,B,Y\n2,a,Z,W\n")
    summary = prepare(path, tmp_path / "out", spec=TableSpec("user", titles=given))
    names = Texts.of(tmp_path / "out").name("item", [hash_text("a"), hash_text("b")])
    assert names == (["a", "b"] if given is None else ["W", "Y"])
    said = "1 values of item have several titles in 'name', of which the first in order is kept"
    assert (said in summary.notes) == (given is not None)


def test_titles_of_columns_that_are_not_there_or_not_stored(tmp_path):
    path = write_table(table(), tmp_path / "t.csv")
    for titles in ({"item": "nothing"}, {"nothing": "item"}, {"tags": "item"}):
        with pytest.raises(ConfigError, match="name a stored column of ids, and a column of the table"):
            prepare(path, tmp_path / "out", spec=replace(SPEC, titles=titles))
    spec = TableSpec("user", columns={"user": ColumnSpec(hash=True, default="")}, titles={"user": "city"})
    prepare(path, tmp_path / "out", spec=spec)
    assert Texts.of(tmp_path / "out").name("user", [hash_text("bob")]) == ["Ulm"]
    assert [column.name for column in Manifest.load(tmp_path / "out").schema] == ["user", "batch_id"]
    with pytest.raises(ConfigError, match="read only columns that are stored"):
        TableJob.of_files([path], tmp_path / "s", spec, PrepareConfig(), "raise")


def test_titles_are_found_by_names():
    text, number = (
        ColumnSpec(dtype="int64", hash=True, is_list=False),
        ColumnSpec(dtype="int64", is_list=False),
    )
    columns = {"user": text, "book_id": number, "Book-Title": text, "title": text, "surname": text}
    spec = TableSpec("user", columns=columns)
    assert find_titles(spec) == {"book_id": "Book-Title"}
    assert find_titles(spec, [("user", ("user", "surname")), ("book_id", ("title", "x"))]) == {
        "book_id": "title",
        "user": "surname",
    }
    side = [("book_id", ("subtitle", "name", "x_title"))]
    columns |= {"subtitle": text, "x_title": text, "name": text, "movieId": number}
    assert find_titles(replace(spec, columns=columns), side)["book_id"] == "name"
    assert find_titles(replace(spec, columns=columns)) == {
        "book_id": "Book-Title",
        "movieId": "title",
    }


def test_movielens_has_titles(tmp_path):
    prepare(SyntheticConfig(users=20, items=40), tmp_path / "out")
    assert Texts.of(tmp_path / "out").name("item", [1])[0].startswith("Synthetic film 1")
    prepare(SyntheticConfig(users=20, items=40), tmp_path / "none", spec=TableSpec(texts_limit=0))
    assert not Manifest.load(tmp_path / "none").texts


def test_a_history_is_shown_with_the_texts_of_a_data_set(tmp_path):
    (tmp_path / "t.csv").write_text("user,ts,item\nann,1,tea\nann,2,Käse\nbob,1,tea\n")
    gmeta(
        "history",
        "append",
        tmp_path / "store",
        "--data",
        tmp_path / "t.csv",
        "--user",
        "user",
        "--time",
        "ts",
    )
    gmeta(
        "prepare", "--data", tmp_path / "t.csv", "--task", "user", "--time", "ts", "--out", tmp_path / "out"
    )
    plain = gmeta("history", "show", tmp_path / "store", "--user", "ann")
    assert str(hash_text("tea")) in plain
    shown = gmeta("history", "show", tmp_path / "store", "--user", "ann", "--texts", tmp_path / "out")
    assert [line.split()[-1] for line in shown.splitlines()[2:]] == ["tea", "Käse"]

"""Imported tables: what other programs' files become, and the exact words for what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings

from gmeta import checkpoint, ops, optimizers, policies
from gmeta.checkpoint import column_files, table_import
from gmeta.checkpoint.callback import tables_by_name
from gmeta.checkpoint.store import CheckpointStore
from gmeta.core.errors import ConfigError, DataError
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.models import Model
from support.tables import assert_same_tables, sorted_records

DIM = 2
KEYS = np.array([5, 1, 9], np.int64)
NONE = np.array([], np.int64)
VALUES = np.array([[0.5, 1], [2, 3], [4, -5]], np.float32)


def collection(
    *names: str, optimizer: optimizers.SparseOptimizer | None = None, **settings: Any
) -> EmbeddingCollection:
    features = [FeatureConfig(each, dim=DIM, hash=each == "tag") for each in names]
    optimizer = optimizer or optimizers.Adam(0.1)
    return EmbeddingCollection(features, optimizer=optimizer, name="tables", **settings)


def write(folder: Path, form: str, **columns: Any) -> Path:
    """Write columns as another program would."""
    folder.mkdir()
    if form == "npy":
        for name, column in columns.items():
            np.save(folder / f"{name}.npy", column)
        return folder
    lists = {name: list(c) if np.ndim(c) == 2 else c for name, c in columns.items()}
    pa.feather.write_feather(pa.table(lists), folder / "part-0.arrow", chunksize=2)
    return folder


def rows_of(tables: EmbeddingCollection, name: str, ids: Any) -> np.ndarray:
    every = {each.name: tf.constant([], tf.int64) for each in tables.features}
    return tables({**every, name: tf.constant(ids)})[name].numpy()


@pytest.mark.parametrize("form", ["npy", "arrow"])
def test_pretrained_vectors_are_read_by_the_feature(tmp_path, form):
    tables = collection("user", "item")
    source = write(tmp_path / "in", form, keys=KEYS, values=VALUES)
    done = checkpoint.import_table(tables, "item", source)
    assert (done.rows, done.own, done.left_out) == (3, 3, ())
    np.testing.assert_array_equal(rows_of(tables, "item", KEYS), VALUES)
    assert not (rows_of(tables, "user", KEYS) == VALUES).any()
    records = sorted_records(tables.tables[0])
    assert records["frequency"].tolist() == [0, 0, 0]
    fresh = collection("user", "item")
    fresh.lookup({"user": NONE, "item": KEYS})
    np.testing.assert_array_equal(records["slots"], sorted_records(fresh.tables[0])["slots"])


@pytest.mark.parametrize("form", ["npy", "arrow"])
def test_other_names_and_narrower_numbers_are_taken(tmp_path, form):
    tables = collection("item")
    columns = {"id": KEYS.astype(np.uint32), "vector": VALUES.astype(np.float16), "count": [4, 5, 6]}
    source = write(tmp_path / "in", form, **columns)
    names = {"keys": "id", "values": "vector", "frequency": "count"}
    checkpoint.import_table(tables, None, source, columns=names)
    np.testing.assert_array_equal(rows_of(tables, "item", KEYS), VALUES)
    assert sorted_records(tables.tables[0])["frequency"].tolist() == [5, 4, 6]


@pytest.mark.parametrize("form", ["npy", "arrow"])
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1, unique=True)
)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_texts_are_hashed_as_the_feature_hashes_them(tmp_path_factory, form, texts):
    tables = collection("user", "tag")
    values = np.arange(DIM * len(texts), dtype=np.float32).reshape(-1, DIM)
    source = write(tmp_path_factory.mktemp("a") / "in", form, keys=np.array(texts), values=values)
    checkpoint.import_table(tables, "tag", source)
    np.testing.assert_array_equal(rows_of(tables, "tag", texts), values)


def test_a_folder_of_arrow_files_dictionaries_and_large_lists_are_read(tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(2):
        keys = pa.array([f"{number}-{i}" for i in range(3)]).dictionary_encode()
        values = pa.array([[number, i] for i in range(3)], pa.large_list(pa.float32()))
        table = pa.table({"keys": keys, "values": values, "price": [1, 2, 3]})
        pa.feather.write_feather(table, tmp_path / "in" / f"{number}.feather")
    tables = collection("tag")
    assert checkpoint.import_table(tables, "tag", tmp_path / "in").rows == 6
    assert rows_of(tables, "tag", ["0-2", "1-1"]).tolist() == [[0, 2], [1, 1]]


def test_merge_keeps_other_rows_and_replace_only_those_of_other_tables(tmp_path):
    source = write(tmp_path / "in", "npy", keys=KEYS, values=VALUES, frequency=[7, 8, 9])
    tables = collection("user", "item")
    tables.lookup({"user": [1, 2], "item": [5, 6]})
    before = rows_of(tables, "item", [6])
    checkpoint.import_table(tables, "item", source)
    np.testing.assert_array_equal(rows_of(tables, "item", [5, 6]), [VALUES[0], before[0]])
    assert int(tables.tables[0].size()) == 6
    checkpoint.import_table(tables, "item", source, mode="replace")
    checkpoint.export_table(tables, "item", tmp_path / "item", format="npy")
    assert sorted(np.load(tmp_path / "item" / "keys.npy")) == sorted(KEYS)
    checkpoint.export_table(tables, "user", tmp_path / "user", format="npy")
    assert sorted(np.load(tmp_path / "user" / "keys.npy")) == [1, 2]
    with pytest.raises(ConfigError, match="mode must be 'merge' or 'replace', got 'add'"):
        checkpoint.import_table(tables, "item", source, mode="add")  # type: ignore[arg-type]


def test_a_merge_keeps_what_admission_remembers_and_a_replacement_forgets_it(tmp_path):
    table = ops.HashTable(DIM, optimizers.SGD(0.1), name="t", admission=policies.CountAdmission(3))
    table.lookup([7])
    source = write(tmp_path / "in", "npy", keys=KEYS, values=VALUES)
    checkpoint.import_table(table, "t", source)
    assert table.export_admission().keys.numpy().tolist() == [7]
    checkpoint.import_table(table, "t", source, mode="replace")
    assert table.export_admission().keys.numpy().tolist() == []
    assert int(table.size()) == 3


def test_a_state_that_is_not_asked_for_is_named_and_left_out(tmp_path):
    tables, again = collection("item"), collection("item")
    found = tables.lookup({"item": KEYS})
    tables.apply_gradients(found, [tf.ones_like(found.rows[0])])
    checkpoint.export_table(tables, "item", tmp_path / "t", state=True)
    done = checkpoint.import_table(again, "item", tmp_path / "t")
    assert done.left_out == ("slots", "last_step")
    assert int(again.tables[0].step()) == 0
    assert sorted_records(again.tables[0])["last_step"].tolist() == [0, 0, 0]
    with pytest.raises(
        DataError, match=r"row 0: last_step 1 isn't in \[0, 0\], the steps that the table has"
    ):
        checkpoint.import_table(again, "item", tmp_path / "t", state=True)
    checkpoint.import_table(again, "item", tmp_path / "t" / "table.arrow", mode="replace", state=True)
    assert_same_tables(again.tables[0], tables.tables[0])


def test_a_state_of_another_optimizer_is_refused_and_rows_alone_are_not(tmp_path):
    tables, other = collection("item"), collection("item", optimizer=optimizers.Adagrad(0.1))
    tables.lookup({"item": KEYS})
    checkpoint.export_table(tables, "item", tmp_path / "t", state=True)
    with pytest.raises(ConfigError) as refused:
        checkpoint.import_table(other, "item", tmp_path / "t", state=True)
    assert str(refused.value) == (
        f"{tmp_path / 't'} was exported with optimizer adam, but table 'item' has adagrad: make it with that "
        "optimizer, or import without state"
    )
    checkpoint.export_table(tables, "item", tmp_path / "npy", format="npy", state=True)
    (tmp_path / "npy" / "slots.npy").unlink()
    with pytest.raises(DataError, match="the slots are missing; export with state=True"):
        checkpoint.import_table(tables, "item", tmp_path / "npy", state=True)
    checkpoint.import_table(other, "item", tmp_path / "t")
    np.testing.assert_array_equal(rows_of(other, "item", KEYS), rows_of(tables, "item", KEYS))
    checkpoint.export_table(tables, "item", tmp_path / "rows")
    with pytest.raises(
        DataError, match="no slots and last steps of an optimizer are here; export with state"
    ):
        checkpoint.import_table(tables, "item", tmp_path / "rows", state=True)


def test_a_table_that_follows_a_keras_optimizer_takes_the_optimizer_of_the_files(tmp_path):
    tables = collection("item", optimizer=optimizers.Adagrad(0.1))
    found = tables.lookup({"item": KEYS})
    tables.apply_gradients(found, [tf.ones_like(found.rows[0])])
    checkpoint.export_table(tables, "item", tmp_path / "t", state=True)
    follows = EmbeddingCollection([FeatureConfig("item", dim=DIM)], name="tables")
    checkpoint.import_table(follows, "item", tmp_path / "t", state=True)
    assert_same_tables(follows.tables[0], tables.tables[0])


def test_the_table_of_a_model_is_found_and_its_next_save_is_whole(tmp_path):
    x = {"item": tf.keras.Input([], name="item", dtype=tf.int64)}
    tables = collection("item")
    model = Model(x, tf.keras.layers.Dense(1)(tables(x)["item"]))
    store = CheckpointStore(tmp_path / "ck")
    store.save(tables_by_name(model), 1)
    source = write(tmp_path / "in", "npy", keys=KEYS, values=VALUES)
    checkpoint.import_table(model, "item", source)
    info = store.save(tables_by_name(model), 2)
    assert set(info.kinds.values()) == {"full"}
    again = collection("item")
    store.load(tables_by_name(again))
    assert_same_tables(again.tables[0], tables.tables[0])


@pytest.mark.parametrize("keys_at_a_time", [4, 1 << 24])
@given(ids=st.lists(st.integers(0, 30), min_size=2, max_size=40))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_key_is_refused_exactly_if_it_is_there_twice(tmp_path_factory, monkeypatch, keys_at_a_time, ids):
    monkeypatch.setattr(table_import, "_KEYS", keys_at_a_time)
    monkeypatch.setattr(column_files, "_ROWS", 3)
    tables = collection("user", "item")
    values = np.zeros((len(ids), DIM), np.float32)
    source = write(tmp_path_factory.mktemp("a") / "in", "npy", keys=np.array(ids), values=values)
    if len(set(ids)) == len(ids):
        assert checkpoint.import_table(tables, "item", source).rows == len(ids)
        return
    with pytest.raises(DataError) as refused:
        checkpoint.import_table(tables, "item", source)
    assert int(tables.tables[0].size()) == 0
    words = str(refused.value).replace(",", "").replace(";", "").split()
    key, (one, other) = int(words[1]), (int(words[i + 1]) for i, word in enumerate(words) if word == "row")
    assert one < other
    assert ids[one] == ids[other] == key


def test_the_places_of_a_key_that_is_there_twice_are_files_and_rows(tmp_path):
    write(tmp_path / "in", "arrow", keys=[4, 5, 6], values=np.zeros((3, DIM), np.float32))
    twice = pa.table({"keys": [9, 6], "values": list(np.zeros((2, DIM), np.float32))})
    pa.feather.write_feather(twice, tmp_path / "in" / "part-1.arrow")
    with pytest.raises(DataError) as refused:
        checkpoint.import_table(collection("user", "item"), "item", tmp_path / "in")
    files = [tmp_path / "in" / f"part-{number}.arrow" for number in range(2)]
    assert str(refused.value) == (
        f"key 6 occurs twice, in {files[0]} row 2 and in {files[1]} row 1; keep one of them"
    )


OUTSIDE = (
    "isn't an id of table 'item', whose ids are in [0, 2^61); "
    "a feature with hash=True takes any 64-bit integer"
)
_NAN = "row 1: the values of key 1 of table 'item' hold NaN or infinity; finite=False takes them"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "width": (
        {"values": VALUES[:, :1]},
        "values are float32 of shape (rows, 1), but table 'item' takes 2 float32 a row",
    ),
    "dtype": (
        {"values": VALUES.astype(np.float64)},
        "values are float64 of shape (rows, 2), but table 'item' takes 2 float32 a row; cast them",
    ),
    "nan": ({"values": [[0, 1], [2, np.nan], [3, 4]]}, _NAN),
    "keys' dtype": (
        {"keys": [5.0, 1.0, 9.0]},
        "keys are float64, but table 'item' takes whole numbers, one for each row; cast them to int64",
    ),
    "text": (
        {"keys": ["a", "b", "c"]},
        "keys are text, but table 'item' takes whole numbers, one for each row; a feature with hash=True "
        "takes text",
    ),
    "negative": (
        {"keys": [5, 1, -9]},
        f"row 2: key -9 {OUTSIDE}",
    ),
    "large": (
        {"keys": [5, 2**61, 9]},
        f"row 1: key {2**61} {OUTSIDE}",
    ),
    "unsigned": (
        {"keys": np.array([5, 2**63, 9], np.uint64)},
        f"row 1: key {2**63} {OUTSIDE}",
    ),
    "frequency": ({"frequency": [1, 2, -3]}, f"row 2: frequency -3 isn't in [0, {2**32 - 1}]"),
    "frequency's dtype": (
        {"frequency": [1.0, 2.0, 3.0]},
        "frequency is float64, but must be a whole number a row",
    ),
}


@pytest.mark.parametrize("form", ["npy", "arrow"])
@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_named_and_nothing_is_imported(tmp_path, what, form):
    wrong, words = WRONG[what]
    wrong = {
        n: np.asarray(c, np.float32) if n == "values" and type(c) is list else c for n, c in wrong.items()
    }
    source = write(tmp_path / "in", form, **{"keys": KEYS, "values": VALUES, **wrong})
    tables = collection("user", "item")
    tables.lookup({"user": NONE, "item": [5]})
    before = sorted_records(tables.tables[0])
    with pytest.raises(DataError) as refused:
        checkpoint.import_table(tables, "item", source, mode="replace")
    file = source if form == "npy" else source / "part-0.arrow"
    assert str(refused.value) == f"{file}: {words}"
    for name, value in sorted_records(tables.tables[0]).items():
        np.testing.assert_array_equal(value, before[name])


def test_values_that_are_not_finite_are_taken_if_asked(tmp_path):
    table = ops.HashTable(DIM, optimizers.SGD(0.1), name="t")
    source = write(tmp_path / "in", "npy", keys=[1], values=np.array([[np.nan, np.inf]], np.float32))
    checkpoint.import_table(table, "t", source, finite=False)
    np.testing.assert_array_equal(table.lookup([1]).rows, [[np.nan, np.inf]])


def test_missing_and_unequal_files_are_named(tmp_path):
    tables = collection("item")

    def refusal(source: Path, **options: Any) -> str:
        with pytest.raises((DataError, ConfigError)) as refused:
            checkpoint.import_table(tables, "item", source, **options)
        return str(refused.value).removeprefix(f"{source}: ")

    give = "give a folder with keys.npy and values.npy, an Arrow file, or a folder of Arrow files"
    assert refusal(tmp_path / "none") == f"no such file or folder; {give}"
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty") == f"neither .npy nor Arrow files are here; {give}"
    short = write(tmp_path / "short", "npy", keys=KEYS, values=VALUES[:2])
    assert refusal(short) == "the files have different numbers of rows: keys.npy 3, values.npy 2"
    lacks = write(tmp_path / "lacks", "npy", keys=KEYS)
    assert refusal(lacks).startswith("it lacks the file values.npy, the table's values; name the columns as")
    arrow = write(tmp_path / "arrow", "arrow", id=KEYS, values=VALUES)
    assert refusal(arrow).startswith("it lacks a column 'keys', the table's keys; name the columns as they")
    assert refusal(arrow, columns={"keys": "id", "frequency": "uses"}).startswith("it lacks a column 'uses'")
    assert refusal(arrow, columns={"key": "id"}) == (
        "columns must name some of keys, values, frequency, slots, last_step, got 'key'"
    )
    np.save(arrow / "keys.npy", KEYS)
    assert refusal(arrow) == "both .npy and Arrow files are here; keep those to import"
    nulls, ragged = tmp_path / "nulls.arrow", tmp_path / "ragged.arrow"
    pa.feather.write_feather(pa.table({"keys": [1, None], "values": [[1.0], [2.0]]}), nulls)
    assert refusal(nulls) == "column 'keys' has nulls; leave those rows out"
    pa.feather.write_feather(pa.table({"keys": [1, 2], "values": [[1.0], [2.0, 3.0]]}), ragged)
    assert refusal(ragged).startswith("column 'values' has lists of 1 to 2 numbers, and must have as many")
    scalars = write(tmp_path / "scalars", "npy", keys=KEYS, values=VALUES[:, 0])
    assert refusal(scalars) == "values are float32, one number a row, but table 'item' takes 2 float32 a row"


def test_files_of_other_formats_are_named_with_what_to_do(tmp_path):
    table = pa.table({"keys": KEYS, "values": list(VALUES)})
    np.save(tmp_path / "matrix.npy", VALUES)
    np.savez(tmp_path / "both.npz", keys=KEYS, values=VALUES)
    pa.parquet.write_table(table, tmp_path / "table.parquet")
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as to:
        to.write_table(table)
    (tmp_path / "table.csv").write_text("keys,values\n1,0.5\n")
    (tmp_path / "nothing.npy").touch()
    words = {
        "matrix.npy": r"a \.npy file holds one array, and a table has two.*np\.save\('table/keys\.npy'",
        "both.npz": r"a \.npz archive.*save its arrays into a folder as keys\.npy and values\.npy",
        "table.parquet": r"a Parquet file.*write_feather\(pyarrow\.parquet\.read_table\(path\)",
        "stream.arrow": r"an Arrow IPC stream.*write_feather\(pyarrow\.ipc\.open_stream\(path\)",
        "table.csv": r"not an Arrow IPC file; give a folder with keys\.npy and values\.npy",
        "nothing.npy": r"an empty file; give a folder",
        ".": r"neither keys\.npy or values\.npy nor Arrow files are here: it has both\.npz",
    }
    for name, said in words.items():
        source = tmp_path / name
        if name == ".":
            (tmp_path / "stream.arrow").unlink()
        with pytest.raises(DataError, match=said):
            checkpoint.import_table(collection("item"), "item", source)
    with pytest.raises(ConfigError, match="source must be the path of files, got ndarray"):
        checkpoint.import_table(collection("item"), "item", VALUES)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["npy", "arrow"])
def test_damaged_files_are_refused(tmp_path, form):
    tables, out = collection("item"), tmp_path / "t"
    tables.lookup({"item": KEYS})
    checkpoint.export_table(tables, "item", out, format=form)
    note = out / ("_table.json" if form == "npy" else "table.json")  # which an earlier version wrote
    (out / "_table.json").rename(note)
    noted = json.loads(note.read_text())
    note.write_text(json.dumps({**noted, "rows": 4}))
    with pytest.raises(DataError, match=r"3 rows, but the JSON file there says 4"):
        checkpoint.import_table(tables, "item", out)
    for value in ({"format": "else"}, {**noted, "rows": -1}, {**noted, "more": 1}, {**noted, "hashed": 1}):
        note.write_text(json.dumps(value))
        says = rf"/{note.name}: not what gmeta writes: .*; export the table again"
        with pytest.raises(DataError, match=says):
            checkpoint.import_table(tables, "item", out)
    note.unlink()
    assert checkpoint.import_table(tables, "item", out).rows == 3
    path = out / ("values.npy" if form == "npy" else "table.arrow")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=f"{path.name}: not a whole "):
        checkpoint.import_table(tables, "item", out)


@pytest.mark.parametrize(
    "header", [b"{'descr': '<i8', 'fortran_order': False, 'shape': (3", b"", b"{}\n", b"\xff"]
)
def test_a_header_that_numpy_cannot_read_is_refused(tmp_path, header):
    source = write(tmp_path / "in", "npy", keys=KEYS, values=VALUES)
    data = (source / "keys.npy").read_bytes()
    (source / "keys.npy").write_bytes(data[:10] + header.ljust(118) + data[128:])
    with pytest.raises(DataError, match=r"keys\.npy: not a whole \.npy file of numbers or text: "):
        checkpoint.import_table(collection("item"), "item", source)


def test_hashes_go_into_a_table_of_the_same_name_whatever_is_merged_with_it(tmp_path):
    one, other = collection("tag"), collection("tag", "user", "item", "shop")
    one.lookup({"tag": ["red"]})
    checkpoint.export_table(one, "tag", tmp_path / "t", format="npy")
    assert np.load(tmp_path / "t" / "keys.npy").tolist() == [int(ops.hash_ids("red"))]
    checkpoint.import_table(other, "tag", tmp_path / "t")
    assert rows_of(other, "tag", ["red"]).tolist() == rows_of(one, "tag", ["red"]).tolist()


def test_hashes_of_another_fold_are_refused(tmp_path):
    before = collection("tag", fold="xor")
    before.lookup({"tag": ["red"]})
    checkpoint.export_table(before, "tag", tmp_path / "t")
    noted = json.loads((tmp_path / "t" / "_table.json").read_text())
    del noted["fold"]  # as files have it from before there were two
    (tmp_path / "t" / "_table.json").write_text(json.dumps(noted))
    with pytest.raises(ConfigError) as refused:
        checkpoint.import_table(collection("tag"), "tag", tmp_path / "t")
    assert str(refused.value) == (
        "the keys are hashes of 62 bits, folded by 'xor', but table 'tag' has hashes of 56 bits, folded by "
        "'mix': import the texts, or make the collection as it was when the keys were exported, with the "
        "same tables, hash=True and fold='xor'"
    )
    assert checkpoint.import_table(collection("tag", fold="xor"), "tag", tmp_path / "t").rows == 1


def test_an_unknown_table_is_answered_by_those_that_there_are(tmp_path):
    with pytest.raises(ConfigError, match="EmbeddingCollection 'tables' has no table 'shop': it has 'item'"):
        checkpoint.import_table(collection("item"), "shop", tmp_path)

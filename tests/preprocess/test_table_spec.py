"""Specs of tables: from TOML, decided by a table's types, and refused where they make no sense."""

import pyarrow as pa
import pytest

from gmeta.core.errors import ConfigError
from gmeta.core.schema import Column
from gmeta.preprocess.table_spec import ColumnSpec, TableSpec

TABLE = pa.schema(
    {
        "ts": pa.timestamp("us"),
        "user": pa.string(),
        "item": pa.int32(),
        "price": pa.float64(),
        "tags": pa.list_(pa.int16()),
        "title": pa.string(),
        "click": pa.bool_(),
    }
)
TOML = """
task = "user"
time = "ts"
label = "click"
unique = ["item"]

[columns.user]
hash = true

[columns.cost]
source = "price"
min = 0
max = 1e4

[columns.genres]
source = "tags"
"""


def load(tmp_path, text):
    (tmp_path / "spec.toml").write_text(text)
    return TableSpec.load(tmp_path / "spec.toml")


def test_a_file_is_read_and_decided_by_the_table(tmp_path):
    spec = load(tmp_path, TOML).resolve(TABLE)
    assert spec.schema.columns == (
        Column("user"),
        Column("batch_id"),
        Column("ts"),
        Column("item"),
        Column("click", "float32"),
        Column("cost", "float32"),
        Column("genres", is_list=True),
    )
    assert (spec.schema.task, spec.schema.batch) == ("user", "batch_id")
    assert spec.order == ("user", "ts", "item", "cost", "genres", "click")
    assert spec.sources["cost"] == "price"
    assert spec.columns["cost"].max == 1e4
    assert spec.resolve(TABLE) == spec


def test_without_columns_all_numbers_and_text_are_taken_and_the_rest_is_named():
    table = TABLE.append(pa.field("where", pa.struct({"x": pa.int64()}))).append(
        pa.field("batch_id", pa.int8())
    )
    spec = TableSpec("item").resolve(table)
    names = [column.name for column in spec.schema]
    assert names == ["item", "batch_id", "ts", "user", "price", "tags", "title", "click"]
    assert spec.order == ("item", "ts", "user", "price", "tags", "title", "click")
    assert [name for name, column in spec.columns.items() if column.hash] == ["user", "title"]
    assert spec.unused == ("where", "batch_id")
    assert spec.resolve(table) == spec


def test_text_is_hashed_unless_it_is_the_time_or_the_label_or_has_a_type():
    table = pa.schema({name: pa.string() for name in ("user", "ts", "click", "number", "id")})
    columns = {"number": ColumnSpec(dtype="int64"), "id": ColumnSpec(default="unknown")}
    spec = TableSpec("user", time="ts", label="click", columns=columns).resolve(table)
    assert {name: (c.dtype, c.hash) for name, c in spec.columns.items()} == {
        **{"user": ("int64", True), "ts": ("int64", False), "click": ("float32", False)},
        **{"number": ("int64", False), "id": ("int64", True)},
    }


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"item": ColumnSpec(default="unknown")}, "'item' holds numbers, and default='unknown' is text"),
        ({"title": ColumnSpec(default=0.5)}, "default=0.5 isn't an int64"),
        ({"title": ColumnSpec(min=3)}, "'title' is text, .*leave out min and max"),
        ({"Price": ColumnSpec("price"), "price": ColumnSpec()}, "'Price' and 'price', which differ in case"),
        ({"_gmeta_number": ColumnSpec("item")}, "names from '_gmeta_' on are gmeta's own"),
        ({"BATCH_ID": ColumnSpec("item")}, "'BATCH_ID' and 'batch_id', which differ in case alone"),
    ],
)
def test_columns_that_do_not_fit_or_would_be_taken_for_others(columns, said):
    with pytest.raises(ConfigError, match=said):
        TableSpec("user", columns=columns).resolve(TABLE)


def test_what_the_manifest_keeps_is_json():
    import json

    assert json.loads(json.dumps(TableSpec("item").resolve(TABLE).to_json()))["columns"]["tags"]["is_list"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('task = "user"\nwhat = 1', "unknown keys: what"),
        ('task = "user"\n[columns.user]\nhsh = true', "unknown keys: hsh @ .*columns\\[.user.\\]"),
        ('task = "user"\n[columns.x]\nhash = "yes"', "expected bool, got 'yes'"),
        ('task = "user"\n[columns.x]\ndtype = "text"', "dtype"),
        ('task = "user"\n[columns.x]\nmin = 3\nmax = 2', "min=3 is more than max=2"),
        ('task = "user"\n[columns.x]\nhash = true\nmin = 3', "hash makes an int64 without bounds"),
        ('task = "user"\n[columns.x]\ndtype = "int64"\ndefault = 0.5', "default=0.5 isn't an int64"),
        ('task = "user"\n[columns.x]\ndtype = "int64"\ndefault = "no"', "default='no' is text"),
        ('task = "user"\n[columns.x]\ndefault = true', "nothing here takes True"),
        ('task = "user"\n[columns.user]\ndtype = "float32"', "'user' is the task and must be an int64"),
        ('task = "user"\n[columns.user]\nis_list = true', "'user' must have one value a row"),
        ('task = "batch_id"', "'batch_id' is made by the plan"),
        ('task = "user"\ntime = "ts"\n[columns.ts]\nhash = true', "'ts' is the time, and a hash of it has"),
        ('task = "user"\nlabel = "x"\n[columns.x]\nhash = true', "'x' is the label, and a hash of it has"),
        ('task = "user"\n[columns.x]\ndefault = 1e39', r"default=1e\+39 must be finite, in float32"),
        ('task = "user"\n[columns.x]\ndefault = 9007199254740993', r"must lie in \[-2\^53, 2\^53\]"),
        ("task = " + "[" * 3000 + "]" * 3000, "not TOML: its values are nested too deeply"),
        ('task = "user"\n[csv]\ndelimiter = "abcde"', "csv.delimiter must be one to four"),
        ('task = "user"\n[csv]\nheader = false', "csv.names are needed"),
        ("task = ", "not TOML"),
    ],
)
def test_a_file_that_makes_no_sense(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        load(tmp_path, text)
    assert "spec.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (TableSpec("uid"), "no column 'uid' in the table; it has ts, user, item"),
        (TableSpec("item", columns={"a": ColumnSpec("b")}), "no column 'b' in the table"),
        (TableSpec("item", columns={"raw": ColumnSpec()}), "'raw' is binary: neither numbers nor text"),
        (TableSpec("tags"), "'tags' holds lists: it can't be the task"),
    ],
)
def test_a_spec_that_does_not_fit_its_table(spec, said):
    with pytest.raises(ConfigError, match=said):
        spec.resolve(TABLE.append(pa.field("raw", pa.binary())))

"""Rows are joined, labelled, exploded and filtered before they are stored."""

import datetime as dt
from dataclasses import replace

import pyarrow as pa
import pytest

from gmeta.cli.table_flags import table_options, table_spec
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.preprocess import prepare
from gmeta.preprocess.cluster.table_input import find_table
from gmeta.preprocess.plan.normalisation import hash_text
from gmeta.preprocess.table_shape import LabelRule, TableShape
from gmeta.preprocess.table_spec import TableSpec
from support.data_files import read_split, write_table

LOG = "user,item,event,rating,ts\n1,a,view,3,0\n1,b,buy,4.5,100\n2,a,cart,5,50\n2,c,view,,9000\n"
ITEMS = "id,price,genres\na,1,X|Y\nb,2,\nc,3,Z\n"


def shaped(tmp_path, arguments, text=LOG, name="log.csv"):
    """Prepare a file by options as a shell gives them; return its rows, each as column -> value."""
    import click

    if text is not None:
        (tmp_path / name).write_text(text)

    @click.command()
    @click.option("--spec", "spec_file")
    @table_options
    def command(**settings):
        prepare(tmp_path / name, tmp_path / "out", spec=table_spec(settings), overwrite=True)

    command.main(["--default", "0", *arguments], standalone_mode=False)
    rows = read_split(tmp_path / "out", "train")
    return [{key: value[0] if len(value) == 1 else value for key, value in row.items()} for row in rows]


def column(rows, name):
    return sorted(row[name] for row in rows)


@pytest.mark.parametrize(
    ("rule", "name", "right"),
    [
        ("event: buy=1, cart=0.5, *=0", "event", [0.0, 0.0, 0.5, 1.0]),
        ("rating: 5=1, 4.50=1, *=0", "rating", [0.0, 1.0, 1.0]),
        ("rating >= 4", "rating", [0.0, 1.0, 1.0]),
        ("rating<4", "rating", [0.0, 0.0, 1.0]),
        ("*=1", "label", [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_labels_are_made_of_values_and_thresholds(tmp_path, rule, name, right):
    arguments = ["--task", "user", "--label", rule]
    arguments += ["--where", "rating IS NOT NULL"] if name == "rating" else []
    assert column(shaped(tmp_path, arguments), name) == right


def micros(*fields):
    return int(dt.datetime(*fields, tzinfo=dt.timezone.utc).timestamp() * 1e6)


@pytest.mark.parametrize(
    ("time", "form", "right"),
    [
        ("11/9/2019 5:44:23 PM", "%m/%d/%Y %I:%M:%S %p", micros(2019, 11, 9, 17, 44, 23)),
        ("09/Nov/2019:17:44:23 +0200", "%d/%b/%Y:%H:%M:%S %z", micros(2019, 11, 9, 15, 44, 23)),
        ("9 November 2019", "%d %B %Y", micros(2019, 11, 9)),
        ("1573321463", "s", 1573321463_000000),
        ("1573321463.25", "s", 1573321463_250000),
        ("1573321463250", "ms", 1573321463_250000),
        ("1573321463250001", "us", 1573321463_250001),
        ("1573321463250001000", "ns", 1573321463_250001),
    ],
)
def test_times_are_read_by_a_format(tmp_path, time, form, right):
    text = f"user;at\n1;{time}\n"
    [row] = shaped(tmp_path, ["--task", "user", "--time", "at", "--time-format", form], text)
    assert row["at"] == right


def test_a_time_that_is_not_of_the_format_is_bad_and_named_by_its_line(tmp_path):
    text = "user;at\n1;1/2/2019\n1;13/2/2019\n"
    with pytest.raises(DataError, match=r"log.csv:3: .*at must be a time.*got '13/2/2019'"):
        shaped(tmp_path, ["--task", "user", "--time", "at", "--time-format", "%m/%d/%Y"], text)


def test_side_tables_give_their_columns_to_rows(tmp_path):
    (tmp_path / "items.csv").write_text(ITEMS)
    (tmp_path / "users.tsv").write_text("user\tage\n1\t30\n2\t40\n")
    joins = ["--join", str(tmp_path / "items.csv"), "--on", "item=id"]
    joins += ["--join", str(tmp_path / "users.tsv"), "--on", "user"]
    rows = shaped(tmp_path, ["--task", "user", *joins])
    assert sorted((row["item"], row["price"], row["age"]) for row in rows) == sorted(
        (hash_text(item), price, age)
        for item, price, age in [("a", 1, 30), ("b", 2, 30), ("a", 1, 40), ("c", 3, 40)]
    )


def test_lists_become_rows_with_labels(tmp_path):
    text = "user\tshown\n1\tN1-0 N-2-1\n2\tN1-1\n"
    rows = shaped(
        tmp_path, ["--task", "user", "--explode", "shown: item-click", "--label", "click"], text, "b.tsv"
    )
    assert sorted((row["user"], row["item"], row["click"]) for row in rows) == sorted(
        [(1, hash_text("N1"), 0.0), (1, hash_text("N-2"), 1.0), (2, hash_text("N1"), 1.0)]
    )


def test_a_side_table_without_names_is_named(tmp_path):
    (tmp_path / "items.txt").write_text("a|1\nb|2\nc|3\n")
    side = f"{tmp_path / 'items.txt'}: item,price"
    rows = shaped(tmp_path, ["--task", "user", "--join", side, "--on", "item"])
    assert column(rows, "price") == [1, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"its first line holds numbers and no names.*--join 'FILE: NAME"):
        shaped(tmp_path, ["--task", "user", "--join", str(tmp_path / "items.txt"), "--on", "item"])


def test_json_keeps_its_types(tmp_path):
    text = '{"user": "7", "n": 3, "ids": [1, 2], "words": ["a"], "part": [0.5]}\n'
    [row] = shaped(tmp_path, ["--task", "user", "--where", "n > 2"], text, "a.jsonl")
    assert row["user"] == hash_text("7")
    assert (row["n"], row["ids"], row["words"], row["part"]) == (3, [1, 2], hash_text("a"), 0.5)


def test_lists_of_parquet_are_exploded(tmp_path):
    write_table(pa.table({"user": [1, 2], "items": [[5, 6], [7]]}), tmp_path / "a.parquet")
    rows = shaped(tmp_path, ["--task", "user", "--explode", "items"], None, "a.parquet")
    assert sorted((row["user"], row["items"]) for row in rows) == [(1, 5), (1, 6), (2, 7)]


@pytest.mark.parametrize(
    ("options", "right"),
    [
        (["--where", "rating >= 4.5"], [50, 100]),
        (["--where", "event IN ('view', 'buy') AND ts < 9000"], [0, 100]),
        (["--distinct", "item"], [0, 100, 9000]),
        (["--distinct", "*"], [0, 50, 100, 9000]),
        (["--core", "item=2"], [0, 50]),
        (["--core", "user=2,item=1"], [0, 50, 100, 9000]),
        (["--null", "view", "--where", "event IS NOT NULL"], [50, 100]),
    ],
)
def test_filters_keep_rows(tmp_path, options, right):
    assert column(shaped(tmp_path, ["--task", "user", "--time", "ts", *options]), "ts") == right


def test_a_core_is_cut_until_all_values_have_enough_rows(tmp_path):
    text = "user,item\n1,a\n1,b\n2,a\n2,b\n3,a\n3,c\n4,c\n"
    rows = shaped(tmp_path, ["--task", "user", "--core", "user=2, item=2"], text)
    assert column(rows, "user") == [1, 1, 2, 2]


def test_a_gap_begins_a_session(tmp_path):
    rows = shaped(tmp_path, ["--task", "session", "--time", "ts", "--sessions", "user: 30m"])
    assert column(rows, "session") == sorted(map(hash_text, ["1-1", "1-1", "2-1", "2-2"]))


def test_rows_without_a_user_become_blocks_whose_gaps_are_a_value(tmp_path):
    text = "".join(f"{n % 2}\t{n if n % 3 else ''}\t{'' if n % 5 else '0a'}\n" for n in range(1500))
    arguments = ["--no-header", "--columns", "y,I1,C1", "--label", "y"]
    (tmp_path / "train.txt").write_text(text)
    rows = shaped(tmp_path, arguments, None, "train.txt")
    assert column(rows, "block") == [row // 75 for row in range(1500)]
    assert column(rows, "I1")[:501] == [-1] * 500 + [1]
    assert column(rows, "C1").count(hash_text("0a")) == 300
    assert column(rows, "C1").count(hash_text("")) == 1200


def test_names_with_types_of_lists_hold_lists(tmp_path):
    text = "user:token\tword:token_seq\tvec:float_seq\n1\ta b\t0.5 1\n"
    [row] = shaped(tmp_path, ["--task", "user"], text, "a.inter")
    assert row["word"] == [hash_text("a"), hash_text("b")]
    assert row["vec"] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--label", "event: buy=1"], r"--label: event has other values, such as 'cart', 'view': add \*=0"),
        (["--label", "score >= 4"], "--label: no column 'score' in the table; it has user, item"),
        (["--where", "prize > 4"], "--where 'prize > 4': .*prize.*columns are user, item"),
        (["--where", "rating > 9"], "--where leaves no row of 4"),
        (["--core", "item=9"], "--core leaves no row of 4"),
        (["--core", "item"], "--core: write NAME=VALUE"),
        (["--sessions", "user"], "--sessions: write COLUMN: GAP"),
        (["--join", "x.csv"], "--join and --on go together"),
        (["--time", "ts", "--time-format", "%d.%m.%Y"], "no value of 'ts' is of it, such as '0'"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_flag(tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        shaped(tmp_path, ["--task", "user", *options])


def test_a_side_table_with_a_key_twice_is_refused(tmp_path):
    (tmp_path / "items.csv").write_text(ITEMS + "a,7,\n")
    with pytest.raises(DataError, match="id 'a' is in 2 rows"):
        shaped(tmp_path, ["--task", "user", "--join", str(tmp_path / "items.csv"), "--on", "item=id"])


def test_the_same_shape_of_the_same_files_is_reused(tmp_path):
    (tmp_path / "log.csv").write_text(LOG)
    shape = TableShape(null=("view",), label=LabelRule.parse("rating >= 4"), core={"user": 1})
    spec = TableSpec("user", label="rating", shape=shape, defaults={"*": 0.0, "rating": 0.0, "event": "none"})
    assert not prepare(tmp_path / "log.csv", tmp_path / "out", spec=spec).reused
    assert prepare(tmp_path / "log.csv", tmp_path / "out", spec=spec).reused
    other = replace(spec, shape=replace(shape, where="ts > 0"))
    with pytest.raises(GmetaError, match="was prepared otherwise"):
        prepare(tmp_path / "log.csv", tmp_path / "out", spec=other)


def test_clusters_refuse_what_they_do_not_do(tmp_path):
    settings = dict.fromkeys(["spec_file", "unique", "format_", "delimiter", "encoding", "escape", "columns"])
    settings |= dict.fromkeys(["no_header", "null", "explode", "distinct", "core", "sessions", "time"])
    settings |= {"defaults": [], "join": [], "on": [], "time_format": [], "lists": []}
    settings |= {"task": "user", "label": "rating >= 4", "where": "x > 0"}
    spec = table_spec(settings)
    with pytest.raises(ConfigError, match="--label is not for --engine spark"):
        spec.refuse_local("spark")
    with pytest.raises(ConfigError, match="--label is not for --engine streaming"):
        find_table([tmp_path], spec)

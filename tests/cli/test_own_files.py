"""Files as people have them, and what `gmeta prepare` makes of each."""

import gzip
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.core.data_manifest import Manifest
from gmeta.preprocess.plan.column_values import hash_text
from gmeta.preprocess.table_spec import GAP
from support.data_files import read_split

GAP_TEXT = hash_text("")
JAN = 1_577_836_800  # 2020-01-01 in seconds


def run(folder, out, *options):
    options = [str(folder / one[1:]) if one.startswith("@") else one for one in options]
    data = [f"--data={path}" for path in sorted(folder.iterdir()) if path.name.startswith("data")]
    return CliRunner().invoke(main, ["prepare", *data, "--out", str(out), *options])


def rows_of(out):
    """Column -> the values of all rows, in the order of tasks and rows."""
    names = [column.name for column in Manifest.load(out).schema if column.name != "batch_id"]
    rows = sorted(
        (
            tuple(row[name] if len(row[name]) != 1 else row[name][0] for name in names)
            for row in read_split(out, "train")
        ),
        key=repr,
    )
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


EVENTS = "user,ts,event\n1,3,view\n1,4,buy\n2,5,cart\n"
PLAIN = "user,item,click\n1,5,1\n1,6,0\n"
PLAIN_ROWS = {"user": [1, 1], "item": [5, 6], "click": [1.0, 0.0]}
CLICK = ("--task", "user", "--label", "click")


def times(text):
    return f"user;ts\n1;{text}\n"


@pytest.mark.parametrize(
    ("files", "options", "right"),
    [
        # The format follows the content.
        ({"data.dat": PLAIN}, CLICK, PLAIN_ROWS),
        ({"data.txt": PLAIN.replace(",", "\t")}, CLICK, PLAIN_ROWS),
        ({"data.csv": PLAIN.replace(",", ";")}, CLICK, PLAIN_ROWS),
        ({"data": PLAIN.replace(",", "|")}, CLICK, PLAIN_ROWS),
        ({"data.dat": PLAIN.replace(",", "::")}, CLICK, PLAIN_ROWS),
        ({"data.csv": PLAIN.replace(",", "~")}, (*CLICK, "--delimiter", "~"), PLAIN_ROWS),
        ({"data.txt": PLAIN.replace(",", " ")}, CLICK, PLAIN_ROWS),
        ({"data.log": gzip.compress(PLAIN.encode())}, CLICK, PLAIN_ROWS),
        ({"data.csv.gz": PLAIN}, CLICK, PLAIN_ROWS),
        (
            {"data.csv": '[{"user": 1, "item": 5, "click": 1},\n {"user": 1,\n "item": 6, "click": 0}]'},
            CLICK,
            PLAIN_ROWS,
        ),
        (
            {"data.txt": '{"user": 1, "item": 5, "click": 1}\n{"user": 1, "item": 6, "click": 0}\n'},
            CLICK,
            PLAIN_ROWS,
        ),
        (
            {"data.json": '{\n"user": 1,\n"item": 5, "click": 1}\n{"user": 1, "item": 6, "click": 0}\n'},
            CLICK,
            PLAIN_ROWS,
        ),
        (
            {"data.json": "{'user': 1, 'item': 5, 'click': True}\n{u'user': 1, 'item': 6, 'click': False}\n"},
            CLICK,
            PLAIN_ROWS,
        ),
        ({"data.bin": pa.table({"user": [1, 1], "item": [5, 6], "click": [1.0, 0.0]})}, CLICK, PLAIN_ROWS),
        ({"data.txt": "1,5,1\n1,6,0\n"}, (*CLICK, "--no-header", "--columns", "user,item,click"), PLAIN_ROWS),
        ({"data.csv": PLAIN}, (*CLICK, "--columns", "item"), PLAIN_ROWS),
        (
            {
                "data.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
                "1\t5\t4\t9\n1\t6\t3\t8\n"
            },
            (),
            {"user_id": [1, 1], "timestamp": [8, 9], "rating": [3.0, 4.0], "item_id": [6, 5]},
        ),
        (
            {"data.item": "item_id:token\tgenre:token_seq\n1\ta b\n2\tb\n"},
            ("--task", "item_id"),
            {"item_id": [1, 2], "genre": [[hash_text("a"), hash_text("b")], hash_text("b")]},
        ),
        # Ids that no int64 holds are text, in each form the same.
        *(
            (
                {name: content},
                ("--task", "user"),
                {"user": [1, 2], "id": [hash_text("18446744073709551615"), hash_text("5")]},
            )
            for name, content in (
                ("data.csv", "user,id\n1,18446744073709551615\n2,5\n"),
                ("data.jsonl", '{"user": 1, "id": 18446744073709551615}\n{"user": 2, "id": 5}\n'),
            )
        ),
        ({"data.txt": "0 7 8\n1 9\n"}, (), {"user": [0, 0, 1], "position": [0, 1, 0], "item": [7, 8, 9]}),
        # Text.
        (
            {"data.csv": 'user;name\n1;"s\xe9co"\n2;NULL\n3;"say \\"hi; you\\" twice"\n'.encode("latin-1")},
            ("--task", "user", "--encoding", "latin-1", "--null", "NULL", "--default", "none"),
            {
                "user": [1, 2, 3],
                "name": [hash_text("s\xe9co"), hash_text("none"), hash_text('say "hi; you" twice')],
            },
        ),
        # Gaps.
        (
            {"data.csv": "user,a,b\n1,,x\n2,3,\n"},
            ("--task", "user", "--default", "own"),
            {"user": [1, 2], "a": [GAP, 3], "b": [hash_text("x"), GAP_TEXT]},
        ),
        (
            {"data.csv": "user,a,b\n1,,x\n2,3,\n"},
            ("--task", "user", "--default", "0", "--default", "b=no"),
            {"user": [1, 2], "a": [0, 3], "b": [hash_text("x"), hash_text("no")]},
        ),
        (
            {"data.csv": "user,a,b\n1,,x\n2,3,\n"},
            ("--task", "user", "--default", "-1"),
            {"user": [1, 2], "a": [-1, 3], "b": [hash_text("x"), -1]},
        ),
        # Times.
        (
            {"data.csv": times("2020-01-01T02:00:00+02:00")},
            ("--task", "user", "--time", "ts"),
            {"user": [1], "ts": [JAN * 10**6]},
        ),
        (
            {"data.csv": times("2020-01-01 00:00:00 UTC")},
            ("--task", "user", "--time", "ts"),
            {"user": [1], "ts": [JAN * 10**6]},
        ),
        (
            {"data.csv": times(f"{JAN}.25")},
            ("--task", "user", "--time", "ts"),
            {"user": [1], "ts": [JAN * 10**6 + 250_000]},
        ),
        (
            {"data.csv": times(f"{JAN}000.5")},
            ("--task", "user", "--time", "ts"),
            {"user": [1], "ts": [JAN * 10**6 + 500]},
        ),
        (
            {"data.csv": times(f"{JAN}000000000")},
            ("--task", "user", "--time", "ts"),
            {"user": [1], "ts": [JAN * 10**9]},
        ),
        (
            {"data.csv": times(f"{JAN}000000000")},
            ("--task", "user", "--time", "ts", "--time-format", "nanoseconds"),
            {"user": [1], "ts": [JAN * 10**6]},
        ),
        (
            {"data.csv": times("1/1/2020 12:00:01 AM")},
            ("--task", "user", "--time", "ts", "--time-format", "%m/%d/%Y %I:%M:%S %p"),
            {"user": [1], "ts": [(JAN + 1) * 10**6]},
        ),
        (
            {"data.csv": times("01 Jan 2020")},
            ("--task", "user", "--time", "ts", "--time-format", "%d %b %Y"),
            {"user": [1], "ts": [JAN * 10**6]},
        ),
        (
            {"data.csv": times("Wed Jan 01 08:00:00 +0800 2020")},
            ("--task", "user", "--time", "ts", "--time-format", "%a %b %d %H:%M:%S %z %Y"),
            {"user": [1], "ts": [JAN * 10**6]},
        ),
        # Labels.
        (
            {"data.csv": EVENTS},
            ("--task", "user", "--time", "ts", "--label", "event: buy=1, cart=0.5, *=0"),
            {"user": [1, 1, 2], "ts": [3, 4, 5], "event": [0.0, 1.0, 0.5]},
        ),
        (
            {"data.csv": EVENTS},
            ("--task", "user", "--time", "ts", "--label", "*=1", "--columns", "ts"),
            {"user": [1, 1, 2], "ts": [3, 4, 5], "label": [1.0, 1.0, 1.0]},
        ),
        (
            {"data.csv": "user,rating\n1,4\n2,3.5\n3,5.0\n"},
            ("--task", "user", "--label", "rating >= 4"),
            {"user": [1, 2, 3], "rating": [1.0, 0.0, 1.0]},
        ),
        (
            {"data.json": '{"user": 1, "rating": 4}\n{"user": 2, "rating": 1}\n'},
            ("--task", "user", "--label", "rating: 4.0=1, 1=0"),
            {"user": [1, 2], "rating": [1.0, 0.0]},
        ),
        # Lists.
        (
            {"data.tsv": "user\tshown\n1\ta-b-0 c-1\n2\t\n3\td-1\n"},
            ("--task", "user", "--label", "click", "--explode", "shown: item-click"),
            {
                "user": [1, 1, 3],
                "click": [0.0, 1.0, 1.0],
                "item": [hash_text("a-b"), hash_text("c"), hash_text("d")],
            },
        ),
        (
            {"data.jsonl": '{"user": 1, "items": [5, 6]}\n{"user": 2, "items": [7]}\n'},
            ("--task", "user", "--explode", "items: item"),
            {"user": [1, 1, 2], "item": [5, 6, 7]},
        ),
        (
            {"data.parquet": pa.table({"user": [1, 2], "items": [[5, 6], [7]]})},
            ("--task", "user", "--explode", "items: item"),
            {"user": [1, 1, 2], "item": [5, 6, 7]},
        ),
        (
            {"data.csv": "user,seen\n1,5 6\n2,\n"},
            ("--task", "user", "--list", "seen"),
            {"user": [1, 2], "seen": [[5, 6], []]},
        ),
        # Side tables.
        (
            {"data.csv": PLAIN, "side.csv": "item,price\n5,0.5\n6,1.5\n"},
            (*CLICK, "--join", "@side.csv", "--on", "item"),
            PLAIN_ROWS | {"price": [0.5, 1.5]},
        ),
        (
            {"data.csv": PLAIN, "side.json": '[{"id": 5, "brand": "b", "click": 2}]'},
            (*CLICK, "--join", "@side.json", "--on", "item=id", "--default", "own"),
            PLAIN_ROWS | {"brand": [hash_text("b"), GAP_TEXT], "side_click": [2, GAP]},
        ),
        (
            {"data.jsonl": '{"user": 1, "item": "5"}\n', "side.txt": "item|price|name\n5|7|x\n"},
            ("--task", "user", "--join", "@side.txt", "--on", "item"),
            {"user": [1], "item": [hash_text("5")], "price": [7], "name": [hash_text("x")]},
        ),
        (
            {"data.parquet": pa.table({"user": [1], "item": [5]}), "side.csv": "item,price\n5,7\n"},
            ("--task", "user", "--join", "@side.csv", "--on", "item"),
            {"user": [1], "item": [5], "price": [7]},
        ),
        (
            {"data.csv": PLAIN, "side.tsv": '5\t"a\n6\tb\n'},
            (*CLICK, "--quote", "none", "--join", "@side.tsv:item,name", "--on", "item"),
            PLAIN_ROWS | {"name": [hash_text('"a'), hash_text("b")]},
        ),
        # Filters.
        (
            {"data.csv": PLAIN},
            (*CLICK, "--where", "item > 5 AND click < 10"),
            {"user": [1], "item": [6], "click": [0.0]},
        ),
        (
            {"data.csv": "user,ts,item\n1,3,5\n1,2,5\n2,1,5\n"},
            ("--task", "user", "--time", "ts", "--distinct", "user,item"),
            {"user": [1, 2], "ts": [2, 1], "item": [5, 5]},
        ),
        (
            {"data.csv": "user,item\n1,1\n1,2\n2,1\n2,2\n3,2\n3,3\n"},
            ("--task", "user", "--core", "user=2,item=2"),
            {"user": [1, 1, 2, 2], "item": [1, 2, 1, 2]},
        ),
        # No user.
        (
            {"data.json": '{"a": 1}\n\n{"a": 2, "b": "x"}\n'},
            ("--format", "json"),
            {"a": [1, 2], "b": [GAP_TEXT, hash_text("x")]},
        ),
        (
            {"data.txt": "1\t\tff\n0\t4\t\n"},
            ("--no-header", "--columns", "label,I1..I1,C1", "--label", "label", "--default", "own"),
            {"I1": [GAP, 4], "C1": [hash_text("ff"), GAP_TEXT], "label": [1.0, 0.0]},
        ),
    ],
)
@pytest.mark.shown_by(case=[f"files{n}-options{n}-right{n}" for n in range(0, 52, 3)])
def test_a_file_of_this_kind_becomes_these_rows(tmp_path, files, options, right):
    (tmp_path / "files").mkdir()
    for name, content in files.items():
        path = tmp_path / "files" / name
        if isinstance(content, pa.Table):
            pq.write_table(content, path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = run(tmp_path / "files", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    found = rows_of(tmp_path / "out")
    found.pop("block", None)
    assert set(found) == set(right)
    rows, wanted = ([*zip(*(table[name] for name in right), strict=True)] for table in (found, right))
    assert sorted(rows, key=repr) == sorted(wanted, key=repr)


@pytest.mark.parametrize(
    ("files", "options", "said"),
    [
        (
            {"data.txt": "a;b,c\n1;2,3\n"},
            ("--task", "a"),
            "say which separates fields, such as --delimiter ','",
        ),
        (
            {"data.txt": "once upon a time\nthere was\n"},
            ("--task", "a"),
            "its content shows no format: name it with --format",
        ),
        (
            {"data.csv": "1,5,1\n1,6,0\n"},
            ("--task", "user"),
            "name the columns of a file without names by --no-header --columns",
        ),
        (
            {"data.csv": "user,name\n1,s\xe9co\n".encode("latin-1")},
            ("--task", "user", "--encoding", "utf-16"),
            "name its encoding with --encoding",
        ),
        (
            {"data.csv": "user,a\n1,\n2,3\n"},
            ("--task", "user"),
            "data.csv:2: null: a must be given, got None; give what stands for gaps with --default",
        ),
        (
            {"data.csv": f"user,ts\n1,{JAN}\n1,{JAN}000\n"},
            ("--task", "user", "--time", "ts"),
            f"seconds such as '{JAN}' \\(.*data.csv:2\\) and milliseconds such as '{JAN}000' \\(.*csv:3",
        ),
        (
            {"data.csv": "user,ts\n1,noon\n"},
            ("--task", "user", "--time", "ts"),
            "give its form with --time-format",
        ),
        (
            {"data.csv": "user,ts\n1,0.5\n"},
            ("--task", "user", "--time", "ts"),
            "name their unit with --time-format",
        ),
        (
            {"data.csv": "user,ts\n1,2020-01-01\n2,x\n"},
            ("--task", "user", "--time", "ts", "--time-format", "%Y-%m-%d"),
            "data.csv:3: not a number: ts must be a time of the form '%Y-%m-%d', got 'x'",
        ),
        (
            {"data.csv": EVENTS},
            ("--task", "user", "--label", "event"),
            "such as --label 'COLUMN: this=1",
        ),
        (
            {"data.txt": "7\t5\t0.5\n7\t6\t1\n"},
            (),
            "the columns are 7, 5, 0.5; if the first line has no names, give them with --no-header --columns",
        ),
        (
            {"data.csv": EVENTS},
            ("--task", "user", "--label", "event: buy=1"),
            "data.csv:2: unknown code: event must be one of buy, got 'view'",
        ),
        (
            {"data.tsv": "user\tshown\n1\ta-0\n2\tb\n"},
            ("--task", "user", "--label", "click", "--explode", "shown: item-click"),
            "data.tsv:3: null: click must be given",
        ),
        (
            {"data.csv": PLAIN, "side.csv": "item,price\n5,1\n5,2\n"},
            (*CLICK, "--join", "@side.csv", "--on", "item"),
            "item '5' occurs twice",
        ),
        (
            {"data.csv": PLAIN, "side.csv": "item,price\n5,1\n"},
            (*CLICK, "--join", "@side.csv", "--on", "id"),
            "no column 'id' in the table; it has user, item, click",
        ),
        (
            {"data.csv": PLAIN, "side.csv": "item,price\n5,1\n"},
            (*CLICK, "--join", "@side.csv", "--on", "item"),
            "data.csv:3: null: price must be given",
        ),
        ({"data.csv": PLAIN}, (*CLICK, "--where", "item > 50"), "no row is left after the filters"),
        (
            {"data.csv": "user,item\n1,2\n3\n"},
            ("--task", "user", "--where", "item > 1"),
            "data.csv:3: missing field: 2 fields expected, got 1",
        ),
        (
            {"data.jsonl": '{"user": 1}\nnot json\n'},
            ("--task", "user", "--where", "user > 0"),
            "data.jsonl:2: malformed line",
        ),
    ],
)
def test_a_file_of_this_kind_is_refused_with_the_flag_that_helps(tmp_path, files, options, said):
    (tmp_path / "files").mkdir()
    for name, content in files.items():
        (tmp_path / "files" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    result = run(tmp_path / "files", tmp_path / "out", *options)
    assert result.exit_code == 2, result.output
    assert re.search(said, result.stderr), result.stderr


def test_a_folder_of_movielens_needs_no_option(tmp_path):
    folder = tmp_path / "files" / "data"
    folder.mkdir(parents=True)
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,5,4.0,9\n1,6,3.5,8\n")
    (folder / "movies.csv").write_text('movieId,title,genres\n5,"A, The",Drama|War\n7,B,War\n')
    (folder / "tags.csv").write_text("userId,movieId,tag,timestamp\n1,5,fun,1\n")
    result = run(folder.parent, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "movies.csv: 1 rows have a movieId that it lacks" in result.output.replace("\n", " ")
    found = rows_of(tmp_path / "out")
    assert found["rating"] == [3.5, 4.0]
    assert found["title"] == [GAP_TEXT, hash_text("A, The")]
    assert [list(one) for one in found["genres"]] == [[], [hash_text("Drama"), hash_text("War")]]


def test_a_folder_of_recbole_needs_no_option(tmp_path):
    folder = tmp_path / "files" / "data"
    folder.mkdir(parents=True)
    (folder / "a.inter").write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n1\t5\t4\t9\n"
    )
    (folder / "a.item").write_text("item_id:token\tname:token_seq\tyear:token\n5\t7.5 Years\t1999\n")
    (folder / "a.user").write_text("user_id:token\tage:token\n1\t24\n")
    result = run(folder.parent, tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = rows_of(tmp_path / "out")
    assert (found["rating"], found["year"], found["age"]) == ([4.0], [1999], [24])
    assert [list(one) for one in found["name"]] == [[hash_text("7.5"), hash_text("Years")]]


def test_notes_of_a_kind_become_one(tmp_path):
    (tmp_path / "files").mkdir()
    names = [f"c{number}" for number in range(5)]
    (tmp_path / "files" / "data.csv").write_text(
        "\n".join([",".join(["user", *names]), "1" + ",007" * 5, "2" + ",7" * 5])
    )
    result = run(tmp_path / "files", tmp_path / "out", "--task", "user")
    assert "columns 'c0', 'c1', 'c2' and 2 more are text; for 'c0', because of '007'" in result.output
    assert result.output.count("note:") == 1


@pytest.mark.parametrize(
    ("times", "options"),
    [
        ([JAN, JAN + 60, JAN + 7200, JAN], []),
        ([f"{JAN}000", f"{JAN + 60}000", f"{JAN + 7200}000", f"{JAN}000"], []),
        (["2020-01-01", "2020-01-01 00:01:00", "2020-01-01 02:00:00", "2020-01-01"], []),
        (["1/1/20 0", "1/1/20 0", "1/1/20 2", "1/1/20 0"], ["--time-format", "%m/%d/%y %H"]),
    ],
)
def test_a_gap_cuts_sessions(tmp_path, times, options):
    rows = "".join(f"{user},{time}\n" for user, time in zip("1112", times, strict=True))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "data.csv").write_text(f"user,ts\n{rows}")
    options = ["--task", "user", "--time", "ts", "--session-gap", "30m", *options]
    result = run(tmp_path / "files", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    found = rows_of(tmp_path / "out")
    named = sorted(zip(found["user"], found["session"], strict=True))
    assert named == sorted((int(name[0]), hash_text(name)) for name in ("1/0", "1/0", "1/1", "2/0"))


def test_side_tables_are_part_of_what_a_data_set_was_made_from(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "data.csv").write_text(PLAIN)
    side = tmp_path / "files" / "side.csv"
    side.write_text("item,price\n5,1\n6,2\n")
    options = (*CLICK, "--join", "@side.csv", "--on", "item")
    assert run(tmp_path / "files", tmp_path / "out", *options).exit_code == 0
    assert "already prepared" in run(tmp_path / "files", tmp_path / "out", *options).output
    side.write_text("item,price\n5,1\n6,3\n")
    result = run(tmp_path / "files", tmp_path / "out", *options)
    assert "was prepared otherwise (other input files: side.csv)" in result.stderr


@pytest.mark.parametrize(
    "options", [["--where", "item > 5"], ["--core", "item=2"], ["--join", "@x", "--on", "item"]]
)
def test_engines_of_clusters_refuse_what_one_machine_does(tmp_path, options):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "data.csv").write_text(PLAIN)
    job = ["--engine", "streaming", "--job", str(tmp_path / "job")]
    result = run(tmp_path / "files", tmp_path / "out", *CLICK, *options, *job)
    assert result.exit_code == 2
    assert (
        "Spark and Hadoop Streaming don't join, explode or filter rows: use --engine duckdb" in result.stderr
    )

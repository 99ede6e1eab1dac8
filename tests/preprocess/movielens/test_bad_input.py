"""Everything that can be wrong with the input, under either rule, through the whole preparation."""

import json

import pytest

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError
from gmeta.preprocess import prepare
from gmeta.testing import USERS, as_1m, edit, small_100k

ITEM = "3|Film (1990)|01-Jan-1990|||" + "|".join("1" if index == 5 else "0" for index in range(19))
# File, line, what it becomes, what the error says after file and line.
BAD_LINES = [
    ("u.data", 4, "2\t7\t4", "missing field: 4 fields separated by '\\t' expected, got 3: '2\\t7\\t4'"),
    ("u.data", 4, "2\t7\t4\t880000000\tx", "extra field: 4 fields separated by '\\t' expected, got 5"),
    ("u.data", 4, "2 7 4 880000000", "missing field: 4 fields separated by '\\t' expected, got 1"),
    ("u.data", 4, "2\t7\tfour\t880000000", "not a number: rating must be a number, got 'four'"),
    ("u.data", 4, "2\t7\t6\t880000000", "out of range: rating must be in 0.5..5, got '6'"),
    ("u.data", 4, "2\t7\t4\tnoon", "not a number: timestamp must be a whole number, got 'noon'"),
    ("u.data", 4, "\xb2\t7\t4\t880000000", "not a number: user id must be a whole number, got '\\xb2'"),
    (
        "u.data",
        4,
        "2\t\xff\xfe\t4\t880000000",
        "not a number: item id must be a whole number, got '\\xff\\xfe'",
    ),
    ("u.data", 4, "2\t9999\t4\t880000000", "unknown item id: item '9999' isn't in the items file"),
    ("u.data", 4, "9999\t7\t4\t880000000", "unknown user id: user '9999' isn't in the users file"),
    ("u.item", 3, ITEM[:-2], "missing field: 24 fields separated by '|' expected, got 23"),
    ("u.item", 3, ITEM.replace("01-Jan-1990", "1990"), "not a number: release date must be like 01-Jan-1995"),
    ("u.item", 3, ITEM.replace("3|", "x|", 1), "not a number: id must be a whole number, got 'x'"),
    ("u.item", 3, ITEM.replace("3|", "2|", 1), "id given twice: id '2' stands on line 2 already"),
    ("u.user", 3, "3|30|M|baker|12345", "unknown code: occupation 'baker' isn't in u.occupation"),
    ("u.user", 3, "3|30|?|artist|12345", "unknown code: gender must be F or M, got '?'"),
    ("u.user", 3, "3|old|M|artist|12345", "not a number: age must be a whole number, got 'old'"),
]


@pytest.fixture
def raw(tmp_path):
    return small_100k(tmp_path / "raw")


def assert_all_accounted_for(summary):
    bad = sum(kind.count for kind in summary.bad if kind.of_rows)
    assert summary.rows_read == summary.rows + sum(entry.rows for entry in summary.left_out) + bad


@pytest.mark.parametrize(("name", "line", "text", "message"), BAD_LINES)
def test_a_bad_line_ends_the_run(raw, tmp_path, name, line, text, message):
    edit(raw, name, {line: text})
    with pytest.raises(DataError) as caught:
        prepare(raw, tmp_path / "out")
    assert str(caught.value).startswith(f"{raw / name}:{line}: {message}")
    assert "--on-bad skip" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


@pytest.mark.parametrize(("name", "line", "text", "message"), BAD_LINES)
@pytest.mark.shown_by(
    case="u.user-3-3|old|M|artist|12345-not a number: age must be a whole number, got 'old'"
)
def test_a_bad_line_is_counted_and_left_out(raw, tmp_path, name, line, text, message):
    edit(raw, name, {line: text})
    summary = prepare(raw, tmp_path / "out", on_bad="skip")
    reason, _, rest = message.partition(": ")
    kind = next(kind for kind in summary.bad if (kind.file, kind.reason) == (name, reason))
    assert kind.count == 1
    assert kind.examples[0].startswith(f"{raw / name}:{line}: {rest}")
    assert_all_accounted_for(summary)
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.dropped[f"{name}: {reason}"] == 1


def test_ratings_of_an_item_that_is_left_out_are_left_out_too(raw, tmp_path):
    ratings = sum(line.split("\t")[1] == "3" for line in (raw / "u.data").read_text().splitlines())
    edit(raw, "u.item", {3: ITEM + "|1"})
    summary = prepare(raw, tmp_path / "out", on_bad="skip")
    counts = {(kind.file, kind.reason): kind.count for kind in summary.bad}
    assert counts == {("u.item", "extra field"): 1, ("u.data", "unknown item id"): ratings}
    assert ratings > 0
    assert_all_accounted_for(summary)


def test_only_the_first_few_of_a_kind_are_named(raw, tmp_path):
    edit(raw, "u.data", dict.fromkeys(range(10, 30), "nothing"))
    (kind,) = prepare(raw, tmp_path / "out", on_bad="skip").bad
    assert kind.count == 20
    assert [example.split(": ")[0] for example in kind.examples] == [
        f"{raw / 'u.data'}:{n}" for n in (10, 11, 12)
    ]


def repeat_a_rating(raw):
    """Append the first line again, a second later; returns user, item and the new line's number."""
    lines = (raw / "u.data").read_text().splitlines()
    user, item, _, time = lines[0].split("\t")
    edit(raw, "u.data", {len(lines) + 1: f"{user}\t{item}\t1\t{int(time) + 1}"})
    return user, item, len(lines) + 1


def test_a_pair_that_is_rated_twice_ends_the_run(raw, tmp_path):
    user, item, line = repeat_a_rating(raw)
    with pytest.raises(
        DataError, match=rf"u\.data:{line}: key given twice in a task: task {user} .* item {item},"
    ):
        prepare(raw, tmp_path / "out")


def test_a_pair_that_is_rated_twice_keeps_the_first(raw, tmp_path):
    once = prepare(raw, tmp_path / "once")
    _, _, line = repeat_a_rating(raw)
    twice = prepare(raw, tmp_path / "twice", on_bad="skip")
    assert [(kind.reason, kind.count) for kind in twice.bad] == [("key given twice in a task", 1)]
    assert twice.bad[0].examples[0].startswith(f"{raw / 'u.data'}:{line}: ")
    assert_all_accounted_for(twice)
    for shard in Manifest.load(once.out).splits["warm"].shards:
        assert (once.out / shard.name).read_bytes() == (twice.out / shard.name).read_bytes()


@pytest.fixture
def with_an_empty_task(raw):
    edit(raw, "u.user", {USERS + 1: f"{USERS + 1}|30|M|artist|12345"})
    return raw


def test_an_empty_task_ends_the_run(with_an_empty_task, tmp_path):
    with pytest.raises(
        DataError, match=rf"u\.user:{USERS + 1}: empty task: user {USERS + 1} has no rating in u\.data"
    ):
        prepare(with_an_empty_task, tmp_path / "out")


def test_an_empty_task_is_counted(with_an_empty_task, tmp_path):
    summary = prepare(with_an_empty_task, tmp_path / "out", on_bad="skip")
    assert [(kind.file, kind.reason, kind.count) for kind in summary.bad] == [("u.user", "empty task", 1)]


@pytest.mark.parametrize("on_bad", ["raise", "skip"])
@pytest.mark.parametrize("name", ["u.data", "u.item", "u.user"])
def test_a_file_that_is_empty_or_missing_ends_the_run_under_either_rule(raw, tmp_path, name, on_bad):
    (raw / name).write_bytes(b"")
    with pytest.raises(DataError, match=f"{name}: the file is empty"):
        prepare(raw, tmp_path / "out", on_bad=on_bad)
    (raw / name).unlink()
    with pytest.raises(DataError, match=name if name != "u.data" else "not a MovieLens folder"):
        prepare(raw, tmp_path / "out", on_bad=on_bad)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("on_bad", ["raise", "skip"])
def test_no_usable_rating_at_all(raw, tmp_path, on_bad):
    (raw / "u.data").write_text("what\n" * 50)
    with pytest.raises(
        DataError,
        match=r"u\.data:1: missing field" if on_bad == "raise" else "none is left for warm and cold",
    ):
        prepare(raw, tmp_path / "out", on_bad=on_bad)


def test_a_truncated_last_line(raw, tmp_path):
    data = (raw / "u.data").read_bytes()
    (raw / "u.data").write_bytes(data[:-15])
    last = len(data.splitlines())
    with pytest.raises(DataError, match=rf"u\.data:{last}: missing field"):
        prepare(raw, tmp_path / "out")


def test_the_other_layout_names_its_own_files(raw, tmp_path):
    folder = as_1m(raw, tmp_path / "1m")
    edit(folder, "ratings.dat", {2: "1::2::3"})
    edit(folder, "movies.dat", {5: "5::Film (1990)::Soap"})
    edit(folder, "users.dat", {7: "7::F::25::99::12345"})
    summary = prepare(folder, tmp_path / "out", on_bad="skip")
    counts = {f"{kind.file}: {kind.reason}" for kind in summary.bad}
    assert counts >= {"ratings.dat: missing field", "movies.dat: unknown code", "users.dat: unknown code"}
    assert_all_accounted_for(summary)


def test_lines_that_end_in_cr_lf_and_blank_lines_are_fine(raw, tmp_path):
    plain = prepare(raw, tmp_path / "plain")
    for path in raw.iterdir():
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    other = prepare(raw, tmp_path / "other")
    assert other.bad == ()
    assert other.rows_read == plain.rows_read
    for shard in Manifest.load(plain.out).splits["warm"].shards:
        assert (plain.out / shard.name).read_bytes() == (other.out / shard.name).read_bytes()


def test_an_unknown_rule(raw, tmp_path):
    with pytest.raises(ConfigError, match="on_bad must be 'raise' or 'skip', got 'ignore'"):
        prepare(raw, tmp_path / "out", on_bad="ignore")


def test_the_summary_is_kept_with_the_data(raw, tmp_path):
    edit(raw, "u.data", {4: "nothing"})
    prepare(raw, tmp_path / "out", on_bad="skip")
    stored = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert stored["bad"][0]["examples"] == [
        f"{raw / 'u.data'}:4: 4 fields separated by '\\t' expected, got 1: 'nothing'"
    ]

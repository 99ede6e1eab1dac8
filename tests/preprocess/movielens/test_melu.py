"""MovieLens-1M with MeLU's split: names become numbers, partitions become splits."""

import collections
import csv
import gzip
import re

import pytest

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError
from gmeta.io import After, tasks
from gmeta.preprocess import PrepareConfig, prepare
from gmeta.preprocess.movielens.movielens_records import (
    PARTITIONS,
    item_row_melu,
    list_writers,
    rating_row_melu,
    user_row_melu,
)
from gmeta.preprocess.source import BadRecord
from support.data_files import NAMES, WRITERS, read_ratings, read_split, small_melu, write_ratings
from support.public_data import movielens_1m_of_melu

LISTS = {**NAMES, "writer": ["nan", *WRITERS]}
KNOWN = {kind: {name.encode(): i for i, name in enumerate(names)} for kind, names in LISTS.items()}
WRITTEN = "Émile (story, uncredited), Cy D (play), Cy D".encode()
MOVIE = (
    b"1::Film::1995::R::22 Nov 1995::War, Drama::Ada B.(co-director), Cy D::"
    + WRITTEN
    + b"::Ann (I), Dee::Plot::N/A"
)


@pytest.fixture
def raw(tmp_path):
    return small_melu(tmp_path / "raw")


def test_a_movie_s_names_are_places_in_their_lists():
    assert item_row_melu(MOVIE.split(b"::"), KNOWN) == (1995, 1, (0, 3), (1, 3), (0, 4), (2, 3))
    unknown = MOVIE.replace(b"War, Drama", b"N/A").replace(b"Ann (I), Dee", b"").replace(WRITTEN, b"N/A")
    assert item_row_melu(unknown.split(b"::"), KNOWN) == (1995, 1, (1,), (1, 3), (2,), (0,))


def test_the_list_of_writers_is_made_of_all_movies_in_the_order_of_names(raw, tmp_path):
    movies = (raw / "movies_extrainfos.dat").read_bytes().splitlines()
    assert list_writers(line.split(b"::") for line in movies) == [name.encode() for name in LISTS["writer"]]
    prepare(raw, tmp_path / "data")
    for row in read_split(tmp_path / "data", "warm"):
        assert row["writer"] == list(range(1, 1 + row["item"][0] % 4)) or row["writer"] == [0]


def test_a_user_s_postal_code_counts_by_five_characters():
    assert user_row_melu([b"7", b"F", b"56", b"2", b"T8H1N-3456"], KNOWN) == (1, 2, 2, 2)


@pytest.mark.parametrize(
    ("parse", "says"),
    [
        (
            lambda: item_row_melu(MOVIE.replace(b"Dee", b"Eve").split(b"::"), KNOWN),
            "actor 'Eve' isn't",
        ),
        (lambda: item_row_melu(MOVIE.replace(b"::R::", b"::X::").split(b"::"), KNOWN), "rate 'X'"),
        (lambda: item_row_melu(MOVIE.replace(b"1995::R", b"later::R").split(b"::"), KNOWN), "year must be"),
        (lambda: user_row_melu([b"7", b"F", b"57", b"2", b"48067"], KNOWN), "age '57'"),
        (lambda: rating_row_melu([b"1", b"2", b"3", b"hot"]), "one of warm, user_cold, .*got 'hot'"),
        (lambda: rating_row_melu([b"1", b"2", b"6", b"warm"]), "rating must be in"),
    ],
)
def test_what_is_bad_is_named(parse, says):
    with pytest.raises(BadRecord, match=says):
        parse()


def test_partitions_become_splits_of_tasks_in_the_order_of_movie_and_rating(raw, tmp_path):
    summary = prepare(raw, tmp_path / "data")
    assert {name: split.tasks for name, split in summary.splits.items()} == dict.fromkeys(PARTITIONS, 40)
    expected = collections.defaultdict(list)
    for line in read_ratings(raw)[1:]:
        user, movie, rating, partition = line.split(",")
        expected[partition, int(user)].append((int(movie), float(rating)))
    found = collections.defaultdict(list)
    for split in PARTITIONS:
        for row in read_split(tmp_path / "data", split):
            found[split, row["task"][0]].append((row["item"][0], row["rating"][0]))
    assert found == {key: sorted(rows) for key, rows in expected.items()}
    assert summary.rows_read == summary.rows == sum(map(len, expected.values()))
    [batch] = tasks(tmp_path / "data" / "both_cold", tasks_per_batch=40, query=After("year", 1995))
    assert set(batch["features"]) == {"item", *LISTS}


def test_the_same_pair_may_occur_twice_and_bad_lines_are_counted(raw, tmp_path):
    lines = read_ratings(raw)
    write_ratings(raw, [*lines, lines[1], "1,2,3", "1,2,3,hot", "1,999,3,warm", "999,1,3,warm"])
    with pytest.raises(DataError, match=rf"ratings\.csv\.gz:{len(lines) + 2}: missing field"):
        prepare(raw, tmp_path / "data")
    summary = prepare(raw, tmp_path / "data", on_bad="skip")
    assert summary.rows == len(lines)
    assert summary.rows_read == summary.rows + sum(kind.count for kind in summary.bad) == len(lines) + 4
    assert {kind.reason for kind in summary.bad} == {
        "missing field",
        "unknown code",
        "unknown user id",
        "unknown item id",
    }


def test_the_input_s_order_doesnt_matter_and_a_data_set_is_used_again(raw, tmp_path):
    first = prepare(raw, tmp_path / "first")
    assert prepare(raw, tmp_path / "first").reused
    lines = read_ratings(raw)
    write_ratings(raw, [lines[0], *reversed(lines[1:])])
    prepare(raw, tmp_path / "second")
    for split in Manifest.load(first.out).splits.values():
        for shard in split.shards:
            other = (tmp_path / "second" / shard.name).read_bytes()
            assert (first.out / shard.name).read_bytes() == other


def test_selection_leaves_out_tasks_of_a_partition(raw, tmp_path):
    summary = prepare(raw, tmp_path / "data", PrepareConfig(min_rows=17))
    sizes = collections.Counter(tuple(line.split(",")[::3]) for line in read_ratings(raw)[1:])
    for name, split in summary.splits.items():
        assert split.tasks == sum(size >= 17 for (_, partition), size in sizes.items() if partition == name)
    assert sum(entry.tasks for entry in summary.left_out) == sum(size < 17 for size in sizes.values())
    with pytest.raises(DataError, match="none is left for warm"):
        prepare(raw, tmp_path / "none", PrepareConfig(min_rows=50))


def test_what_makes_no_sense_is_refused(raw, tmp_path):
    with pytest.raises(ConfigError, match="cold_modulus=5 can't split rows that have a split of their own"):
        prepare(raw, tmp_path / "data", PrepareConfig(cold_modulus=5))
    (raw / "ratings.csv.gz").write_bytes(b"user,movie")
    with pytest.raises(DataError, match="can't unpack it"):
        prepare(raw, tmp_path / "data")
    (raw / "m_actor.txt").unlink()
    with pytest.raises(DataError, match=r"m_actor\.txt|can't unpack"):
        prepare(raw, tmp_path / "data")


@pytest.mark.data
@pytest.mark.shown_by("test_partitions_become_splits_of_tasks_in_the_order_of_movie_and_rating")
def test_the_published_split(tmp_path):
    raw = movielens_1m_of_melu()
    summary = prepare(raw, tmp_path / "data")
    counts = {name: split.tasks for name, split in summary.splits.items()}
    assert counts == {"warm": 2653, "user_cold": 668, "item_cold": 2863, "both_cold": 723}
    assert summary.rows_read == 1_000_209
    assert summary.bad == ()
    lists = {path.stem[2:]: path.read_text("utf-8").split("\n") for path in raw.glob("m_*.txt")}
    movies = dict(line.split("::", 1) for line in (raw / "movies_extrainfos.dat").open(encoding="utf-8"))
    with gzip.open(raw / "ratings.csv.gz", "rt") as file:
        ratings = [row for row in csv.DictReader(file) if row["partition"] == "both_cold"]
    own = collections.defaultdict(list)
    for row in ratings:
        own[int(row["user"])].append((int(row["movie"]), float(row["rating"])))
    found = collections.defaultdict(list)
    for row in read_split(tmp_path / "data", "both_cold"):
        found[row["task"][0]].append((row["item"][0], row["rating"][0]))
        _, _, rate, _, genre, director, _, actor, *_ = movies[str(row["item"][0])].split("::")
        assert lists["rate"][row["rate"][0]] == rate
        for kind, text in (("genre", genre), ("director", director), ("actor", actor)):
            names = {"nan" if name == "N/A" else name for name in text.split(", ")}
            if kind == "director":
                names = {re.sub(r"\([^()]*\)", "", name) for name in names}
            assert {lists[kind][place] for place in row[kind]} == names
    assert found == {user: sorted(rows) for user, rows in own.items() if 13 <= len(rows) <= 100}

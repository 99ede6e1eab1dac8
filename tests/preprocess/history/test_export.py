"""Exports of a store: what is in them, and that another store is made of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.cli import main
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.preprocess import HistorySpec
from gmeta.preprocess.history import reading
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.history.generation import Generation
from gmeta.preprocess.history.reading import export_history, read_histories
from gmeta.preprocess.history.rebuild import compact_history
from gmeta.preprocess.plan.column_values import hash_text
from support.reference.history import Event, draw_day, history_of, write_day

SPEC = HistorySpec("user", "ts", groups={"what": ("item",), "cost": ("price",)}, shards=3, stripe_events=4)
USERS = range(30)


def make(folder, days):
    for number, events in enumerate(days):
        append_history(folder / "store", write_day(folder / f"{number}.parquet", events), SPEC)
    return folder / "store"


def rows_of(folder):
    """All rows of an export, file by file."""
    tables = [pq.read_table(path) for path in sorted(folder.glob("*.parquet"))]
    for table in tables:
        assert table.schema == pa.schema(
            [
                *((name, pa.int64()) for name in ("user", "ts", "born", "item")),
                ("price", pa.float32()),
            ]
        )
    return [tuple(row.values()) for table in tables for row in table.to_pylist()]


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    compacted=st.booleans(),
    generation=st.none() | st.integers(1, 4),
    until=st.none() | st.integers(0, 5000),
    users=st.none() | st.sets(st.integers(0, 35), max_size=9),
    part=st.sampled_from([1, 7, 1 << 18]),
)
@pytest.mark.shown_by("test_an_append_of_an_export_makes_the_store_again")
def test_an_export_has_the_events_of_its_generation(
    tmp_path_factory, sizes, compacted, generation, until, users, part
):
    folder = tmp_path_factory.mktemp("export")
    days = [draw_day(number, size, day=number) for number, size in enumerate(sizes, 1)]
    store = make(folder, days)
    if compacted:
        compact_history(store)
    if generation is not None and generation > len(days) + compacted:
        with pytest.raises(DataError, match=f"there is no generation {generation}; it has 1"):
            export_history(store, folder / "out", generation=generation)
        assert not (folder / "out").exists()
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_EVENTS", part)
        done = export_history(
            store,
            folder / "out",
            generation=generation,
            until=until,
            users=None if users is None else [*users],
        )
    moment = {"until": 2**63 - 1 if until is None else until, "generation": generation}
    expected = {
        user: [(user, *event) for event in history_of(days, user, **moment)]
        for user in (USERS if users is None else users)
    }
    found = rows_of(folder / "out")
    assert sorted(found) == sorted(row for rows in expected.values() for row in rows)
    assert not found or len(pq.read_table(folder / "out")) == len(found)  # as users read it: the folder
    for user, rows in expected.items():
        assert [row for row in found if row[0] == user] == rows
    for path in (folder / "out").glob("*.parquet"):
        own = pq.read_table(path, columns=["user"])["user"].to_pylist()
        assert own == sorted(own)
        assert own
    having = [user for user, rows in expected.items() if rows]
    assert (done.events, done.users) == (len(found), len(having))
    assert done.absent == (0 if users is None else len(users) - len(having))
    assert done.files == len([*(folder / "out").glob("*.parquet")])
    assert not [*folder.glob(".*")]


def histories(store, **moment):
    found = []
    for names in (["ts", "born", "item"], ["price"]):
        own = read_histories(Generation(store), USERS, names, **moment)
        found += [own.row_splits.tolist(), *(own.columns[name].tolist() for name in names)]
    return found


def test_an_append_of_an_export_makes_the_store_again(tmp_path):
    ties = [Event(3, 1500, item, price) for item in (5, 2) for price in (0.5, 0.25)]
    store = make(tmp_path, [[*draw_day(1, 300), *ties, *ties]])
    export_history(store, tmp_path / "out")
    spec = HistorySpec.load(tmp_path / "out" / "_spec.toml")
    again = tmp_path / "again"
    assert append_history(again, tmp_path / "out", spec).total_events == 308
    assert Generation(again).manifest.groups == Generation(store).manifest.groups
    for moment in ({}, {"until": 1400}, {"longest": 3}, {"start": 1200}):
        assert histories(again, **moment) == histories(store, **moment)
    files = [sorted(each.glob("generations/*/shard-*")) for each in (store, again)]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_the_column_of_births_is_no_column_of_events(tmp_path):
    export_history(make(tmp_path, [draw_day(1, 30)]), tmp_path / "out")
    with pytest.raises(
        ConfigError, match="column 'born' has the name by which readers request the generation"
    ):
        append_history(tmp_path / "again", tmp_path / "out", HistorySpec("user", "ts"))


def test_a_folder_with_files_is_left_alone(tmp_path):
    store = make(tmp_path, [draw_day(1, 30)])
    (tmp_path / "out").mkdir()
    export_history(store, tmp_path / "out")
    before = sorted((tmp_path / "out").iterdir())
    with pytest.raises(GmetaError, match="out exists already: name a folder that is to be made"):
        export_history(store, tmp_path / "out")
    assert sorted((tmp_path / "out").iterdir()) == before


def test_text_comes_out_as_its_hash_and_goes_in_again(tmp_path):
    odd = 'say "item" \\ \x7f'
    table = {"who": ["anna", "bob"], "ts": [1, 2], odd: ["book", "pen"]}
    pq.write_table(pa.table(table), tmp_path / "day.parquet")
    append_history(tmp_path / "store", tmp_path / "day.parquet", HistorySpec("who", "ts"))
    (tmp_path / "users").write_text("anna\n\ncarl\n")
    arguments = ["history", "export", tmp_path / "store", tmp_path / "out", "--users", tmp_path / "users"]
    ran = CliRunner().invoke(main, [*map(str, arguments)])
    assert ran.exit_code == 0, ran.output
    assert "generation 1: 1 events of 1 users in 1 files, " in ran.output
    assert "; 1 of the requested users have none" in ran.output
    append_history(tmp_path / "again", tmp_path / "out", HistorySpec.load(tmp_path / "out" / "_spec.toml"))
    found = read_histories(Generation(tmp_path / "again"), [hash_text("anna")], [odd])
    np.testing.assert_array_equal(found.columns[odd], [hash_text("book")])


def test_users_that_are_no_numbers_are_named(tmp_path):
    store = make(tmp_path, [draw_day(1, 30)])
    (tmp_path / "users").write_text("3\nanna\n")
    arguments = ["history", "export", store, tmp_path / "out", "--users", tmp_path / "users"]
    ran = CliRunner().invoke(main, [*map(str, arguments)])
    assert ran.exit_code == 2
    assert "user 'anna' is no whole number, and users of this store are" in ran.stderr
    assert not (tmp_path / "out").exists()


def test_users_of_uint64_are_found_by_the_numbers_that_they_had(tmp_path):
    users = np.array([2**63 + 5, 7], np.uint64)
    pq.write_table(pa.table({"who": users, "ts": [1, 2], "item": users[::-1]}), tmp_path / "day.parquet")
    append_history(tmp_path / "store", tmp_path / "day.parquet", HistorySpec("who", "ts"))
    found = read_histories(Generation(tmp_path / "store"), users, ["item"])
    np.testing.assert_array_equal(found.columns["item"], users[::-1].view(np.int64))
    show = ["history", "show", str(tmp_path / "store"), "--user"]
    assert ": 1 events" in CliRunner().invoke(main, [*show, str(2**63 + 5)]).output
    assert "is no number of 64 bits" in CliRunner().invoke(main, [*show, str(2**64)]).stderr

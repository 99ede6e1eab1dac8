"""Appends to a store of histories: what every later generation rebuilds, and which bytes are written."""

from __future__ import annotations

import gzip
import hashlib
import random

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.core.history_manifest import HistoryManifest, generation_folder, user_shards
from gmeta.preprocess import ColumnSpec, HistorySpec
from gmeta.preprocess.history import shard_writer
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.history.example_sets import drop_generations
from gmeta.preprocess.history.generation import Generation, new_generation
from gmeta.preprocess.history.reading import read_histories, verify_history
from support.reference.history import Event, draw_day, history_of, write_day

SPEC = HistorySpec("user", "ts", groups={"what": ("item",), "cost": ("price",)}, shards=3, stripe_events=4)


def append_days(folder, days, spec=SPEC):
    for number, events in enumerate(days):
        append_history(folder / "store", write_day(folder / f"{number}.parquet", events), spec)
    return folder / "store"


def found_by(store, users, **moment):
    what = read_histories(store, users, ["ts", "born", "item"], **moment)
    cost = read_histories(store, users, ["price"], **moment)
    np.testing.assert_array_equal(what.row_splits, cost.row_splits)
    columns = [
        *(what.columns[name].tolist() for name in ("ts", "born", "item")),
        cost.columns["price"].tolist(),
    ]
    rows = list(zip(*columns, strict=True))
    return [rows[a:b] for a, b in zip(what.row_splits, what.row_splits[1:], strict=False)]


EVENTS = st.builds(
    Event,
    user=st.integers(-2, 2) | st.just(-(2**63)),
    ts=st.integers(0, 12),
    item=st.integers(0, 2) | st.integers(-(2**63), 2**63 - 1),
    price=st.sampled_from([0.0, 0.25, 3.5]),
)
DAYS = st.lists(st.lists(EVENTS, min_size=1, max_size=12), min_size=1, max_size=5)


@settings(max_examples=20)
@given(
    times=st.sampled_from([0, 1, 2, 9]),  # joins never, and more and more often
    days=DAYS,
    start=st.integers(0, 12),
    until=st.integers(0, 13),
    longest=st.integers(0, 9),
)
@pytest.mark.shown_by("test_events_that_come_later_change_no_history")
def test_every_later_generation_rebuilds_the_history(tmp_path_factory, times, days, start, until, longest):
    # A file that was read before is refused, so a day that repeats another has one event more.
    days = [[*events, Event(99, number, 0, 0.0)] for number, events in enumerate(days)]
    folder = tmp_path_factory.mktemp("days")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_writer, "MOST_TIMES", times)
        store = append_days(folder, days)
    users = [*{event.user for events in days for event in events}, 1234]
    for later in range(1, len(days) + 1):
        assert verify_history(store, later).faults == ()
        opened = Generation(store, later)
        for then in range(1, later + 1):
            moment = {"start": start, "until": until, "generation": then, "longest": longest}
            assert found_by(opened, users, **moment) == [history_of(days, user, **moment) for user in users]


def test_events_that_come_later_change_no_history(tmp_path):
    days = [draw_day(number, 200, day=number) for number in range(1, 4)]
    store = append_days(tmp_path, days)
    moment = {"until": 2500, "generation": 2}
    before = found_by(Generation(store, 2), range(30), **moment)
    late = [Event(user, 100, 7, 0.5) for user in range(30)]
    append_history(store, write_day(tmp_path / "late.parquet", late))
    assert found_by(Generation(store), range(30), **moment) == before
    assert found_by(Generation(store), [3])[0][0] == (100, 4, 7, 0.5)


def test_an_append_writes_no_full_stripe_anew(tmp_path):
    days = [[Event(5, 10 * day + number, 1, 0.5) for number in range(6)] for day in range(8)]
    store = append_days(tmp_path, days)
    seen = {}
    for number in range(1, len(days) + 1):
        opened = Generation(store, number)
        with_five = int(user_shards(np.array([5]), 3)[0])
        places = opened.open(with_five).index().places
        full = {(place["file"], place["offset"]) for place in places if place["events"] == 4}
        assert set(seen) <= full  # where they were
        seen |= dict.fromkeys(full)
        for group in (0, 1):
            partly = (places["group"] == group) & (places["events"] < 4)
            assert partly.sum() <= 1  # 6 events are enough for whatever isn't full
        assert opened.manifest.shards[with_five].events == 6 * number


def test_an_append_joins_stripes_that_are_about_as_long_as_what_comes(tmp_path):
    spec = HistorySpec("user", "ts", shards=1, stripe_events=100)
    sizes = {1: [4, 5, 3, 1, 3], 2: [7, 7, 1, 13, 1]}
    days = [
        [Event(user, 10 * day, 1, 0.5) for user, own in sizes.items() for _ in range(own[day])]
        for day in range(5)
    ]
    store = append_days(tmp_path, days, spec)
    lengths = []
    for number in range(1, 6):
        index = Generation(store, number).open(0).index()
        lengths.append([each.tolist() for each in np.split(index.places["events"], index.ends[:-1])])
    # At last the 3 events of user 1 take the stripe of 1, and so that of 3; 9 is more than these 7.
    assert lengths == [
        [[4], [7]],
        [[9], [14]],
        [[9, 3], [14, 1]],
        [[9, 3, 1], [28]],
        [[9, 7], [28, 1]],
    ]


@pytest.mark.parametrize("form", ["csv", "jsonl", "shuffled"])
def test_neither_order_nor_format_of_the_input_changes_a_byte(tmp_path, form):
    days = [draw_day(number, 300, day=number) for number in (1, 2)]
    contents = []
    for name in ("parquet", form):
        store = tmp_path / f"store-{name}"
        for number, events in enumerate(days):
            if name == "shuffled":
                events = random.Random(number).sample(events, len(events))
            path = write_day(tmp_path / f"{name}-{number}.parquet", events)
            if name == "csv":
                csv.write_csv(pq.read_table(path), path := path.with_suffix(".csv"))
            if name == "jsonl":
                rows = pq.read_table(path).to_pylist()
                path = path.with_suffix(".jsonl")
                path.write_text("".join(f"{row}\n".replace("'", '"') for row in rows))
            append_history(store, path, SPEC)
        files = sorted(store.glob("generations/*/shard-*"))
        assert len(files) == 12
        contents.append([(path.name, hashlib.sha256(path.read_bytes()).digest()) for path in files])
    assert contents[0] == contents[1]


def test_the_shard_of_a_user_is_pinned():
    """Stores that are written elsewhere and later have these shards too."""
    assert user_shards(np.array([-(2**63), -1, 0, 1, 2, 12345]), 16).tolist() == [4, 14, 14, 9, 9, 2]


def test_the_watermark_follows_the_latest_event_and_never_goes_back(tmp_path):
    store = append_days(tmp_path, [[Event(1, 50, 1, 0.0)], [Event(1, 20, 1, 0.0)]])
    assert [Generation(store, number).manifest.watermark for number in (1, 2)] == [51, 51]
    day = write_day(tmp_path / "day.parquet", [Event(1, 60, 1, 0.0)])
    with pytest.raises(ConfigError, match="watermark 50 is earlier than 51"):
        append_history(store, day, watermark=50)
    assert append_history(store, day, watermark=55).watermark == 55
    with pytest.raises(ConfigError, match="watermark must be an int64, got 9223372036854775808"):
        append_history(store, day, watermark=2**63)


def test_events_in_another_unit_than_the_stores_are_refused(tmp_path):
    store = append_days(tmp_path, [[Event(1, 1393545600, 1, 0.0)]])
    day = write_day(tmp_path / "day.parquet", [Event(1, 1393804800000, 1, 0.0)])
    with pytest.raises(DataError, match=r"times are seconds such as 1393545601, and .* milliseconds such as"):
        append_history(store, day)
    assert not generation_folder(store, 2).exists()
    day = write_day(tmp_path / "day.parquet", [Event(1, 1393804800, 1, 0.0)])
    assert append_history(store, day).watermark == 1393804801


def test_what_does_not_fit_the_store_is_refused(tmp_path):
    day = write_day(tmp_path / "day.parquet", draw_day(0, 50))
    with pytest.raises(ConfigError, match="has no events yet: name the columns of users and times"):
        append_history(tmp_path / "store", day)
    part = {"what": ("item",)}
    with pytest.raises(ConfigError, match="no group has column price"):
        append_history(
            tmp_path / "store", day, HistorySpec("user", "ts", columns={"price": ColumnSpec()}, groups=part)
        )
    with pytest.raises(ConfigError, match="no column 'cost' in the table; it has user, ts, item, price"):
        append_history(
            tmp_path / "store", day, HistorySpec("user", "ts", groups={"a": ("item", "price", "cost")})
        )
    assert not (tmp_path / "store").exists()
    append_history(tmp_path / "store", day, SPEC)
    with pytest.raises(DataError, match=r"generation 1 holds the events of day.parquet already"):
        append_history(tmp_path / "store", day)
    other = write_day(tmp_path / "other.parquet", draw_day(1, 50))
    with pytest.raises(
        ConfigError, match="was made with other groups and shards and stripe_events: groups is"
    ):
        append_history(tmp_path / "store", other, HistorySpec("user", "ts"))
    endless = write_day(tmp_path / "endless.parquet", [Event(4, 2**63 - 1, 0, 0.0)])
    with pytest.raises(
        DataError, match="user 4 has an event at time 9223372036854775807; times must be below"
    ):
        append_history(tmp_path / "store", endless)
    with pytest.raises(DataError, match="there is no generation 3; it has 1"):
        Generation(tmp_path / "store", 3)
    with pytest.raises(DataError, match="user 4: generation 2 is requested, and this is 1"):
        read_histories(Generation(tmp_path / "store"), [4], ["item"], generation=2)
    with pytest.raises(ConfigError, match="of several groups"):
        read_histories(Generation(tmp_path / "store"), [4], ["item", "price"])
    with pytest.raises(
        ConfigError,
        match="no column 'clicks' in the histories: all have ts, born; what has item; cost has price",
    ):
        read_histories(Generation(tmp_path / "store"), [4], ["clicks"])
    assert HistoryManifest.load(tmp_path / "store", 1).generation == 1


def test_equal_files_are_taken_once(tmp_path):
    day, other = draw_day(0, 50), draw_day(1, 50)
    files = [write_day(tmp_path / name, day) for name in ("a.parquet", "b.parquet")]
    files.append(write_day(tmp_path / "c.parquet", other))
    with pytest.raises(DataError, match=r"b.parquet: it is equal to .*a.parquet: .*; leave one of"):
        append_history(tmp_path / "store", files, SPEC)
    for twice in ([files[0], tmp_path / "a*"], [tmp_path / "a.parquet", files[0]]):
        with pytest.raises(ConfigError, match=r"a.parquet is given twice: its rows would be too"):
            append_history(tmp_path / "store", twice, SPEC)
    (tmp_path / "link.parquet").symlink_to(files[0])
    with pytest.raises(ConfigError, match="is given twice"):
        append_history(tmp_path / "store", [files[0], tmp_path / "link.parquet"], SPEC)
    assert append_history(tmp_path / "store", [files[0], files[2]], SPEC).events == 100
    with pytest.raises(DataError, match=r"generation 1 holds the events of b.parquet already"):
        append_history(tmp_path / "store", [files[1], write_day(tmp_path / "d.parquet", draw_day(2, 5))])


def write_events(path, times):
    """Write events of user 1 in the format of the file's ending."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"user": pa.array([1] * len(times), pa.int64()), "ts": times}), path)
        return
    if path.suffix == ".jsonl":
        text = "".join(f'{{"user": 1, "ts": {time}}}\n' for time in times) or " \n\n"
    else:
        text = "user,ts\n" + "".join(f"1,{time}\n" for time in times)
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())


@pytest.mark.parametrize("kind", ["parquet", "csv", "csv.gz", "jsonl"])
@pytest.mark.shown_by(case="csv")
def test_files_without_events_may_be_equal(tmp_path, kind):
    """An engine writes several of them, every day."""
    for day in (1, 2):
        folder = tmp_path / f"day-{day}"
        folder.mkdir()
        for part, times in enumerate((np.array([day]), np.array([], np.int64), np.array([], np.int64))):
            write_events(folder / f"part-{part}.{kind}", times)
        done = append_history(tmp_path / "store", folder, HistorySpec("user", "ts"))
        assert (done.generation, done.events) == (day, 1)


def test_a_file_of_a_dropped_generation_is_known(tmp_path):
    days = [[Event(1, 10, 1, 0.0)], [Event(1, 20 + n, 1, 0.0) for n in range(2)]]
    store = append_days(tmp_path, days)
    assert Generation(store).manifest.reads == (2,)  # it has joined all stripes of the first
    drop_generations(store, [1])
    with pytest.raises(
        DataError, match=r"a generation that was dropped holds the events of 0.parquet already"
    ):
        append_history(store, tmp_path / "0.parquet")
    left = store / "dropped-inputs.json"
    left.write_text(left.read_text().replace("0", "1"))
    with pytest.raises(DataError, match="its digest doesn't match its content"):
        append_history(store, write_day(tmp_path / "new.parquet", [Event(1, 90, 1, 0.0)]))


def test_two_processes_do_not_write_at_once(tmp_path):
    with pytest.raises(GmetaError, match="another process writes to"), new_generation(tmp_path / "store", 0):
        append_days(tmp_path, [draw_day(0, 5)])
    append_days(tmp_path, [draw_day(1, 5)])
    with (
        pytest.raises(GmetaError, match=r"another process has written to .* meanwhile"),
        new_generation(tmp_path / "store", 0),
    ):
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shards": 0}, r"shards must lie in \[1, 65536\], got 0"),
        ({"stripe_events": 1 << 17}, r"stripe_events must lie in \[1, 65536\], got 131072"),
        ({"time": "user"}, "user and time are both column 'user'"),
        ({"groups": {"a": ("x",), "b": ("x",)}}, "groups: x: each column is in one group"),
    ],
)
def test_a_spec_says_what_is_wrong_with_it(change, message):
    with pytest.raises(ConfigError, match=message):
        HistorySpec(**{"user": "user", "time": "ts", **change})


def test_columns_of_lists_and_times_that_are_no_int64_are_refused(tmp_path):
    path = tmp_path / "day.jsonl"
    for row, said in (
        ('{"user": 1, "ts": 1, "items": [1, 2]}', "'items' holds lists"),
        ('{"user": 1, "ts": 1.5}', r"'ts', the time, holds fractions such as '1.5' \(.*day.jsonl:1\)"),
    ):
        path.write_text(f"{row}\n")
        with pytest.raises(ConfigError, match=said):
            append_history(tmp_path / "store", path, HistorySpec("user", "ts"))
    assert not generation_folder(tmp_path / "store", 1).exists()


def test_groups_say_which_columns_are_kept(tmp_path):
    day = write_day(tmp_path / "day.parquet", draw_day(0, 50))
    append_history(tmp_path / "store", day, HistorySpec("user", "ts", groups={"what": ("item",)}))
    assert [column.name for column in Generation(tmp_path / "store").manifest.groups["what"]] == ["item"]


def test_text_is_hashed_in_every_append(tmp_path):
    for number in (1, 2):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(f'{{"user": "anna", "ts": {number}, "item": "book"}}\n')
        append_history(tmp_path / "store", path, HistorySpec("user", "ts") if number == 1 else None)
    opened = Generation(tmp_path / "store")
    users = {user for shard in range(16) for user in opened.open(shard).index().users.tolist()}
    assert users == {low_md5("anna")}
    found = read_histories(opened, [*users], ["ts", "item"]).columns
    assert found["ts"].tolist() == [1, 2]
    assert found["item"].tolist() == [low_md5("book")] * 2


def low_md5(text):
    return int.from_bytes(hashlib.md5(text.encode()).digest()[8:], "little", signed=True)

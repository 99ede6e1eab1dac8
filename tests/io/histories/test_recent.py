"""`gmeta.io.RecentHistories` beside plain Python: what snapshots log, and how events get into a store."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta import io
from gmeta.core.data_manifest import hash_text
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.io.reader_stats import as_data_error
from gmeta.preprocess import ColumnSpec, HistorySpec, PrepareConfig, TableSpec, prepare
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.history.example_sets import drop_generations
from gmeta.preprocess.history.generation import Generation
from gmeta.preprocess.history.reading import export_history, read_histories
from gmeta.preprocess.history.rebuild import compact_history
from gmeta.preprocess.history.shard_reader import history_crc_of_splits
from support.reference.history import Event, crc_of, draw_day, history_of, write_day

HISTORY = ["item", "price"]
SPEC = HistorySpec("user", "ts", shards=3, stripe_events=4)
FOREVER = 2**63 - 1


def values_of(event):
    return {"ts": event.ts, "item": event.item, "price": event.price}


class World:
    """A store, its recent events, and the same events in lists."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.days = folder, [draw_day(0, 30, users=4, day=0)]
        append_history(folder / "store", write_day(folder / "0.parquet", self.days[0]), SPEC)
        self.segments: list[list[Event]] = []  # sealed, and not in the generation that is read
        self.current: list[Event] = []
        self.files: dict[int, Path] = {}  # drained and not appended: number in `segments` -> file
        self.logged: list[tuple[int, int, int | None, int | None, io.HistorySnapshot]] = []
        self.generation, self.in_store = 1, set[int]()
        self.recent = self.open()

    def open(self) -> io.RecentHistories:
        return io.RecentHistories(self.folder / "store", HISTORY, journal=self.folder / "journal", sync=None)

    def append(self, events: list[Event]) -> None:
        if len(events) == 1:
            self.recent.append(events[0].user, values_of(events[0]))
        else:
            users, times, items, prices = (np.array(own) for own in zip(*events, strict=True))
            self.recent.append_many(users, {"ts": times, "item": items, "price": prices})
        self.current += events

    def refresh(self, expected: int | None = None) -> None:
        assert expected in (None, len(self.days))
        self.generation = len(self.days)
        for number in self.in_store:
            self.segments[number] = []
        assert self.recent.generation == self.generation
        assert self.recent.events == sum(map(len, self.segments)) + len(self.current)

    def seal(self) -> None:
        self.segments += [self.current] if self.current else []
        self.current = []

    def drain(self) -> None:
        found = self.recent.drain(self.folder / "outbox")
        self.seal()
        self.refresh()
        waiting = [number for number, own in enumerate(self.segments) if own]
        assert len(found) == len(waiting)
        self.files = dict(zip(waiting, found, strict=True))

    def store(self, which: int) -> None:
        """Append one of the drained files, or all of them."""
        chosen = sorted(self.files)[which % len(self.files) :] if self.files else []
        if chosen:
            append_history(self.folder / "store", [self.files.pop(number) for number in chosen])
            self.days.append([event for number in chosen for event in self.segments[number]])
            self.in_store |= set(chosen)

    def others(self, events: list[Event]) -> None:
        """Append events that came another way."""
        number = len(self.days)
        append_history(
            self.folder / "store", write_day(self.folder / f"{number}.parquet", events), watermark=10**6
        )
        self.days.append(events)

    def compact(self) -> None:
        compact_history(self.folder / "store")
        self.days.append([])

    def reopen(self) -> None:
        self.recent.close()
        self.recent = self.open()
        self.seal()
        self.refresh()

    def tail(self, user: int, until: int, window: int | None) -> list[Event]:
        recent = [event for own in (*self.segments, self.current) for event in own]
        start = -(2**63) if window is None else until - window
        mine = [event for event in recent if event.user == user and start <= event.ts < until]
        return sorted(mine, key=lambda event: event.ts)

    def expected(self, user: int, until: int, longest: int | None, window: int | None):
        """The history as (is it of the tail, event), as it is known now."""
        start = -(2**63) if window is None else until - window
        stored = history_of(self.days, user, start=start, until=until, generation=self.generation)
        both = [(False, event) for event in stored] + [
            (True, event) for event in self.tail(user, until, window)
        ]
        both.sort(key=lambda each: each[1].ts)
        return both[-longest:] if longest else both

    def snapshot(self, user: int, until: int, longest: int | None, window: int | None) -> None:
        seen = self.recent.snapshot(user, until, longest=longest, window=window)
        both = self.expected(user, until, longest, window)
        for name in HISTORY:
            assert seen.columns[name].tolist() == [getattr(event, name) for _, event in both]
        for name in (*HISTORY, "ts"):
            assert seen.tail[name].tolist() == [getattr(event, name) for of_tail, event in both if of_tail]
        assert (seen.generation, seen.length) == (self.generation, len(both))
        assert seen.crc == crc_of([[getattr(event, name) for _, event in both] for name in HISTORY])
        assert (seen.columns["item"].dtype, seen.tail["price"].dtype) == (np.int64, np.float32)
        self.logged.append((user, until, longest, window, seen))

    def check(self) -> None:
        """Rebuild every history that was logged from the newest generation."""
        newest = Generation(self.folder / "store")
        for user, until, longest, window, seen in self.logged:
            assert rebuilt_crc(newest, user, until, longest, window, seen) == seen.crc


def rebuilt_crc(newest, user, until, longest, window, seen):
    start = None if window is None else until - window
    stored = read_histories(
        newest, [user], [*HISTORY, "ts"], start=start, until=until, generation=seen.generation
    ).columns
    both = {name: np.concatenate([stored[name], seen.tail[name]]) for name in (*HISTORY, "ts")}
    order = np.argsort(both["ts"], kind="stable")[-(longest or FOREVER) :]
    columns = [both[name][order] for name in HISTORY]
    return history_crc_of_splits([0, len(order)], columns)[0]


def events(most: int):
    price = st.sampled_from([0.0, 0.25, 1.5])
    one = st.builds(Event, st.integers(0, 4), st.integers(0, 1200), st.integers(0, 5), price)
    return st.lists(one, min_size=1, max_size=most)


SNAPSHOT = st.tuples(
    st.just("snapshot"),
    st.integers(0, 5),
    st.integers(0, 1300),
    st.none() | st.integers(1, 12),
    st.none() | st.integers(1, 900),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), events(1)),
        st.tuples(st.just("append"), events(9)),
        SNAPSHOT,
        SNAPSHOT,
        st.tuples(st.just("drain")),
        st.tuples(st.just("store"), st.integers(0, 3)),
        st.tuples(st.just("others"), events(6)),
        st.tuples(st.just("compact")),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("refresh")),
    ),
    max_size=16,
)


@settings(max_examples=12)
@given(steps=STEPS)
def test_any_sequence_of_operations_agrees_with_lists(steps):
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for name, *arguments in [*steps, ("drain",), ("store", 0), ("refresh",)]:
            if name == "refresh":
                world.refresh(world.recent.refresh())
            else:
                getattr(world, name)(*arguments)
        for user in range(6):
            world.snapshot(user, 1300, None, None)
        world.check()
        world.recent.close()
        # Each event is in the store once.
        export_history(world.folder / "store", world.folder / "all")
        table = pa.concat_tables(map(pq.read_table, (world.folder / "all").glob("*.parquet")))
        found = sorted(zip(*(table[name].to_pylist() for name in Event._fields), strict=True))
        assert found == sorted(tuple(event) for day in world.days for event in day)


def test_many_snapshots_are_those_of_one_user_each(tmp_path):
    world = World(tmp_path)
    world.append(draw_day(1, 60, users=5, day=0))
    users, times = np.arange(12) % 6, np.arange(12) * 100
    for arguments in ({}, {"longest": 5}, {"window": 300}, {"window": FOREVER, "longest": 9}):
        found = world.recent.snapshot_many(users, times, **arguments)
        for row, (user, time) in enumerate(zip(users.tolist(), times.tolist(), strict=True)):
            single = world.recent.snapshot(user, time, **arguments)
            own, tail = (slice(*splits[row : row + 2]) for splits in (found.row_splits, found.tail_splits))
            for name in HISTORY:
                np.testing.assert_array_equal(found.columns[name][own], single.columns[name])
            for name in single.tail:
                np.testing.assert_array_equal(found.tail[name][tail], single.tail[name])
            logged = (found.generations[row], found.lengths[row], found.crcs[row])
            assert logged == (single.generation, single.length, single.crc)
    assert world.recent.snapshot_many([], 5).row_splits.tolist() == [0]


# What rankers log while events arrive, late ones too, and segments go into the store.


def write_examples(folder, logged):
    """Prepare exposures, one record each, with what their rankers logged."""
    rows = {
        "user": [row[0] for row in logged],
        "ts": [row[1] for row in logged],
        "item": list(range(len(logged))),
        "click": [1.0] * len(logged),
        "version": [row[-1].generation for row in logged],
        "history_crc": [row[-1].crc for row in logged],
        "history_length": [row[-1].length for row in logged],
        **{f"tail_{name}": [row[-1].tail[name].tolist() for row in logged] for name in (*HISTORY, "ts")},
    }
    types = {name: pa.list_(pa.int64()) for name in ("tail_item", "tail_ts")}
    types["tail_price"] = pa.list_(pa.float32())
    table = pa.table({name: pa.array(own, types.get(name)) for name, own in rows.items()})
    pq.write_table(table, folder / "shown.parquet")
    columns = {name: ColumnSpec() for name in rows}
    spec = TableSpec("user", time="ts", label="click", columns=columns)
    prepare(folder / "shown.parquet", folder / "examples", PrepareConfig(batch_rows=1), spec=spec)
    return folder / "examples" / "train"


def examples_found(path, store, check, **arguments):
    batches = io.late(
        path,
        io.HistoryStore(store),
        history=HISTORY,
        targets=["item"],
        generation="version",
        tail={name: f"tail_{name}" for name in (*HISTORY, "ts")},
        check=check,
        sequences_per_batch=64,
        **arguments,
    )
    return sum(len(batch["task"]) for batch in batches)


@pytest.fixture(scope="module")
def rankers(tmp_path_factory):
    """Exposures of three threads, while two append and one moves segments into the store."""
    folder = tmp_path_factory.mktemp("rankers")
    world, logged, failures = World(folder), [], []
    done = threading.Event()

    def guard(work):
        def run(seed):
            try:
                work(np.random.default_rng(seed))
            except BaseException as error:
                failures.append(error)

        return run

    @guard
    def append(drawn):
        while not done.is_set():
            users, times = drawn.integers(0, 5, 3), drawn.integers(0, 2000, 3)  # many of them late
            world.recent.append(int(users[0]), {"ts": int(times[0]), "item": 7, "price": 0.5})
            world.recent.append_many(users, {"ts": times, "item": users, "price": drawn.random(3)})
            done.wait(0.001)

    @guard
    def rank(drawn):
        own = []
        while not done.is_set():
            user, until, longest = (int(drawn.integers(*ends)) for ends in ((0, 6), (500, 2100), (5, 60)))
            own.append((user, until, 40, None, world.recent.snapshot(user, until, longest=40)))
            batch = world.recent.snapshot_many([user, user], [until, until], longest=longest)
            assert batch.lengths.max() <= longest
            done.wait(0.005)
        logged.extend(own)

    threads = [threading.Thread(target=append, args=[seed]) for seed in range(2)]
    threads += [threading.Thread(target=rank, args=[seed]) for seed in range(3)]
    for thread in threads:
        thread.start()
    files = []
    for number in range(4):
        files += [file for file in world.recent.drain(folder / "outbox") if file not in files]
        if number != 1:  # the second segment goes into the store with the third, or later
            append_history(folder / "store", files)
            files = []
        if number == 2:
            compact_history(folder / "store")
        world.recent.refresh()
    done.set()
    for thread in threads:
        thread.join()
    append_history(folder / "store", world.recent.drain(folder / "outbox"))
    assert failures == []
    world.recent.close()
    return folder, logged


def test_late_rebuilds_every_history_that_was_logged(rankers):
    folder, logged = rankers
    assert len({row[-1].generation for row in logged}) > 1
    assert sum(len(row[-1].tail["ts"]) > 0 for row in logged) > 20
    path = write_examples(folder, logged)
    assert examples_found(path, folder / "store", "crc", longest=40) == len(logged)
    assert examples_found(path, folder / "store", "length", longest=40) == len(logged)


@pytest.mark.parametrize("lost", ["tail event", "generation"])
def test_late_finds_what_a_ranker_did_not_log(rankers, tmp_path, lost):
    folder, logged = rankers
    with_tail = [row for row in logged if len(row[-1].tail["ts"]) > 0]
    row = min(with_tail, key=lambda row: len(row[-1].tail["ts"]))  # without its only event, lists are empty
    if lost == "tail event":
        shorter = {name: own[1:] for name, own in row[-1].tail.items()}
        wrong = row[-1]._replace(tail=shorter)
    else:
        wrong = row[-1]._replace(generation=Generation(folder / "store").manifest.generation)
    path = write_examples(tmp_path, [(*row[:-1], wrong)])
    with pytest.raises(tf.errors.DataLossError) as raised:
        examples_found(path, folder / "store", "crc", longest=40)
    assert f"user {row[0]}, generation {wrong.generation}: the history has the checksum" in str(
        as_data_error(raised.value)
    )


# Stores of other forms.


def test_texts_units_and_names_of_a_store_are_kept(tmp_path):
    """A store's numbers are appended as they are, whatever its spec does to tables."""
    table = pa.table({"who": ["ann", "bob"], "at": [1.5, 2.0], "what": ["tea", "pie"], "stars": [5, 2]})
    pq.write_table(table, tmp_path / "1.parquet")
    columns = {
        "time": ColumnSpec("at", format="seconds"),
        "item": ColumnSpec("what", hash=True),
        "liked": ColumnSpec("stars", positive=">= 4"),
    }
    spec = HistorySpec("who", "time", columns, {"a": ("item",), "b": ("liked",)})
    append_history(tmp_path / "store", tmp_path / "1.parquet", spec)
    recent = io.RecentHistories(tmp_path / "store", ["item", "time"])
    recent.append("ann", {"time": 3_000_000, "item": "ham", "liked": 1.0})
    recent.append_many(["bob", "ann"], {"time": [1, 2], "item": ["ham", "pie"], "liked": [0, 1]})
    recent.append(hash_text("ann"), {"time": 1_500_000, "item": hash_text("jam"), "liked": 0})
    expected = [hash_text(text) for text in ("pie", "tea", "jam", "ham")]
    before = recent.snapshot("ann", 4_000_000)
    assert before.columns["item"].tolist() == expected
    append_history(tmp_path / "store", recent.drain(tmp_path / "outbox"))
    recent.refresh()
    after = recent.snapshot("ann", 4_000_000)
    assert (after.columns["item"].tolist(), after.tail["item"].tolist()) == (expected, [])
    assert (before.crc, before.generation, after.generation) == (after.crc, 1, 2)
    liked = read_histories(Generation(tmp_path / "store"), [hash_text("ann")], ["liked"]).columns["liked"]
    assert liked.tolist() == [1.0, 1.0, 0.0, 1.0]


def test_events_go_into_stores_of_their_columns_only(tmp_path):
    world = World(tmp_path)
    world.append(draw_day(1, 5, users=3, day=0))
    files = world.recent.drain(tmp_path / "outbox")
    with pytest.raises(ConfigError, match=r"isn't the store that the events of .* are for: it is empty"):
        append_history(tmp_path / "new", files, SPEC)
    pq.write_table(pa.table({"user": [1], "ts": [2], "size": [3]}), tmp_path / "other.parquet")
    append_history(tmp_path / "other", tmp_path / "other.parquet", HistorySpec("user", "ts"))
    with pytest.raises(ConfigError, match=r"events of a store with .* has user \(int64\), ts .* size"):
        append_history(tmp_path / "other", files)
    with pytest.raises(ConfigError, match=r"is a table, and .* has events of a store"):
        append_history(tmp_path / "store", [*files, tmp_path / "other.parquet"])
    fewer = HistorySpec("user", "ts", groups={"one": ("item",)}, shards=3, stripe_events=4)
    compact_history(tmp_path / "store", spec=fewer)
    with pytest.raises(ConfigError, match=r"the columns of .* have changed with generation 2"):
        world.recent.refresh()


def test_a_dropped_generation_is_left_for_a_newer_one(tmp_path):
    world = World(tmp_path)
    world.compact()
    drop_generations(tmp_path / "store", [1])
    assert world.recent.generation == 1
    world.generation = 2
    world.snapshot(1, 1000, None, None)
    assert world.recent.generation == 2


def test_damage_names_the_file_and_the_user(tmp_path):
    world = World(tmp_path)
    for path in (tmp_path / "store/generations").rglob("*.events"):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(
        DataError, match=r"shard-0000\d.events at byte \d+: user 1, stripe of .* generation 1"
    ):
        world.recent.snapshot(1, 1000)
    assert world.recent.snapshot(77, 1000).length == 0


@pytest.mark.parametrize(
    ("event", "kind", "words"),
    [
        ({"ts": 1, "item": 2}, ConfigError, "an event has the store's columns ts, item, price; got ts, item"),
        ({"ts": 1, "item": 2, "price": 1.0, "size": 3}, ConfigError, "got ts, item, price, size"),
        (
            {"ts": 1, "item": 2.5, "price": 1.0},
            DataError,
            "column 'item' takes 1 values of int64, got float64",
        ),
        ({"ts": 1, "item": "a", "price": 1.0}, DataError, "column 'item' takes 1 values of int64"),
        ({"ts": 2**63, "item": 2, "price": 1.0}, DataError, "column 'ts' takes 1 values of int64"),
        ({"ts": 1, "item": 2, "price": float("nan")}, DataError, "NaN or infinite"),
        ({"ts": 1, "item": 2, "price": 1e39}, DataError, "NaN or infinite"),
        ({"ts": FOREVER, "item": 2, "price": 1.0}, DataError, "the time of an event must be below"),
    ],
)
def test_other_events_are_refused(tmp_path, event, kind, words):
    recent = World(tmp_path).recent
    with pytest.raises(kind, match=words):
        recent.append(1, event)
    with pytest.raises(kind, match=words):
        recent.append_many([1], {name: [value] for name, value in event.items()})
    assert recent.events == 0


def test_a_negative_zero_is_a_zero_as_in_a_store(tmp_path):
    recent = World(tmp_path).recent
    recent.append(9, {"ts": 1, "item": 2, "price": -0.0})
    recent.append_many([9], {"ts": [2], "item": [2], "price": [-0.0]})
    assert np.signbit(recent.snapshot(9, 5).columns["price"]).tolist() == [False, False]


def test_arguments_out_of_range_are_refused(tmp_path):
    world = World(tmp_path)
    store, recent = tmp_path / "store", world.recent
    for arguments, words in (
        ({"history": []}, "history must be a list"),
        ({"history": "item"}, "history must be a list"),
        ({"history": ["item", "item"]}, "names 'item' twice"),
        ({"history": ["born"]}, "recent events have no 'born'"),
        ({"history": ["colour"]}, "no column 'colour'"),
        ({"sync": 0}, "sync must be 'always', None or above 0"),
        ({"memory_limit": 0}, "memory_limit must be a whole number"),
        ({"store": "s3://bucket/store"}, "reads stores of this machine"),
    ):
        with pytest.raises(ConfigError, match=words):
            io.RecentHistories(**({"store": store, "history": HISTORY} | arguments))
    for arguments in ({"longest": 0}, {"window": 0}):
        with pytest.raises(ConfigError, match="must be a whole number from 1 on"):
            recent.snapshot(1, 5, **arguments)
        with pytest.raises(ConfigError, match="must be a whole number from 1 on"):
            recent.snapshot_many([1], 5, **arguments)
    with pytest.raises(ConfigError, match="user and time must be int64"):
        recent.snapshot(1, 2.5)
    with pytest.raises(DataError, match="'ts' takes 2 values"):
        recent.snapshot_many([1, 2], [5, 6, 7])


def test_memory_is_bounded(tmp_path):
    append_history(tmp_path / "store", write_day(tmp_path / "0.parquet", draw_day(0, 9)), SPEC)
    recent = io.RecentHistories(tmp_path / "store", HISTORY, memory_limit=20_000)
    event = {"ts": 1, "item": 2, "price": 1.0}
    while recent.bytes < 20_000:
        recent.append(recent.events, event)
    with pytest.raises(GmetaError, match=r"recent events take 20,... bytes, the memory_limit: drain them"):
        recent.append(5, event)
    assert 100 < recent.events < 300
    assert recent.bytes < 21_000
    append_history(tmp_path / "store", recent.drain(tmp_path / "outbox"))
    recent.refresh()
    assert (recent.events, recent.bytes) == (0, 0)
    recent.append(5, event)
    assert recent.snapshot(5, 9).columns["item"].tolist()[-1] == 2


def test_a_ranker_loads_no_tensorflow():
    code = "import sys, gmeta; gmeta.io.RecentHistories; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

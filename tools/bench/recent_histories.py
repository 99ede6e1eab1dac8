"""What a ranker waits for at `gmeta.io.RecentHistories`, and whether what it logs is rebuilt.

    python tools/bench/recent_histories.py
    python tools/bench/recent_histories.py --parts check --snapshots 1000000 --json FILE

A store of 5,000 users with 300 events each in the mean, three columns and the time, which the page cache has;
20 more events of each user are recent. Two peers hold all events of all users in memory: lists of tuples in a
dictionary under a lock, and lists of packed events in Redis, by a Unix socket. All return the newest 1,000
events before now as arrays with their checksum, and take turns. Percentiles are of single calls, which a busy
machine interrupts: a 99th percentile of milliseconds is its scheduler's.

append/WHERE/pNN      one event; `journal`: into a journal too, which is flushed each second
append_many           events in batches of 1,000
snapshot/one/pNN      one user
snapshot/batch        a user of a batch of 64
check/snapshots       snapshots that two threads took in batches of 64 while two others appended, a tenth of
                      the events late, and segments of events went into new generations of the store
check/differ          those whose checksum isn't that of the history which TensorFlow and NumPy rebuild from
                      the last generation, by the generation and the tail that the snapshot logged
check/faults          of 1,000 snapshots in whose logged tail an event is missing, those that this finds
check/generations     generations that snapshots read
"""

from __future__ import annotations

import functools
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gmeta  # noqa: F401  before TensorFlow: it selects Keras 2
from gmeta.io import HistoryStore, RecentHistories
from gmeta.io.histories.recent import HistorySnapshots
from gmeta.preprocess import HistorySpec
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.history.rebuild import compact_history
from gmeta.preprocess.history.shard_reader import history_crc_of_splits

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf
from harness import Result, parser, report
from parts.recent_peers import EVENT, Lists, Redis

HISTORY = ["item", "action", "price"]
NOW, LONGEST, RECENT, BATCH, EACH, GROUP = 10**9, 1000, 20, 64, 300, 128


def draw(random: np.random.Generator, users: np.ndarray, times: np.ndarray) -> dict[str, np.ndarray]:
    """Draw the columns of events."""
    count = len(users)
    return {
        "user": users,
        "ts": times,
        "item": random.zipf(1.3, count) % 100_000,
        "action": random.integers(0, 6, count),
        "price": random.random(count, np.float32),
    }


def columns_of(events: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the columns beside the user."""
    return {name: own for name, own in events.items() if name != "user"}


def percentiles(calls: dict[str, Callable[[int], Any]], count: int, rounds: int) -> dict[str, np.ndarray]:
    """Return name -> the 50th and 99th percentile of a call in microseconds: medians of rounds."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in calls}
    clock = time.perf_counter_ns
    for number in range(rounds + 1):
        for name, call in calls.items():
            took = np.empty(count)
            for i in range(count):
                start = clock()
                call(i)
                took[i] = clock() - start
            if number:
                found[name].append(np.percentile(took, [50, 99]) / 1000)
    return {name: np.median(own, axis=0) for name, own in found.items()}


def against(name: str, unit: str, own: float, peers: dict[str, float | None]) -> list[Result]:
    """Compare a figure with each peer's."""
    return [Result(name, own, unit, peer, value) for peer, value in peers.items()]


def speed(folder: Path, base: dict[str, np.ndarray], users: int, rounds: int, count: int) -> list[Result]:
    """Time appends and snapshots beside the peers."""
    random = np.random.default_rng(1)
    plain = RecentHistories(folder / "store", HISTORY)
    journal = RecentHistories(folder / "store", HISTORY, journal=folder / "journal")
    lists, redis = Lists(), Redis() if Redis.installed() else None
    peers = [lists, redis] if redis else [lists]
    order = np.argsort(base["user"], kind="stable")
    rows = np.empty(len(order), EVENT)
    for name in EVENT.names or ():
        rows[name] = base[name][order]
    bounds = np.searchsorted(base["user"][order], np.arange(users + 1))
    for user in range(users):
        own = rows[bounds[user] : bounds[user + 1]]
        lists._users[user] = own.tolist()
        if redis:
            redis.load(user, own)
    recent = draw(random, np.repeat(np.arange(users), RECENT), np.arange(users * RECENT) + NOW // 2)
    plain.append_many(recent["user"], columns_of(recent))
    for i in range(users * RECENT):
        event = {name: own[i].item() for name, own in columns_of(recent).items()}
        for peer in peers:
            peer.append(int(recent["user"][i]), event)
    asked = random.integers(0, users, count).tolist()
    same = [
        np.array([one.snapshot(user, NOW, longest=LONGEST).crc for user in asked]) for one in (plain, *peers)
    ]
    assert all((own == same[0]).all() for own in same), "the peers return other histories"
    results = []
    calls = {"gmeta": lambda i: plain.snapshot(asked[i], NOW, longest=LONGEST)}
    calls |= {
        type(peer).__name__: (lambda i, peer=peer: peer.snapshot(asked[i], NOW, LONGEST)) for peer in peers
    }
    many = np.array(asked)
    places = [place * BATCH for place in range(count // BATCH)]
    calls["batch"] = lambda i: plain.snapshot_many(
        many[places[i % len(places)] :][:BATCH], NOW, longest=LONGEST
    )
    took = percentiles(calls, count, rounds)
    for place, which in enumerate(("p50", "p99")):
        own = {name: took[key][place] if key in took else None for name, key in PEERS.items()}
        results += against(f"recent/histories/snapshot/one/{which}", "us", took["gmeta"][place], own)
    results.append(Result("recent/histories/snapshot/batch", took["batch"][0] / BATCH, "us"))
    event = {"ts": NOW, "item": 7, "action": 2, "price": 0.5}
    calls = {
        "memory": lambda i: plain.append(asked[i], event),
        "journal": lambda i: journal.append(asked[i], event),
        **{type(peer).__name__: (lambda i, peer=peer: peer.append(asked[i], event)) for peer in peers},
    }
    took = percentiles(calls, count, rounds)
    for where in ("memory", "journal"):
        for place, which in enumerate(("p50", "p99")):
            own = {name: took[key][place] * 1000 if key in took else None for name, key in PEERS.items()}
            results += against(
                f"recent/histories/append/{where}/{which}", "ns", took[where][place] * 1000, own
            )
    for name, one in (("memory", plain), ("journal", journal)):
        batch = draw(random, random.integers(0, users, 1000), np.full(1000, NOW))
        call = functools.partial(one.append_many, batch["user"], columns_of(batch))
        took = percentiles({"many": lambda _, call=call: call()}, 20, rounds)
        results.append(Result(f"recent/histories/append_many/{name}", 1e9 / took["many"][0], "events/s"))
    if redis:
        redis.close()
    journal.close()
    return results


PEERS = {"a dictionary of lists": "Lists", "Redis": "Redis"}


def check(folder: Path, users: int, snapshots: int) -> list[Result]:
    """Take snapshots while events arrive and move, and rebuild each of them."""
    recent = RecentHistories(folder / "store", HISTORY, journal=folder / "checked")
    logged: list[tuple[Any, ...]] = []
    failures: list[BaseException] = []
    left, lock, done = [snapshots], threading.Lock(), threading.Event()

    def guard(work: Callable[[np.random.Generator], None]) -> Callable[[int], None]:
        def run(seed: int) -> None:
            try:
                work(np.random.default_rng(seed))
            except BaseException as error:
                failures.append(error)
                done.set()

        return run

    @guard
    def rank(random: np.random.Generator) -> None:
        while not done.is_set():
            with lock:
                left[0] -= BATCH
                if left[0] <= -BATCH:
                    return
            asked, until = random.integers(0, users, BATCH), NOW - random.integers(0, NOW // 2, BATCH)
            longest = int(random.integers(50, LONGEST))
            seen = recent.snapshot_many(asked, until, longest=longest)
            logged.append((asked, until, longest, seen._replace(columns={})))  # only what is logged

    @guard
    def append(random: np.random.Generator) -> None:
        while not done.is_set():
            late = random.random(50) < 0.1
            times = np.where(late, random.integers(0, NOW // 4, 50), NOW - random.integers(1, NOW // 2, 50))
            events = draw(random, random.integers(0, users, 50), times)
            recent.append_many(events["user"], columns_of(events))
            done.wait(0.02)

    started = time.perf_counter()
    readers = [threading.Thread(target=rank, args=[seed]) for seed in (0, 1)]
    writers = [threading.Thread(target=append, args=[seed]) for seed in (10, 11)]
    for thread in (*readers, *writers):
        thread.start()
    moves = 0
    while any(thread.is_alive() for thread in readers) and not done.is_set():
        files = recent.drain(folder / "outbox")
        if files:
            append_history(folder / "store", files)
        moves += 1
        if moves % 4 == 0:
            compact_history(folder / "store")
        recent.refresh()
        done.wait(1.0)
    for thread in readers:
        thread.join()
    seconds = time.perf_counter() - started
    done.set()
    for thread in writers:
        thread.join()
    recent.close()
    if failures:
        raise failures[0]
    restored = RecentHistories(folder / "store", HISTORY, journal=folder / "checked")
    append_history(folder / "store", restored.drain(folder / "outbox"))
    store, differ, faults, planted, generations = HistoryStore(folder / "store"), 0, 0, 0, set[int]()
    taken = sum(len(each[0]) for each in logged)
    tails = sum(len(each[3].tail["ts"]) for each in logged)
    while logged:
        group = join(logged[-GROUP:])
        del logged[-GROUP:]
        differ += int((rebuilt(store, *group) != group[3].crcs).sum())
        generations |= set(group[3].generations.tolist())
        rows = np.flatnonzero(np.diff(group[3].tail_splits))[: 1000 - planted]
        if len(rows):
            found = rebuilt(store, *group[:3], without(group[3], rows)) != group[3].crcs
            faults, planted = faults + int(found[rows].sum()), planted + len(rows)
    return [
        Result("recent/histories/check/snapshots", taken, "snapshots"),
        Result("recent/histories/check/rate", taken / seconds, "snapshots/s"),
        Result("recent/histories/check/tails", tails, "events"),
        Result("recent/histories/check/generations", len(generations), "generations"),
        Result("recent/histories/check/differ", differ, "snapshots"),
        Result("recent/histories/check/faults", faults / max(planted, 1), "of those planted"),
    ]


def join(logged: list[tuple[Any, ...]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, HistorySnapshots]:
    """Return the users, times, longest lengths and snapshots of several batches as one."""
    seen = [each[3] for each in logged]
    sizes = np.concatenate([np.diff(each.tail_splits) for each in seen])
    one = HistorySnapshots(
        np.zeros(0, np.int64),
        {},
        np.concatenate([each.generations for each in seen]),
        np.concatenate([[0], np.cumsum(sizes)]),
        {name: np.concatenate([each.tail[name] for each in seen]) for name in seen[0].tail},
        np.concatenate([each.crcs for each in seen]),
    )
    longest = np.repeat([each[2] for each in logged], [len(each[0]) for each in logged])
    return (*(np.concatenate([each[part] for each in logged]) for part in (0, 1)), longest, one)


def without(seen: HistorySnapshots, rows: np.ndarray) -> HistorySnapshots:
    """Return snapshots that lack the first event of some rows' tails."""
    events, sizes = seen.tail_splits[rows], np.diff(seen.tail_splits)
    sizes[rows] -= 1
    return seen._replace(
        tail_splits=np.concatenate([[0], np.cumsum(sizes)]),
        tail={name: np.delete(own, events) for name, own in seen.tail.items()},
    )


def rebuilt(
    store: HistoryStore, asked: np.ndarray, until: np.ndarray, longest: np.ndarray, seen: HistorySnapshots
) -> np.ndarray:
    """Return the checksums of histories that are rebuilt from a store and what was logged."""
    names = [*HISTORY, "ts"]
    stored = store.read(asked, names, until=until, generation=seen.generations)
    rows = np.arange(len(asked))
    owner = np.concatenate([stored["ts"].value_rowids(), np.repeat(rows, np.diff(seen.tail_splits))])
    both = {name: np.concatenate([stored[name].values, seen.tail[name]]) for name in names}
    order = np.lexsort([both["ts"], owner])  # stable: the store's come first
    owner = owner[order]
    ends = np.searchsorted(owner, rows, side="right")
    order = order[np.arange(len(order)) >= (ends - longest)[owner]]
    kept = np.minimum(np.bincount(owner, minlength=len(rows)), longest)
    return history_crc_of_splits(
        np.concatenate([[0], np.cumsum(kept)]), [both[name][order] for name in HISTORY]
    )


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--users", type=int, default=5000, help="users in the store (%(default)s)")
    options.add_argument(
        "--parts",
        nargs="+",
        choices=("speed", "check"),
        default=["speed", "check"],
        help="what to run (%(default)s)",
    )
    options.add_argument("--calls", type=int, default=2000, help="calls of a round (%(default)s)")
    options.add_argument("--snapshots", type=int, default=200_000, help="snapshots to check (%(default)s)")
    options = options.parse_args()
    users, snapshots, count = options.users, options.snapshots, options.calls
    if options.smoke:
        users, snapshots, count = 60, 2000, 100
    random = np.random.default_rng(0)
    tf.config.set_visible_devices([], "GPU")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times = np.sort(random.integers(0, NOW // 2, users * EACH))
        base = draw(random, random.integers(0, users, users * EACH), times)
        pq.write_table(pa.table(base), folder / "base.parquet")
        append_history(folder / "store", folder / "base.parquet", HistorySpec("user", "ts"))
        results = speed(folder, base, users, options.rounds, count) if "speed" in options.parts else []
        results += check(folder, users, snapshots) if "check" in options.parts else []
    report(f"{users:,} users of {EACH} events, and {RECENT} recent ones", results, options.json)


if __name__ == "__main__":
    main()

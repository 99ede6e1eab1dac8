"""A store that grows by a day at a time, and the requests of its users."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from gmeta.preprocess import HistorySpec
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.history.rebuild import compact_history

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from parts.history_formats.events import BEGIN, COLUMNS, DAY, Events, make_events

OWN = tuple(name for name in COLUMNS if name not in ("time", "birth"))
REQUESTS = 20  # requests of a user
SHARDS = 8


@dataclass(frozen=True)
class Requests:
    """Requests for what users had done, in the order of time.

    Attributes:
      user: (R,) int64.
      time: (R,) int64: earlier events count.
      generation: (R,) int64: the generation of that morning, whose events count.
    """

    user: NDArray[np.int64]
    time: NDArray[np.int64]
    generation: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.user)

    def __getitem__(self, chosen: NDArray[np.int64] | slice) -> Requests:
        return Requests(self.user[chosen], self.time[chosen], self.generation[chosen])


@dataclass(frozen=True)
class Grown:
    """A store whose generations 1 to `days` are days, and whose next one is compact.

    Attributes:
      path: Its folder.
      days: The number of its days.
      events: The number of its events.
      requests: `REQUESTS` requests of each user, each right after an event.
      written: (days,) bytes of events that each append wrote.
      appended: Bytes of events in the stripes of generation `days`.
      compacted: Bytes of the compact generation, its index included.
      append_rate: Events per second of processor time of one append of all days.
      compact_rate: The same of the compaction.
      day_seconds: Processor time of the append of a day, the median of the last nine.
    """

    path: Path
    days: int
    events: int
    requests: Requests
    written: NDArray[np.int64]
    appended: int
    compacted: int
    append_rate: float
    compact_rate: float
    day_seconds: float


def grow(folder: Path, users: int, mean: int, days: int) -> Grown:
    """Draw events, and append them day by day.

    Args:
      folder: An empty one.
      users: The number of users.
      mean: The mean number of events of a user.
      days: The number of days.
    """
    events = make_events(users, mean, days=days, shortest=days - 1)
    files, spec = _write_days(folder, events, days), HistorySpec("user", "time", shards=SHARDS)
    store, written, seconds = folder / "store", [], []
    for file in files:
        start = time.process_time()
        written.append(append_history(store, file, spec).bytes)
        seconds.append(time.process_time() - start)
    appended = _stripe_bytes(store)
    start = time.process_time()
    compact_history(store)
    compact_seconds = time.process_time() - start
    start = time.process_time()
    append_history(folder / "at-once", files, spec)
    append_seconds = time.process_time() - start
    sizes = (file.stat().st_size for file in (store / "generations" / f"{days + 1:08d}").iterdir())
    return Grown(
        store,
        days,
        len(events),
        _draw_requests(events),
        np.array(written),
        appended,
        sum(sizes),
        len(events) / append_seconds,
        len(events) / compact_seconds,
        float(np.median(seconds[-9:])),
    )


def _write_days(folder: Path, events: Events, days: int) -> list[Path]:
    """Write the events that arrive on each day as a Parquet file."""
    birth = events.columns["birth"]
    order = np.argsort(birth, kind="stable")
    edges = np.searchsorted(birth[order], np.arange(days + 1))
    user = np.repeat(events.users, events.ends - events.begins)
    files = [folder / f"{day:02d}.parquet" for day in range(days)]
    for day, file in enumerate(files):
        own = order[edges[day] : edges[day + 1]]
        columns = {name: events.columns[name][own] for name in ("time", *OWN)}
        pq.write_table(pa.table({"user": user[own], **columns}), file)
    return files


def _stripe_bytes(store: Path) -> int:
    from gmeta.preprocess.history.generation import Generation

    opened = Generation(store)
    return sum(int(opened.open(shard).index().places["bytes"].sum()) for shard in range(SHARDS))


def _draw_requests(events: Events) -> Requests:
    """Draw requests right after events of their users, so that users are active when they request."""
    rng = np.random.default_rng(1)
    sizes = np.repeat(events.ends - events.begins, REQUESTS)
    after = np.repeat(events.begins, REQUESTS) + (rng.random(len(sizes)) * sizes).astype(np.int64)
    until = events.columns["time"][after] + 1
    order = np.argsort(until, kind="stable")
    user = np.repeat(events.users, REQUESTS)
    # In the morning of day d, counted from 0, the store has generations 1 to d.
    generation = np.maximum((until - BEGIN) // DAY, 1)
    return Requests(user[order], until[order], generation[order])

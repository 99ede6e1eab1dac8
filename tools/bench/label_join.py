"""The rate at which exposures are joined with clicks that come up to an hour later.

    python tools/bench/label_join.py
    python tools/bench/label_join.py --open 1000000 --json FILE

A log of exposures, of which one in twenty is clicked at any time in the following hour; one in a hundred is
up to five seconds late. First, exposures come until so many are open; the rounds after that are timed. A row
has a text as key, two int64 and three floats; a push has 16,384 exposures. The peer is what a script does: a
dict by key, and a heap of deadlines, a row at a time, which takes and returns the same RecordBatches.

events         rows of the log a second; all rows in memory, and all but 32 MiB of them in files
processor      seconds of processor time for a million rows of the log, which other programs disturb less
memory         the process' own memory that it takes to have so many open, files excluded
index, rows    what the join itself counts of it; files are counted apart
state          its bytes, and the time to take it and to restore it
"""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gmeta.io.streams.late_labels import LabelJoin

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from harness import WARM_UP, Result, interleave, parser, report

SECOND = 10**6
HOUR, LATENESS = 3600 * SECOND, 10 * SECOND
CLICKED, LATE, PUSH = 0.05, 0.01, 1 << 14
PEER = "dict and heap"


class Push(NamedTuple):
    """The arguments of `LabelJoin.push`."""

    keys: np.ndarray
    times: np.ndarray
    sides: np.ndarray
    parts: np.ndarray
    exposures: Any
    outcomes: Any


def log(opened: int) -> Iterator[Push]:
    """An endless log; `shown_until` exposures of it come within an hour and the lateness."""
    rng = np.random.default_rng(0)
    step = (HOUR + LATENESS) / shown_until(opened)
    first, clicks, clicked = 0, np.empty(0, np.int64), np.empty(0, np.int64)
    while True:
        shown = (np.arange(first, first + PUSH) * step).astype(np.int64)
        chosen = np.flatnonzero(rng.random(PUSH) < CLICKED)
        clicks = np.concatenate([clicks, shown[chosen] + rng.integers(0, HOUR - 5 * SECOND, len(chosen))])
        clicked = np.concatenate([clicked, first + chosen])
        due = np.flatnonzero(clicks <= shown[-1])
        due = due[np.argsort(clicks[due], kind="stable")]
        keys = np.concatenate([shown, clicks[due]])
        order = np.argsort(keys, kind="stable")
        sides = np.repeat(np.array([0, 1], np.uint8), [PUSH, len(due)])[order]
        keys = keys[order]
        late = (sides == 0) & (rng.random(len(keys)) < LATE)
        times = keys - np.where(late, rng.integers(0, 5 * SECOND, len(keys)), 0)
        exposures = pa.record_batch(
            {
                "user": rng.integers(0, 10**7, PUSH),
                "item": rng.integers(0, 10**6, PUSH),
                "request": requests(np.arange(first, first + PUSH)),
                "price": rng.random(PUSH, np.float32),
                "position": rng.random(PUSH, np.float32),
                "age": rng.random(PUSH),
            }
        )
        outcomes = pa.record_batch({"request": requests(clicked[due])})
        yield Push(keys, times, sides, np.zeros(len(keys), np.int32), exposures, outcomes)
        left = np.setdiff1d(np.arange(len(clicks)), due)
        clicks, clicked, first = clicks[left], clicked[left], first + PUSH


def shown_until(opened: int) -> int:
    """How many exposures come until so many are open: half of the clicks have come."""
    return int(opened / (1 - CLICKED / 2))


def requests(numbers: np.ndarray) -> Any:
    """The texts of requests."""
    return pc.binary_join_element_wise("request", pc.cast(pa.array(numbers), pa.string()), "-")


class DictAndHeap:
    """The same join in plain Python."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, tuple[Any, ...]]] = {}
        self._deadlines: list[tuple[int, int, str]] = []
        self._number = 0

    def push(self, keys: Any, times: Any, sides: Any, parts: Any, exposures: Any, outcomes: Any) -> Any:
        """Add rows; `parts` isn't needed."""
        rows = zip(*(column.to_pylist() for column in exposures.columns), strict=True)
        clicks = iter(outcomes["request"].to_pylist())
        found: list[tuple[Any, ...]] = []
        labels: list[float] = []
        for key, at, side in zip(keys.tolist(), times.tolist(), sides.tolist(), strict=True):
            while self._deadlines and self._deadlines[0][0] < key:
                closed = self._open.pop(heapq.heappop(self._deadlines)[2])[1]
                if closed:
                    found.append(closed)
                    labels.append(0.0)
            if side == 0:
                row = next(rows)
                request = row[2]
                if request not in self._open:
                    self._open[request] = (at, row)
                    heapq.heappush(self._deadlines, (at + HOUR + LATENESS, self._number, request))
                    self._number += 1
            else:
                request = next(clicks)
                shown, row = self._open.get(request, (key, ()))
                if row and shown <= at < shown + HOUR:
                    found.append(row)
                    labels.append(1.0)
                    self._open[request] = (shown, ())
        columns = list(zip(*found, strict=True)) or [()] * len(exposures.schema)
        arrays = [
            pa.array(values, field.type) for values, field in zip(columns, exposures.schema, strict=True)
        ]
        added = [pa.array(labels, pa.float32()), pa.array(np.ones(len(labels), np.float32))]
        return pa.RecordBatch.from_arrays(
            [*arrays, *added], names=[*exposures.schema.names, "label", "weight"]
        )


def own_memory() -> int:
    """Bytes of this process' memory that aren't pages of files."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def fill(join: Any, opened: int) -> tuple[Iterator[Push], int]:
    """Push until so many exposures are open; return the rest of the log, and the most memory it took."""
    rest, before, peak, shown = log(opened), own_memory(), 0, 0
    while shown < shown_until(opened):
        push = next(rest)
        join.push(*push)
        peak, shown = max(peak, own_memory()), shown + push.exposures.num_rows
    return rest, peak - before


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--open", type=int, default=1_000_000, help="open exposures (%(default)s)")
    options = options.parse_args()
    opened = 40_000 if options.smoke else options.open
    given: dict[str, Any] = {"key": ["request"], "within": HOUR, "lateness": LATENESS}
    joins: dict[str, Any] = {
        "memory": LabelJoin(**given),
        "files": LabelJoin(**given, memory=(opened << 5)),
        PEER: DictAndHeap(),
    }
    took: dict[str, int] = {}
    for name, join in joins.items():
        rest, took[name] = fill(join, opened)
    pushes = 2 if options.smoke else 16
    rounds = [[next(rest) for _ in range(pushes)] for _ in range(WARM_UP + options.rounds)]
    events = float(np.mean([sum(len(push.keys) for push in one) for one in rounds]))
    decided: dict[str, list[Any]] = {name: [] for name in joins}

    processor: dict[str, list[float]] = {name: [] for name in joins}

    def run(name: str) -> Any:
        def push(number: int) -> None:
            start = time.process_time()
            decided[name].append([joins[name].push(*push).num_rows for push in rounds[number]])
            processor[name].append(time.process_time() - start)

        return push

    seconds = interleave({name: run(name) for name in joins}, rounds=options.rounds)
    assert decided["memory"] == decided["files"] == decided[PEER]
    stats = {name: joins[name].stats for name in ("memory", "files")}
    start = time.perf_counter()
    state = joins["files"].state()
    saving = time.perf_counter() - start
    again = LabelJoin(**given, memory=(opened << 5))
    start = time.perf_counter()
    again.restore([state], lambda parts: np.ones(len(parts), np.bool_))
    restoring = time.perf_counter() - start
    assert again.finish() == joins["files"].finish()
    path = f"label_join/open{opened}"
    work = {name: float(np.median(own[WARM_UP:])) * 1e6 / events for name, own in processor.items()}
    results = []
    for name, own in stats.items():
        results += [
            Result(f"{path}/{name}/events", events / seconds[name], "/s", PEER, events / seconds[PEER]),
            Result(f"{path}/{name}/processor", work[name], "s/1M events", PEER, work[PEER]),
            Result(f"{path}/{name}/memory", took[name], "B", PEER, took[PEER]),
            Result(f"{path}/{name}/index", own.index_bytes, "B"),
            Result(f"{path}/{name}/rows", own.memory_bytes, "B"),
            Result(f"{path}/{name}/rows_in_files", own.spilled_bytes, "B"),
        ]
    results += [
        Result(f"{path}/state/bytes", len(state), "B"),
        Result(f"{path}/state/save", saving, "s"),
        Result(f"{path}/state/restore", restoring, "s"),
    ]
    report(
        f"{stats['memory'].open:,} open exposures, {events:,.0f} events a round",
        results,
        options.json,
        clicked=CLICKED,
        late=LATE,
        rows_a_push=PUSH,
    )


if __name__ == "__main__":
    main()

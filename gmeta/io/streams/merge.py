"""What a stream is made of, and the order of its rows: several partitions, in the order of their times.

`Described` has one log, or two that are joined; each `Log` opens its partitions for `Merge`.

A partition's rows keep their order. The key of a row is the largest time up to it in its partition; of a row
that isn't late, its own time. Rows of all partitions are sorted by (key, partition). This order is a function
of the logs alone: neither of the moments at which rows arrive, nor of how many are read at once. A reader
that starts anywhere in it reads the same rest.

A row can be returned when no partition can still produce a row before it, that is, when each other partition
has produced a row of a later key. A partition without traffic would stop all others. With ``idle``, one whose
end was reached that many seconds ago no longer holds up others; only then does the order depend on the clock.

A partition that is added to the log while it is read joins from its first row on. Its rows come after those
that were returned until then, so their keys are at least the largest key of these.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from gmeta.io.streams.late_labels import LabelJoin, added_columns
from gmeta.io.streams.records import (
    Columns,
    Format,
    Ints,
    Rows,
    StreamCounts,
    arrow_schema,
    concat,
    event_times,
)

_AT_ONCE = 8192  # rows that a partition holds ready
_NONE = -(1 << 62)


class Reader(Protocol):
    """The reader of a partition.

    Attributes:
      start: The place at which it began, as JSON values.
      seen: What it has seen besides, which a later reader of the partition gets; None: nothing.
    """

    start: Any
    seen: bytes | None

    def read(self) -> Rows | None:
        """Return the next rows without waiting; None if there are none yet."""
        ...

    @property
    def at_end(self) -> bool:
        """Whether all rows that the partition has are read."""
        ...

    def close(self) -> None:
        """Release the connection."""
        ...


@dataclass(frozen=True)
class Merged:
    """Consecutive rows in the common order.

    Attributes:
      keys: (rows,) int64, ascending.
      times: (rows,) int64 event times in microseconds.
      sides: (rows,) uint8, the number of each row's log.
      parts: (rows,) int32, the number of its partition in that log.
      batches: The rows of each log, in order.
    """

    keys: Ints
    times: Ints
    sides: np.ndarray[Any, np.dtype[np.uint8]]
    parts: np.ndarray[Any, np.dtype[np.int32]]
    batches: Sequence[pa.RecordBatch]


class _Held:
    """Rows of a partition that are read and not returned."""

    def __init__(self, rows: Rows, times: Ints, keys: Ints) -> None:
        self.rows, self.times, self.keys, self.begin = rows, times, keys, 0


class Lane:
    """A partition of a log, in the common order.

    Args:
      side: The number of the log.
      part: The number of the partition.
      reader: Its reader.
      place: Its place when it was opened.
      key: The key of the last row before the place.
      times: A function that returns the event times of rows.
    """

    def __init__(
        self,
        side: int,
        part: int,
        reader: Reader,
        place: Any,
        key: int | None,
        times: Callable[[Rows], Ints],
    ) -> None:
        self.side, self.part, self.reader, self.place = side, part, reader, place
        self.key = _NONE if key is None else key
        self.floor = self.key  # the least key that a row which isn't read yet can have
        self._times = times
        self._held: deque[_Held] = deque()
        self._size = 0
        self._last = time.monotonic()

    def fill(self) -> None:
        """Read what is available."""
        while self._size < _AT_ONCE and (rows := self.reader.read()) is not None:
            times = self._times(rows)
            keys = np.maximum.accumulate(np.maximum(times, self.floor))
            self._held.append(_Held(rows, times, keys))
            self._size += len(keys)
            self.floor = int(keys[-1])
            self._last = time.monotonic()

    def has_ended(self, idle: float | None) -> bool:
        """Return whether the end of the partition was reached, ``idle`` seconds ago or more."""
        return self.reader.at_end and idle is not None and time.monotonic() - self._last >= idle

    def take(self, limit: int, inclusive: bool) -> list[tuple[pa.RecordBatch, Ints, Ints]]:
        """Remove the rows whose keys are below a limit, or equal to it; return rows, times and keys."""
        found = []
        while self._held:
            first = self._held[0]
            end = int(np.searchsorted(first.keys, limit, "right" if inclusive else "left"))
            if end > first.begin:
                part = slice(first.begin, end)
                batch = first.rows.batch.slice(first.begin, end - first.begin)
                found.append((batch, first.times[part], first.keys[part]))
                self.place, self.key = first.rows.place(end), int(first.keys[end - 1])
                self._size -= end - first.begin
            first.begin = end
            if end < len(first.keys):
                break
            self._held.popleft()
        return found


class Merge:
    """The common order of some partitions.

    Args:
      lanes: The partitions, in the order that decides between equal keys.
      schemas: The schema of each log.
      idle: After how many seconds at its end a partition no longer holds up others; None: never.
    """

    def __init__(self, lanes: Sequence[Lane], schemas: Sequence[pa.Schema], idle: float | None) -> None:
        self._lanes, self._schemas, self._idle = [*lanes], schemas, idle

    def add(self, lane: Lane) -> None:
        """Add a partition, after the others in the order that decides between equal keys."""
        self._lanes.append(lane)

    def read(self) -> Merged | None:
        """Return the next rows without waiting; None if none can be returned yet."""
        for lane in self._lanes:
            lane.fill()
        live = [
            (lane.floor, number) for number, lane in enumerate(self._lanes) if not lane.has_ended(self._idle)
        ]
        live.sort()
        found = []
        for number, lane in enumerate(self._lanes):
            others = [each for each in live[:2] if each[1] != number]
            limit, of = others[0] if others else (1 << 62, number)
            found += [(lane, *part) for part in lane.take(limit, inclusive=number < of)]
        if not found:
            return None
        keys = np.concatenate([part[3] for part in found])
        sizes = [len(part[3]) for part in found]
        sides = np.repeat(np.array([lane.side for lane, *_ in found], np.uint8), sizes)
        parts = np.repeat(np.array([lane.part for lane, *_ in found], np.int32), sizes)
        order = np.argsort(keys, kind="stable")
        batches = []
        for side, schema in enumerate(self._schemas):
            rows = concat([batch for lane, batch, *_ in found if lane.side == side], schema)
            own = sides[order] == side
            places = np.cumsum(sides == side) - 1
            wanted = places[order][own]
            sorted_already = bool((wanted[1:] > wanted[:-1]).all())
            batches.append(rows if sorted_already else rows.take(pa.array(wanted)))
        times = np.concatenate([part[2] for part in found])
        return Merged(keys[order], times[order], sides[order], parts[order], batches)

    @property
    def at_end(self) -> bool:
        """Whether all partitions are at their ends."""
        return all(lane.reader.at_end for lane in self._lanes)

    def places(self) -> dict[str, Any]:
        """Return each partition's place, its key, and what its reader has seen besides."""
        return {f"{lane.side}/{lane.part}": [lane.place, lane.key, lane.reader.seen] for lane in self._lanes}

    def close(self) -> None:
        """Close the partitions."""
        for lane in self._lanes:
            lane.reader.close()


def latest_key(places: Mapping[str, Any]) -> int | None:
    """Return the largest key among those of `Merge.places`; None if no row was returned."""
    return max((key for _, key, *_ in places.values() if key is not None and key != _NONE), default=None)


def place_of(places: Mapping[str, Any], side: int, part: int) -> tuple[Any, int | None, bytes | None]:
    """Return what `Merge.places` has of a partition.

    A partition that is new among others has their latest key, because their rows were returned before its.
    """
    place, key, *seen = places.get(f"{side}/{part}", (None, latest_key(places)))
    return place, key, seen[0] if seen else None


class Log(Protocol):
    """A source of rows, in partitions."""

    @property
    def name(self) -> str:
        """The log, for messages."""
        ...

    @property
    def unit(self) -> str | None:
        """The unit of the rows' own times; None if they have none."""
        ...

    def partitions(self) -> Sequence[str]:
        """Return the names of the partitions."""
        ...

    def infer(self, form: Format | None) -> dict[str, str] | None:
        """Infer the columns from the first rows; None if there are none yet."""
        ...

    def open(
        self, partition: str, place: Any, columns: Columns, form: Format | None, counts: StreamCounts | None
    ) -> Reader:
        """Read a partition from a place on; None is where a new reader begins."""
        ...

    def from_first(self) -> Log:
        """Return the log with new readers that begin at the first row."""
        ...


@dataclass(frozen=True)
class Source:
    """A log and how its rows are read.

    Attributes:
      log: The log.
      columns: The columns.
      time: The column of event times; None: the log's own times.
      unit: Its unit.
      form: The form of a row.
      skips: Whether bad rows are skipped.
      counts: Counters.
    """

    log: Log
    columns: Columns
    time: str | None
    unit: str
    form: Format | None
    skips: bool
    counts: StreamCounts

    def times(self, rows: Rows) -> Ints:
        """Return the event times of rows; 0 for a single partition without times."""
        if self.time is not None:
            return event_times(rows.batch, self.time, self.unit)
        return np.zeros(rows.batch.num_rows, np.int64) if rows.times is None else rows.times


@dataclass(frozen=True)
class Joining:
    """The arguments of `join`, in microseconds and bytes."""

    key: Sequence[str]
    within: int
    lateness: int
    corrections: int
    label: str
    outcome: str | None
    negatives: float
    memory: int
    spill: Path | None

    def start(self) -> LabelJoin:
        """Return a join without exposures."""
        return LabelJoin(**vars(self))


@dataclass(frozen=True)
class Described:
    """What a stream is made of.

    Attributes:
      sources: The logs.
      joining: How they are joined; None for a single log.
      follow: Whether to wait for further rows at the end.
      idle: After how many seconds at its end a partition no longer holds up others; None: never.
      poll: Seconds between two looks for new rows.
    """

    sources: Sequence[Source]
    joining: Joining | None
    follow: bool
    idle: float | None
    poll: float

    @property
    def counts(self) -> Sequence[StreamCounts]:
        """What was read from each log."""
        return [source.counts for source in self.sources]

    @property
    def schema(self) -> pa.Schema:
        """The columns of the examples."""
        schema = arrow_schema(self.sources[0].columns)
        if self.joining is None:
            return schema
        extra = [self.joining.label, *added_columns(self.joining.negatives, self.joining.corrections)]
        return pa.schema([*schema, *(pa.field(name, pa.float32()) for name in extra)])

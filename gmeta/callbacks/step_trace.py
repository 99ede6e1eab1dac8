"""Draws measured steps of all ranks as a trace for chrome://tracing and Perfetto.

A rank is a process. Its threads are the step (its parts, one after another), the exchanges between ranks
(each with the waiting before it) and what is fetched for later batches. Where events of a thread overlap it
gets another line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gmeta.callbacks.rank_clocks import Offsets
from gmeta.callbacks.step_parts import Exchange, Slice, exchanges_of, slices_of
from gmeta.callbacks.step_records import Step
from gmeta.core.errors import ConfigError
from gmeta.core.files import write_atomically

MOST_EVENTS = 100_000
"""Of how many events a file may be, of some 150 bytes each; those of the latest steps are kept."""

_THREADS = ("step", "exchange", "ahead: data", "ahead: lookup")


class StepTrace:
    """The trace file of a training; rank 0 keeps and writes it.

    Args:
      path: The file, whose name ends in ``.json``, in a folder that exists.

    Raises:
      ConfigError: It doesn't end in ``.json``, it is a folder, or its folder doesn't exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        told = f"StepTimes: trace={str(self._path)!r}"
        if self._path.is_dir():
            raise ConfigError(f"{told} is a folder: name a file in it, such as trace.json")
        if self._path.suffix != ".json":
            raise ConfigError(f"{told} must end in .json, as chrome://tracing and Perfetto read it")
        if not self._path.parent.is_dir():
            raise ConfigError(f"{told}: the folder {str(self._path.parent)!r} doesn't exist: make it first")
        self._steps: list[list[Step]] = []
        self._events = 0
        self._error = 0.0

    def add(self, steps: Sequence[Sequence[Step]], offsets: Offsets) -> None:
        """Add measured steps, each on all ranks, with times on one clock; drop the first of too many."""
        for ranks in steps:
            self._steps.append(list(ranks))
            self._events += _size(ranks)
        while self._events > MOST_EVENTS and len(self._steps) > 1:
            self._events -= _size(self._steps.pop(0))
        self._error = offsets.error

    def write(self) -> None:
        """Write the file; it is complete at any time."""
        if self._steps:
            write_atomically(self._path, json.dumps(self._told(), separators=(",", ":")))

    def _told(self) -> dict[str, Any]:
        zero = min(step.begin for step in self._steps[0])
        events = [
            event
            for rank in range(len(self._steps[0]))
            for event in _rank_events(rank, [(ranks, rank) for ranks in self._steps], zero)
        ]
        said = {"clocks agree within, in us": round(1e6 * self._error, 1)}
        return {"displayTimeUnit": "ms", "otherData": said, "traceEvents": events}


class _Event(NamedTuple):
    thread: str
    name: str
    begin: float
    end: float
    about: dict[str, Any]


def _size(ranks: Sequence[Step]) -> int:
    """Return how many events a step makes, or a few more."""
    return sum(2 * len(step.marks) + 4 * len(step.spans) + 2 for step in ranks)


def _rank_events(rank: int, steps: Sequence[tuple[list[Step], int]], zero: float) -> Iterator[dict[str, Any]]:
    found: list[_Event] = []
    for ranks, own in steps:
        exchanges = exchanges_of(ranks)[own]
        found += _events(ranks[own], exchanges, slices_of(ranks[own], exchanges))
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}"}}
    number = 0
    for thread in _THREADS:
        events = sorted((each for each in found if each.thread == thread), key=lambda each: each.begin)
        for line in _lines(events):
            name = {"name": thread}
            yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": name}
            for event in line:
                begin, end = (round(1e6 * (time - zero), 3) for time in (event.begin, event.end))
                yield {
                    **{"ph": "X", "pid": rank, "tid": number, "name": event.name, "cat": event.thread},
                    **{"ts": begin, "dur": round(end - begin, 3), "args": event.about},
                }
            number += 1


def _events(step: Step, exchanges: Sequence[Exchange], slices: Sequence[Slice]) -> Iterator[_Event]:
    for part, begin, end in slices:
        yield _Event("step", part, begin, end, {"batch": step.number})
    for span, begin, all_there in exchanges:
        about = {"batch": step.number + span.what.batches_ahead, "lane": span.what.lane}
        if all_there > begin:
            yield _Event("exchange", "wait", begin, all_there, {**about, "for": span.what.name})
        yield _Event("exchange", span.what.name, all_there, span.end, about)
    for span in step.spans:
        if span.what.beside and span.what.kind != "exchange":
            about = {"batch": step.number + span.what.batches_ahead}
            yield _Event(f"ahead: {span.what.kind}", span.what.name, span.begin, span.end, about)


def _lines(events: Sequence[_Event]) -> list[list[_Event]]:
    """Put events, in the order of their begins, on as few lines as they need not to overlap."""
    lines: list[list[_Event]] = []
    for event in events:
        free = next((line for line in lines if line[-1].end <= event.begin), None)
        if free is None:
            lines.append([event])
        else:
            free.append(event)
    return lines

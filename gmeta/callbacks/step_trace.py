"""Draws measured steps of all ranks as a trace for chrome://tracing and Perfetto.

A rank is a process. Its threads are the step (its parts, one after another), the exchanges between ranks
(each with the waiting before it) and the fetches for later batches. A thread whose events overlap gets more
lines.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.callbacks.step_clock import PARTS, Span, Step, StepSeconds
from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.files import write_atomically

# Divides a measured step into its parts, and the time of exchanges into waiting and travelling.
#
# A collective can't end before all ranks have begun it. So on a rank that is ready for it, the time until the
# slowest rank is ready is waiting, and only the rest is the exchange. This needs no barrier: each rank
# records when it is ready, all ranks exchange these times, on aligned clocks, and the latest ends the wait.
#
# .. math:: w_r = \max_s b_s - b_r, \quad x_r = e_r - \max_s b_s
#
# with b for the begin and e for the end of a collective on ranks r and s. On a lane collectives run one after
# another; one begins when its tensors are computed and the collective before it has ended.
#
# Each moment of a step then belongs to one part, so that parts add up to the step. While the loss or the
# gradients are computed, it belongs to that part, even if an exchange overlaps: hidden exchanges take no
# time. Otherwise it belongs to waiting or the exchange while the step needs an exchange that is under way, to
# the lookup while rows are looked up, and else to the part that ends next. A step ends only when the pipeline
# has fetched for later batches; if that takes longer than the step's own parts, the rest belongs to these.

_COMPUTES = frozenset({"forward", "inner", "backward", "outer"})
_IN_TURN = frozenset({"tcp", "nccl"})  # lanes that carry one exchange at a time


class Exchange(NamedTuple):
    """A collective on one rank.

    Attributes:
      span: From when its tensors were computed until its result was.
      begin: When this rank began it.
      all_there: When the last rank began it.
    """

    span: Span
    begin: float
    all_there: float


class Slice(NamedTuple):
    """A stretch of a step that belongs to one part."""

    part: str
    begin: float
    end: float


def exchanges_of(ranks: Sequence[Step]) -> list[list[Exchange]]:
    """Match the collectives of one step on all ranks.

    Args:
      ranks: The step on each rank, by number, with times on one clock.

    Returns:
      For each rank its collectives, in the order of their ends.
    """
    found = [_in_turn(step) for step in ranks]
    begins = [
        {key: begin for key, (_, begin) in zip(_keys(of_rank), of_rank, strict=True)} for of_rank in found
    ]

    def all_there(key: tuple[str, int], span: Span) -> float:
        with_it = span.what.ranks or range(len(ranks))
        return max(begins[rank][key] for rank in with_it if key in begins[rank])

    return [
        [
            Exchange(span, begin, min(max(begin, all_there(key, span)), span.end))
            for key, (span, begin) in zip(_keys(of_rank), of_rank, strict=True)
        ]
        for of_rank in found
    ]


def slices_of(step: Step, exchanges: Sequence[Exchange] = ()) -> list[Slice]:
    """Divide a step; slices follow each other from its begin to its end.

    Args:
      step: The step.
      exchanges: Its collectives, as `exchanges_of` returns them.
    """
    times = {step.begin, step.end, *(mark.time for mark in step.marks)}
    times.update(time for span in step.spans for time in span[1:])
    times.update(time for each in exchanges for time in each[1:])
    slices: list[Slice] = []
    for begin, end in pairwise(sorted(time for time in times if step.begin <= time <= step.end)):
        part = _part_at((begin + end) / 2, step, exchanges)
        if slices and slices[-1].part == part:
            begin = slices.pop().begin
        slices.append(Slice(part, begin, end))
    return slices


def parts_of(step: Step) -> list[str]:
    """Return the parts that a step has, in their order, however short they were."""
    kinds = {span.what.kind for span in step.spans}
    found = {"data", _last_part(step), *(mark.part for mark in step.marks), *kinds}
    return [part for part in PARTS if part in found or (part == "wait" and "exchange" in kinds)]


def seconds_of(ranks: Sequence[Step]) -> StepSeconds:
    """Add up the parts of one step on all ranks, by number."""
    total = StepSeconds({})
    for rank, (step, exchanges) in enumerate(zip(ranks, exchanges_of(ranks), strict=True)):
        seconds = dict.fromkeys(parts_of(step), 0.0)
        for part, begin, end in slices_of(step, exchanges):
            seconds[part] += end - begin
        waits = [0.0] * len(ranks) if len(ranks) > 1 else []
        if waits:
            waits[rank] = seconds.get("wait", 0.0)
        total += StepSeconds(seconds, 1, tuple(waits))
    return total


def _part_at(time: float, step: Step, exchanges: Sequence[Exchange]) -> str:
    following = next((mark.part for mark in step.marks if mark.time > time), "")
    part = following or _last_part(step)
    lookup = any(s.what.kind == "lookup" and not s.what.beside and _covers(s, time) for s in step.spans)
    computes = part in _COMPUTES and not lookup
    own, later = not computes, not following or part == "data"
    for span, _, _ in exchanges:
        what = span.what
        if _covers(span, time) and (not what.beside or (own and not what.batches_ahead) or later):
            return _state_at(time, span.what.lane, exchanges)
    if lookup:
        return "lookup"
    under_way = {s.what.kind for s in step.spans if s.what.beside and _covers(s, time)} if later else set()
    return next((kind for kind in ("data", "lookup") if kind in under_way), part)


def _state_at(time: float, lane: str, exchanges: Sequence[Exchange]) -> str:
    """Return "wait" if all that a lane carries waits for other ranks, else "exchange"."""
    states = [
        each.all_there <= time
        for each in exchanges
        if each.span.what.lane == lane and each.begin <= time < each.span.end
    ]
    return "exchange" if any(states) or not states else "wait"


def _last_part(step: Step) -> str:
    """Return the part that follows the last mark: the update, if the step has marked its gradients."""
    return "update" if {mark.part for mark in step.marks} - {"data"} else "step"


def _covers(span: Span, time: float) -> bool:
    return span.begin <= time < span.end


def _in_turn(step: Step) -> list[tuple[Span, float]]:
    """Return the collectives of a step, in the order of their ends, and when each began."""
    found: list[tuple[Span, float]] = []
    free: dict[str, float] = {}
    for span in sorted(step.spans, key=lambda span: span.end):
        lane = span.what.lane
        if span.what.kind == "exchange":
            begin = max(span.begin, free.get(lane, span.begin)) if lane in _IN_TURN else span.begin
            found.append((span, begin))
            free[lane] = span.end
    return found


def _keys(found: Sequence[tuple[Span, float]]) -> list[tuple[str, int]]:
    """Name each collective by its name on all ranks, and the number of its earlier uses in the step."""
    before: Counter[str] = Counter()
    keys = []
    for span, _ in found:
        keys.append((span.what.name, before[span.what.name]))
        before[span.what.name] += 1
    return keys


# Estimates the offset of each rank's clock from that of rank 0, with its error.
#
# Clocks of two machines differ by milliseconds, and drift. No rank gets a sum before all ranks have
# contributed. So if rank r enters one at :math:`e_r` and leaves it at :math:`l_r`, each by its own clock,
# then r's clock is ahead of that of rank 0 by
#
# .. math:: e_r - l_0 \le o_r \le l_r - e_0 .
#
# Several sums narrow this interval; its middle is within half of its width of the true offset. If it contains
# 0, the clocks are considered equal, as those of ranks on one machine are.

_ROUNDS = 8

Round = list[float]
"""When a rank entered a sum and when it left, by its clock."""


class Offsets(NamedTuple):
    """How far clocks are ahead.

    Attributes:
      ahead: For each rank the seconds by which its clock is ahead of that of rank 0.
      error: The largest error of any of them, in seconds.
    """

    ahead: tuple[float, ...]
    error: float


def take_rounds(now: Callable[[], tf.Tensor]) -> list[Round]:
    """Enter and leave some sums over ranks; all ranks call it together."""
    if collectives.world().size == 1:
        return []
    rounds = []
    for _ in range(_ROUNDS):
        entered = float(now())
        collectives.allreduce_sum([tf.constant(1)], name="step_times/clock")
        rounds.append([entered, float(now())])
    return rounds


def offsets_of(rounds: Sequence[Sequence[Round]]) -> Offsets:
    """Compute how far the ranks' clocks are ahead from the results of `take_rounds`.

    Example:
      >>> offsets_of([[[0.0, 0.2]], [[5.0, 5.2]]])
      Offsets(ahead=(0.0, 5.0), error=0.2)
    """
    ahead, error = [], 0.0
    for of_rank in rounds:
        pairs = list(zip(of_rank, rounds[0], strict=True))
        least = max((entered - left for (entered, _), (_, left) in pairs), default=0.0)
        most = min((left - entered for (_, left), (entered, _) in pairs), default=0.0)
        possible = least <= 0 <= most
        ahead.append(0.0 if possible else round((least + most) / 2, 9))
        if of_rank is not rounds[0]:
            error = max(error, round((most - least) / 2, 9))
    return Offsets(tuple(ahead), error)


MOST_EVENTS = 100_000
"""The most events of a file, of some 150 bytes each; those of the latest steps are kept."""

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
        """Add measured steps, each on all ranks, with times on one clock; drop the oldest in excess."""
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
    """Put events, in the order of their begins, on as few lines as possible without overlap."""
    lines: list[list[_Event]] = []
    for event in events:
        free = next((line for line in lines if line[-1].end <= event.begin), None)
        if free is None:
            lines.append([event])
        else:
            free.append(event)
    return lines

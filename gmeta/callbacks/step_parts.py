r"""Divides a measured step into its parts, and the time of exchanges into waiting and travelling.

A collective can't end before all ranks have begun it. So on a rank that is ready for it, the time until the
slowest rank is ready is waiting, and only the rest is the exchange. No barrier is added to measure that: each
rank notes when it is ready, all ranks tell each other, on clocks that are made to agree
(`gmeta.callbacks.rank_clocks`), and the latest of them ends the waiting.

.. math:: w_r = \max_s b_s - b_r, \quad x_r = e_r - \max_s b_s

with b for the begin and e for the end of a collective on ranks r and s. On a lane collectives run one after
another; one begins when its tensors are there and the collective before it has ended.

Then each moment of a step belongs to one part, so that parts add up to the step. While the loss or gradients
are computed, it is theirs, also if something travels beside them: what is hidden costs nothing. Else it is
waiting's or the exchange's while an exchange that the step needs is under way, the lookup's while rows are
looked up, and that of the part which ends next. A step also ends only when the pipeline has fetched for later
batches; where that lasts longer than the step's own parts, the rest is that of what is still under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from gmeta.callbacks.step_records import PARTS, Span, Step, StepSeconds

_COMPUTES = frozenset({"forward", "inner", "backward", "outer"})
_IN_TURN = frozenset({"tcp", "nccl"})  # lanes that carry one exchange at a time


class Exchange(NamedTuple):
    """A collective on one rank.

    Attributes:
      span: From when its tensors were there until its result was.
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
    """Return the part that follows the last mark: the update, of a step that tells of its gradients."""
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
    """Name each collective by what all ranks call it, and how often it came before in the step."""
    before: Counter[str] = Counter()
    keys = []
    for span, _ in found:
        keys.append((span.what.name, before[span.what.name]))
        before[span.what.name] += 1
    return keys

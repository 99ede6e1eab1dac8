"""What a clock has read of a training step: when its parts ended, and what went on beside them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gmeta.core.graph.step_marks import SpanKind

PARTS = ("data", "lookup", "exchange", "wait", "forward", "inner", "backward", "outer", "update", "step")
"""A step's parts. The batch is read; its rows are looked up; keys, rows and gradients travel between ranks;
this rank waits for others that aren't ready to exchange; the loss is computed; tasks adapt; the gradients are
computed, and those of the outer loss, with this loss; tables and dense weights step. "step" is all that a
model of another library does, which tells of no parts."""


class Mark(NamedTuple):
    """The end of a part.

    Attributes:
      part: One of `PARTS`.
      time: In seconds.
    """

    part: str
    time: float


class Span(NamedTuple):
    """Something that went on beside parts of a step.

    Attributes:
      what: What it is.
      begin: When what it begins with was there, in seconds.
      end: When what it ends with was there.
    """

    what: SpanKind
    begin: float
    end: float


@dataclass(frozen=True)
class Step:
    """One measured step of one rank.

    Attributes:
      number: The batch's number since training began, from 0.
      begin: In seconds.
      end: When its last part, and all that it had begun for later batches, was over.
      marks: The ends of its parts, in their order.
      spans: What went on beside.
    """

    number: int
    begin: float
    end: float
    marks: tuple[Mark, ...] = ()
    spans: tuple[Span, ...] = ()

    def earlier(self, seconds: float) -> Step:
        """Return the same step, on a clock that is so many seconds behind."""
        return replace(
            self,
            begin=self.begin - seconds,
            end=self.end - seconds,
            marks=tuple(Mark(part, time - seconds) for part, time in self.marks),
            spans=tuple(Span(what, begin - seconds, end - seconds) for what, begin, end in self.spans),
        )

    def to_list(self) -> list[Any]:
        """Return numbers and texts that another rank makes the step of, by `from_list`."""
        spans = [
            [*(w.kind, w.name, w.lane, list(w.ranks), w.batches_ahead, w.beside), begin, end]
            for w, begin, end in self.spans
        ]
        return [self.number, self.begin, self.end, [list(mark) for mark in self.marks], spans]

    @classmethod
    def from_list(cls, told: list[Any]) -> Step:
        """Make the step of what `to_list` returned."""
        number, begin, end, marks, spans = told
        found = (
            Span(SpanKind(kind, name, lane, tuple(ranks), ahead, beside), first, last)
            for kind, name, lane, ranks, ahead, beside, first, last in spans
        )
        return cls(number, begin, end, tuple(Mark(*mark) for mark in marks), tuple(found))


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of steps' parts; several can be added up.

    Attributes:
      seconds: Part -> the seconds spent in it, in all steps together. Parts that steps don't have are left
        out.
      steps: How many steps those are.
      waits: For each rank, by number, the seconds in which it waited; () of one rank.
    """

    seconds: dict[str, float]
    steps: float = 0
    waits: tuple[float, ...] = field(default=())

    def __add__(self, other: StepSeconds) -> StepSeconds:
        both = {
            part: self.seconds.get(part, 0.0) + other.seconds.get(part, 0.0)
            for part in PARTS
            if part in self.seconds or part in other.seconds
        }
        ranks = max(len(self.waits), len(other.waits))
        padded = [(*each.waits, *[0.0] * (ranks - len(each.waits))) for each in (self, other)]
        return StepSeconds(both, self.steps + other.steps, tuple(map(sum, zip(*padded, strict=True))))

    @property
    def total(self) -> float:
        """The seconds of all parts."""
        return sum(self.seconds.values())

    @property
    def slowest(self) -> str:
        """The part that most of the time was spent in."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    def share(self, part: str) -> float:
        """Return a part's share of all time, 0 to 1."""
        return self.seconds[part] / self.total if self.total else 0.0

    def milliseconds(self, part: str) -> float:
        """Return what a part takes in one step, in milliseconds."""
        return 1e3 * self.seconds[part] / self.steps if self.steps else 0.0

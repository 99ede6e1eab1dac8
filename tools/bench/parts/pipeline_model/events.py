"""When each stage of a program begins and ends on each rank.

A program is a list of stages. A stage occupies one resource of a rank, begins after the stages that it names,
and after all earlier ones in the program on that resource: a stream of a GPU, a thread and gmeta's lane work
in the order of the program. So events need no queue: one pass over the program is exact. The ranks are the
elements of an array.

A collective begins when the last of its ranks is ready, and ends for all of them when the slowest has ended.
The time that a rank waits for others is idle time of its resource, not work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stage:
    """A piece of a rank's work.

    Attributes:
      name: The kind of work, such as ``rows``.
      batch: The number of its batch.
      resource: The resource that it occupies, such as ``wire``.
      seconds: Its duration without delays.
      after: The numbers of earlier stages whose ends it waits for.
      collective: Whether it waits for the same stage on other ranks.
      everyone: Whether a collective includes all ranks, whatever the groups.
    """

    name: str
    batch: int
    resource: str
    seconds: float
    after: tuple[int, ...] = ()
    collective: bool = False
    everyone: bool = False


@dataclass(frozen=True)
class Jitter:
    """Random factors of the durations, drawn for each stage and rank.

    Attributes:
      sigma: Standard deviation of the factor's logarithm, which is normal; the factor's mean is 1.
      measured: If given, factors are drawn from these, such as measured seconds over their mean.
      seed: The seed of the draws.
    """

    sigma: float = 0.0
    measured: tuple[float, ...] = ()
    seed: int = 0

    def draw(self, stages: int, ranks: int) -> Array:
        """Return a factor for each stage and rank."""
        drawn = np.random.default_rng(self.seed)
        if self.measured:
            return drawn.choice(np.asarray(self.measured), size=(stages, ranks))
        return np.exp(drawn.normal(-(self.sigma**2) / 2, self.sigma, size=(stages, ranks)))


@dataclass(frozen=True)
class Timeline:
    """The times of stages.

    Attributes:
      program: The stages.
      begins: Seconds, by stage and rank.
      ends: Likewise.
    """

    program: Sequence[Stage]
    begins: Array
    ends: Array

    def step(self, warm_up: int) -> float:
        """Return the mean seconds of a step, without the first `warm_up`, in which the pipeline fills."""
        last: dict[int, float] = {}
        for stage, ends in zip(self.program, self.ends, strict=True):
            last[stage.batch] = max(last.get(stage.batch, 0.0), float(ends.max()))
        return (last[max(last)] - last[warm_up - 1]) / (max(last) + 1 - warm_up)

    def exposed(self, names: Sequence[str], warm_up: int, rank: int = 0) -> float:
        """Return the seconds of a step in which these stages run on a rank and no computation does."""
        first, last = self._window(warm_up)
        computes = [stage.resource == "compute" for stage in self.program]
        either = [it or stage.name in names for it, stage in zip(computes, self.program, strict=True)]
        spans = [self._busy(chosen, rank, first, last) for chosen in (either, computes)]
        together, computing = (sum(end - begin for begin, end in found) for found in spans)
        return (together - computing) / (max(stage.batch for stage in self.program) + 1 - warm_up)

    def _window(self, warm_up: int) -> tuple[float, float]:
        early = [ends.max() for s, ends in zip(self.program, self.ends, strict=True) if s.batch < warm_up]
        return float(max(early)), float(self.ends.max())

    def _busy(
        self, chosen: Sequence[bool], rank: int, first: float, last: float
    ) -> list[tuple[float, float]]:
        """Return the spans in which any of the chosen stages runs, in order and disjoint."""
        spans = sorted(
            (max(first, begin), min(last, end))
            for begin, end, it in zip(self.begins[:, rank], self.ends[:, rank], chosen, strict=True)
            if it and end > first
        )
        joined: list[tuple[float, float]] = []
        for begin, end in spans:
            if joined and begin <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((begin, end))
        return joined


def simulate(
    program: Sequence[Stage], ranks: int = 1, groups: int = 1, jitter: Jitter | None = None
) -> Timeline:
    """Run a program on ranks.

    Args:
      program: The same for all ranks; each stage names only earlier ones.
      ranks: The number of ranks. Without jitter all ranks are alike, so one suffices.
      groups: Collectives are among neighbouring ``ranks / groups`` ranks, except those of everyone.
      jitter: Random factors of durations; none by default.

    Returns:
      The times.

    Raises:
      ValueError: `groups` doesn't divide `ranks`, or a stage waits for one that isn't earlier.
    """
    if ranks % groups:
        raise ValueError(f"{groups} groups don't divide {ranks} ranks")
    seconds = np.array([stage.seconds for stage in program])[:, None] * np.ones([1, ranks])
    if jitter is not None:
        seconds *= jitter.draw(len(program), ranks)
    begins, ends = np.zeros_like(seconds), np.zeros_like(seconds)
    free: dict[str, Array] = {}
    for number, stage in enumerate(program):
        if any(not 0 <= other < number for other in stage.after):
            raise ValueError(
                f"stage {number}, {stage.name!r}, waits for {stage.after}, not all earlier than it"
            )
        begin = free.get(stage.resource, np.zeros(ranks))
        for other in stage.after:
            begin = np.maximum(begin, ends[other])
        if stage.collective:
            parts = 1 if stage.everyone else groups
            begin = _slowest(begin, parts)
            seconds[number] = _slowest(seconds[number], parts)
        begins[number], ends[number] = begin, begin + seconds[number]
        free[stage.resource] = ends[number]
    return Timeline(program, begins, ends)


def _slowest(values: Array, groups: int) -> Array:
    """Return for each rank the largest value of its group."""
    return np.repeat(values.reshape(groups, -1).max(1), values.size // groups)

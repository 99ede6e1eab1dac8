"""Programs of training steps: the same work in a different order, or ahead.

    lookup: read → route → keys → fetch → copy      before rows can travel
    window: refresh → (rows → compute → gradients) of each micro-batch → reduce → update

A synchronous step runs the stages in turn. A dual buffer (NestPipe, section IV) looks up later batches while
this one computes; `refresh` then copies what the last update changed into the buffer. A frozen window
(section V) divides the batch into micro-batches: nothing changes until all have their gradients, so rows and
gradients of some travel while others compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parts.pipeline_model.events import Stage

LOOKUP = ("read", "route", "keys", "fetch", "copy")
TRAVELS = ("rows", "gradients")


@dataclass(frozen=True)
class Work:
    """Seconds of the stages of a rank's batch.

    Attributes:
      read: Read and parse samples.
      route: Deduplicate keys and divide them by owner.
      keys: Exchange keys. They are few bytes, and have their own channel.
      fetch: Read rows from the owner's table.
      copy: Copy the rows to the device.
      refresh: Copy updated rows into a buffer that was filled ahead; a synchronous step has none.
      rows: Exchange rows.
      compute: Forward and backward pass.
      gradients: Exchange the gradients of rows.
      reduce: All-reduce the dense gradients.
      update: Apply the gradients.
      latency: The additional cost of each exchange of rows or gradients, whatever its size.
    """

    read: float = 0.0
    route: float = 0.0
    keys: float = 0.0
    fetch: float = 0.0
    copy: float = 0.0
    refresh: float = 0.0
    rows: float = 0.0
    compute: float = 0.0
    gradients: float = 0.0
    reduce: float = 0.0
    update: float = 0.0
    latency: float = 0.0

    @property
    def lookup(self) -> float:
        """The seconds before rows can travel."""
        return sum(getattr(self, name) for name in LOOKUP)

    @property
    def travel(self) -> float:
        """The seconds of one exchange of rows and one of gradients."""
        return self.rows + self.gradients + 2 * self.latency


@dataclass(frozen=True)
class Schedule:
    """The order of the stages of steps.

    Attributes:
      depth: The number of batches by which the lookup is ahead of the computation; 0 is synchronous.
      micro: The number of micro-batches of a window; 1 is no window.
      eager: Whether all rows travel as early as they can. Else rows of a micro-batch travel while the
        previous one computes, and then the gradients of the one before that: fewer buffers, less slack.
    """

    depth: int = 0
    micro: int = 1
    eager: bool = True

    def program(self, work: Work, batches: int) -> list[Stage]:
        """Make the program of this many steps."""
        made = _Program(work if self.depth else replace(work, refresh=0.0))
        for batch in range(self.depth):
            made.look_up(batch, ())
        for batch in range(batches):
            if not self.depth:
                made.look_up(batch, ("update", batch - 1))
            made.window(batch, self.micro, self.eager)
            if self.depth and batch + self.depth < batches:  # the previous batch's buffer is free
                made.look_up(batch + self.depth, ("refresh", batch))
        return made.stages


SYNCHRONOUS = Schedule()
_RESOURCES = {"read": "reader", "route": "router", "keys": "side wire", "fetch": "memory", "copy": "copier"}
_Place = tuple[str, int]
"""The key of a stage in a program: its name and batch."""


class _Program:
    """Stages, and the number of each by name and batch."""

    def __init__(self, work: Work) -> None:
        self.stages: list[Stage] = []
        self._work = work
        self._at: dict[_Place, int] = {}

    def look_up(self, batch: int, after: _Place | tuple[()]) -> None:
        """Add the five stages, each on its own resource, so that batches follow each other closely."""
        waits = [after]
        for name in LOOKUP:
            self._add(name, batch, _RESOURCES[name], getattr(self._work, name), waits, name == "keys")
            waits = [(name, batch)]

    def window(self, batch: int, micro: int, eager: bool) -> None:
        """Add a batch from its first rows to its update."""
        work = self._work
        rows, gradients = (getattr(work, name) / micro + work.latency for name in TRAVELS)
        self._add("refresh", batch, "compute", work.refresh, [("copy", batch), ("update", batch - 1)])
        begun = 0
        for one in range(micro):
            for other in range(begun, micro if eager else min(one + 2, micro)):
                self._add("rows", batch, "wire", rows, [("refresh", batch)], True, part=other)
                begun = other + 1
            self._add("compute", batch, "compute", work.compute / micro, [(f"rows {one}", batch)], part=one)
            self._add("gradients", batch, "wire", gradients, [(f"compute {one}", batch)], True, part=one)
        last = micro - 1
        self._add("reduce", batch, "wire", work.reduce, [(f"compute {last}", batch)], True, everyone=True)
        ends: list[_Place | tuple[()]] = [(f"gradients {last}", batch), ("reduce", batch)]
        self._add("update", batch, "table", work.update, ends)

    def _add(
        self,
        name: str,
        batch: int,
        resource: str,
        seconds: float,
        waits: Sequence[_Place | tuple[()]],
        collective: bool = False,
        everyone: bool = False,
        part: int | None = None,
    ) -> None:
        after = tuple(self._at[place] for place in waits if place in self._at)
        self._at[name if part is None else f"{name} {part}", batch] = len(self.stages)
        self.stages.append(Stage(name, batch, resource, seconds, after, collective, everyone))

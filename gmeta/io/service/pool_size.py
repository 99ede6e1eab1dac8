"""How many workers there should be: more while training waits for data, fewer while they idle."""

from __future__ import annotations

from dataclasses import dataclass

WAITS = 0.05
"""The share of its time that training may wait for data before a worker is added."""

_BUSY = 0.75
"""How busy workers may be once there is one less of them; more would make training wait again."""


@dataclass(frozen=True)
class Load:
    """What was measured since the number of workers was last looked at.

    Attributes:
      waited: The share of time that training waited for data, 0 to 1.
      busy: The share of time that workers made elements, and didn't wait for training to take them, 0 to 1;
        their mean.
      ready: Workers that read.
      starting: Workers that were started and can't be reached yet.
    """

    waited: float
    busy: float
    ready: int
    starting: int = 0


def workers_to_add(load: Load, *, least: int, most: int) -> int:
    """Return how many workers to start, or, below 0, to send away.

    There are always ``least`` to ``most`` of them. Within these limits one is added if training waits more
    than 5% of the time, unless one is starting. One is sent away if training waits less, and the others would
    be busy no more than three quarters of the time without it.

    Example:
      >>> workers_to_add(Load(waited=0.2, busy=0.9, ready=2), least=1, most=4)
      1
      >>> workers_to_add(Load(waited=0.0, busy=0.3, ready=2), least=1, most=4)
      -1
    """
    there = load.ready + load.starting
    if there < least:
        return least - there
    if there > most:
        return most - there
    if load.waited > WAITS:
        return int(there < most and not load.starting)
    spare = load.ready > least and load.busy * load.ready <= _BUSY * (load.ready - 1)
    return -int(spare and not load.starting)

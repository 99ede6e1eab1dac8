"""The reporting of an engine's progress."""

from __future__ import annotations

from typing import Protocol

STAGES = {"read": "reading rows", "sort": "sorting and cutting", "write": "writing shards"}
"""The stages of a preparation, and their texts for display."""


class Progress(Protocol):
    """A callback that receives the progress of a stage."""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Report that ``done`` of ``total`` rows of ``stage`` are done; the stage ends when they are equal.

        While rows are read from files that don't state their number, ``total`` is an estimate or None.
        """


def no_progress(stage: str, done: int, total: int | None) -> None:
    """Report nothing."""


class PartsProgress:
    """The joint progress of parts that run through every stage one after another.

    Args:
      progress: Receives the sums; the total is known in the last part.
      parts: The number of parts.
    """

    def __init__(self, progress: Progress, parts: int) -> None:
        self._progress, self._parts = progress, parts
        self._before: dict[str, int] = {}

    def of(self, part: int) -> Progress:
        """Return the callback for the part with this number."""
        before = dict(self._before)

        def tell(stage: str, done: int, total: int | None) -> None:
            through = before.get(stage, 0)
            self._before[stage] = through + done
            last = part + 1 == self._parts
            self._progress(stage, through + done, None if total is None or not last else through + total)

        return tell

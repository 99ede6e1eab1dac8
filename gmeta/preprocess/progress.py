"""How an engine tells how far it is."""

from __future__ import annotations

from typing import Protocol

STAGES = {"read": "reading rows", "sort": "sorting and cutting", "write": "writing shards"}
"""The stages of a preparation, and how they are shown."""


class Progress(Protocol):
    """Is told how far a stage has come."""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """``done`` of ``total`` rows of ``stage`` are through; the stage is over when they are equal.

        While rows are read from files that don't say how many they hold, ``total`` is an estimate or None.
        """


def no_progress(stage: str, done: int, total: int | None) -> None:
    """Tell nobody."""


class PartsProgress:
    """One progress of parts that go through every stage one after another.

    Args:
      progress: Is told the sums; a total is known in the last part.
      parts: How many there are.
    """

    def __init__(self, progress: Progress, parts: int) -> None:
        self._progress, self._parts = progress, parts
        self._before: dict[str, int] = {}

    def of(self, part: int) -> Progress:
        """What the part of this number is to tell."""
        before = dict(self._before)

        def tell(stage: str, done: int, total: int | None) -> None:
            through = before.get(stage, 0)
            self._before[stage] = through + done
            last = part + 1 == self._parts
            self._progress(stage, through + done, None if total is None or not last else through + total)

        return tell

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

"""The ranks that save and load together: what fails on one of them fails on all, and nobody waits in vain.

A rank whose disk is full must not leave the others waiting for it, nor may they go on to train with a
checkpoint that isn't there. So a piece of work ends with each rank telling the others how it went, and an
error of one is raised by all. A long save is no stall: a rank that still works says so every few seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from gmeta.core import collectives
from gmeta.core.errors import CollectiveError, GmetaError

T = TypeVar("T")

Gather = Callable[[Any], list[Any]]
"""Gives every rank's object to every rank, by rank, as `gmeta.core.collectives.allgather_objects` does."""

_BEAT = 10.0  # seconds, far below the time after which a waiting rank gives up
_WORKING, _DONE = "working", "done"


@dataclass(frozen=True)
class Ranks:
    """This rank's place among those that save or load together.

    Attributes:
      rank: This one.
      size: How many there are.
      gather: How they tell each other; None: they can't.
    """

    rank: int
    size: int
    gather: Gather | None

    @classmethod
    def of(cls, rank: int | None = None, size: int | None = None, gather: Gather | None = None) -> Ranks:
        """The ranks of this job (`gmeta.core.collectives.world`) where nothing else is said."""
        here = collectives.world()
        rank, size = here.rank if rank is None else rank, here.size if size is None else size
        if gather is None and (rank, size) == (here.rank, here.size):
            gather = collectives.allgather_objects
        return cls(rank, size, gather)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do the work of a ``with`` block on all ranks. It has no collectives in it.

        Raises:
          GmetaError: On every rank, if the block failed on any; of that error's class, with the rank.
          CollectiveError: A rank has ended.
        """
        if self.size == 1 or self.gather is None:
            yield
            return
        outcome = _Outcome(self.gather)
        failure: Exception | None = None
        try:
            yield
        except (CollectiveError, KeyboardInterrupt, SystemExit) as error:  # this rank leaves at once
            outcome.say(_in_words(error))
            raise
        except Exception as error:
            failure = error
        told = outcome.tell(_DONE if failure is None else _in_words(failure))
        failed = [(rank, *what) for rank, what in enumerate(told) if what != _DONE]
        if not failed:
            return
        alike = len(failed) == self.size and len({what for _, *_, what in failed}) == 1
        if failure is not None and (alike or not isinstance(failure, GmetaError)):
            raise failure
        said = "; ".join(f"rank {rank} of {self.size}: {what}" for rank, _, what in failed[:2])
        more = f"; and {len(failed) - 2} more ranks" if len(failed) > 2 else ""
        raise failed[0][1](said + more) from failure

    def from_first(self, decide: Callable[[], T]) -> T:
        """What rank 0 decides, on every rank.

        Raises:
          GmetaError: As in `together`.
        """
        if self.size == 1 or self.gather is None:
            return decide()
        decided: T | None = None
        with self.together():
            if self.rank == 0:
                decided = decide()
        return self.gather(decided)[0]


class _Outcome:
    """Tells the others how this rank's work goes: every few seconds that it does, and at last its end."""

    def __init__(self, gather: Gather) -> None:
        self._gather, self._ended = gather, threading.Event()
        self._what: Any = _WORKING
        self._told: list[Any] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._talk, name="gmeta-outcome", daemon=True)
        self._thread.start()

    def say(self, what: Any) -> None:
        """Say how it ended, without waiting for the others."""
        self._what = what
        self._ended.set()

    def tell(self, what: Any) -> list[Any]:
        """Say how it ended; returns how it ended on every rank, when it has on all."""
        self.say(what)
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._told

    def _talk(self) -> None:
        try:
            while True:
                self._ended.wait(_BEAT)
                self._told = self._gather(self._what if self._ended.is_set() else _WORKING)
                if _WORKING not in self._told:
                    return
        except BaseException as error:
            self._error = error


def _in_words(error: BaseException) -> tuple[type[GmetaError], str]:
    if isinstance(error, GmetaError):
        return type(error), str(error)
    return GmetaError, f"{type(error).__name__}: {error}"

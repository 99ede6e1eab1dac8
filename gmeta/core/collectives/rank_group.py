"""The ranks that save, load or publish together; an error on one rank is raised by all.

A rank whose disk is full must not leave the others waiting for it, and the others must not continue training
as if the checkpoint existed. Each rank therefore reports the outcome of a piece of work to the others, and an
error of one rank is raised by all. A long save doesn't count as a stall: a rank that is still working reports
so every few seconds.
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
"""Function that gives all ranks' objects to every rank, ordered by rank, as
`gmeta.core.collectives.allgather_objects` does."""

_BEAT = 10.0  # seconds, far below the time after which a waiting rank gives up
_WORKING, _DONE = "working", "done"


@dataclass(frozen=True)
class Ranks:
    """Place of this rank among those that save or load together.

    Attributes:
      rank: This rank.
      size: Number of ranks.
      gather: Exchanges objects among the ranks; None: they can't exchange objects.
      groups: Number of groups of ranks, each of which has all rows (`gmeta.core.collectives.World`).
    """

    rank: int
    size: int
    gather: Gather | None
    groups: int = 1

    @property
    def owners(self) -> int:
        """Number of ranks that divide the rows: those of one group."""
        return self.size // self.groups

    @property
    def owner(self) -> int:
        """Number of this rank among the owners."""
        return self.rank % self.owners

    @property
    def writes(self) -> bool:
        """Whether this rank saves the rows that it owns; the others have copies."""
        return self.rank < self.owners

    @classmethod
    def of(cls, rank: int | None = None, size: int | None = None, gather: Gather | None = None) -> Ranks:
        """Return the given ranks; by default those of this job (`gmeta.core.collectives.world`)."""
        here = collectives.world()
        rank, size = here.rank if rank is None else rank, here.size if size is None else size
        if gather is None and (rank, size) == (here.rank, here.size):
            gather = collectives.allgather_objects
        return cls(rank, size, gather, here.groups if (rank, size) == (here.rank, here.size) else 1)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a ``with`` block on all ranks. The block must not contain collectives.

        Raises:
          GmetaError: The block failed on some rank. All ranks raise an error of that error's class, which
            names the rank.
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
        """Return on every rank what rank 0 decides.

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
    """Reports this rank's work to the other ranks: every few seconds while it runs, and at its end."""

    def __init__(self, gather: Gather) -> None:
        self._gather, self._ended = gather, threading.Event()
        self._what: Any = _WORKING
        self._told: list[Any] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._talk, name="gmeta-outcome", daemon=True)
        self._thread.start()

    def say(self, what: Any) -> None:
        """Report how the work ended, without waiting for the others."""
        self._what = what
        self._ended.set()

    def tell(self, what: Any) -> list[Any]:
        """Report how the work ended, wait for all ranks, and return how it ended on each."""
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

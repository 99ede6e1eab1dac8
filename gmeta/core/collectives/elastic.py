"""Messages between a rank of an elastic job and its launcher.

The number of ranks of such a job changes. A rank's embedding rows are in its memory alone, so on each change
all ranks start again from the last checkpoint, which any number of ranks can load (`launch_elastic`). The
launcher must know whether a start has saved a checkpoint. All ranks must learn at the same step that others
could join them: the first rank asks after each save, and the answer decides for all. Two drivers start such
jobs, ours and Horovod's; a rank talks to both in the same way.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Protocol

from gmeta.core.collectives import horovod_elastic
from gmeta.core.collectives.notes import LEAVES, leave_note
from gmeta.core.collectives.rendezvous import server_name
from gmeta.core.collectives.store import Store

ELASTIC = "GMETA_ELASTIC"
"""Environment variable: the address and port of the launcher's store for these messages, and its secret."""

SCOPE = "elastic"
"""The scope of the messages."""

SAVED, CHANGE = "saved", "change"
"""Messages: a checkpoint was saved since this start; other places are wanted for ranks."""

AGAIN = 85  # Linux's ERESTART
"""The exit code of a rank that should be started again with another number of ranks."""


class Driver(Protocol):
    """The program that starts the ranks of an elastic job, as a rank sees it."""

    def job(self) -> str:
        """Return the job's name, which is the same in all its starts."""

    def note_checkpoint(self) -> None:
        """Record that a checkpoint was saved since this start."""

    def is_change_wanted(self) -> bool:
        """Return whether other places are wanted for ranks; rank 0 knows."""


class StoreDriver:
    """The driver `launch_elastic`: it keeps a store that outlives its starts.

    Args:
      told: The value of `ELASTIC`.
    """

    def __init__(self, told: str) -> None:
        self._told = told

    def job(self) -> str:
        """Return a name made of the store's address and secret."""
        return hashlib.sha256(self._told.encode()).hexdigest()[:16]

    def note_checkpoint(self) -> None:
        """Leave the message in the store."""
        self._store().put(SCOPE, SAVED, True)

    def is_change_wanted(self) -> bool:
        """Return whether the launcher has left its message."""
        return CHANGE in self._store().values(SCOPE)

    def _store(self) -> Store:
        return Store(*self._told.split())


class HorovodDriver:
    """Horovod's own elastic driver; see `gmeta.core.collectives.horovod_elastic`."""

    def job(self) -> str:
        """Return the address of the driver's server."""
        return server_name()

    def note_checkpoint(self) -> None:
        """Reset the count of starts."""
        horovod_elastic.note_checkpoint()

    def is_change_wanted(self) -> bool:
        """Return whether hosts have come or gone."""
        return horovod_elastic.have_hosts_changed()


def find_driver() -> Driver | None:
    """Find the driver of this process's job; return None outside of an elastic job."""
    if horovod_elastic.is_driven():
        return HorovodDriver()
    return StoreDriver(os.environ[ELASTIC]) if ELASTIC in os.environ else None


def after_save(from_first: Callable[[Callable[[], bool]], bool]) -> None:
    """Notify the driver of a checkpoint, and exit if another number of ranks is wanted.

    All ranks call this when a checkpoint is complete. Outside of an elastic job it does nothing.

    Args:
      from_first: Gives every rank what the first rank's function returns.

    Raises:
      SystemExit: On all ranks, with the code `AGAIN`: the job resumes from this checkpoint.
    """
    driver = find_driver()
    if driver is None:
        return
    driver.note_checkpoint()
    if from_first(driver.is_change_wanted):
        horovod_elastic.start_again_at_exit()
        leave_note(LEAVES)
        raise SystemExit(AGAIN)


def job() -> str:
    """Return the elastic job's name, the same in all its starts; empty outside of an elastic job."""
    driver = find_driver()
    return "" if driver is None else driver.job()

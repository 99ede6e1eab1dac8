"""What a rank of an elastic job and its launcher tell each other.

The number of ranks of such a job changes. A rank's embedding rows are in its memory alone, so all ranks then
start again from the last checkpoint, which any number of them loads (`elastic_launch`). The launcher must
know whether a start has got anywhere, and ranks must know that others could join them, all at the same place:
the first rank asks after each save, and the answer decides for all. Two drivers start such jobs, ours on one
machine and Horovod's on several; a rank talks to both alike.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from gmeta.core.collectives.driver import horovod_elastic
from gmeta.core.collectives.driver.notes import LEAVES, tell
from gmeta.core.collectives.driver.rendezvous import server_name

ELASTIC = "GMETA_ELASTIC"
"""Environment variable: the folder."""

SAVED, CHANGE = "saved", "change"
"""Files in it: a checkpoint has been saved since this start; another number of ranks is wanted."""

AGAIN = 85  # Linux's ERESTART
"""The exit code of a rank that wants to be started again, with another number of ranks."""


class Driver(Protocol):
    """Who starts the ranks of an elastic job, seen from a rank."""

    def job(self) -> str:
        """Name the job, the same in all its starts."""

    def note_checkpoint(self) -> None:
        """Hear that a checkpoint was saved since this start."""

    def is_change_wanted(self) -> bool:
        """Say whether another number of ranks is wanted; rank 0 knows."""


class FolderDriver:
    """`elastic_launch`: it and the ranks write files into a folder.

    Args:
      folder: The folder.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def job(self) -> str:
        """The folder's name."""
        return str(self._folder)

    def note_checkpoint(self) -> None:
        """Leave a file."""
        (self._folder / SAVED).touch()

    def is_change_wanted(self) -> bool:
        """Look for the launcher's file."""
        return (self._folder / CHANGE).exists()


class HorovodDriver:
    """Horovod's own elastic driver; see `gmeta.core.collectives.driver.horovod_elastic`."""

    def job(self) -> str:
        """The address of its server."""
        return server_name()

    def note_checkpoint(self) -> None:
        """Begin to count starts anew."""
        horovod_elastic.note_checkpoint()

    def is_change_wanted(self) -> bool:
        """Whether hosts have come or gone."""
        return horovod_elastic.have_hosts_changed()


def find_driver() -> Driver | None:
    """Find who starts this process's ranks; None outside of an elastic job."""
    if horovod_elastic.is_driven():
        return HorovodDriver()
    return FolderDriver(os.environ[ELASTIC]) if ELASTIC in os.environ else None


def after_save(from_first: Callable[[Callable[[], bool]], bool]) -> None:
    """Tell the driver of a checkpoint, and leave if there should be another number of ranks.

    All ranks call it when a checkpoint is whole. Outside of an elastic job it does nothing.

    Args:
      from_first: Gives every rank what the first rank's function returns.

    Raises:
      SystemExit: On all ranks, with the code `AGAIN`: the job goes on from this checkpoint.
    """
    driver = find_driver()
    if driver is None:
        return
    driver.note_checkpoint()
    if from_first(driver.is_change_wanted):
        horovod_elastic.start_again_at_exit()
        tell(LEAVES)
        raise SystemExit(AGAIN)


def job() -> str:
    """Name the elastic job that this process is a rank of, the same in all its starts; else empty."""
    driver = find_driver()
    return "" if driver is None else driver.job()

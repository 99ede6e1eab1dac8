"""What a rank of an elastic job and its launcher tell each other.

The number of ranks of such a job changes. A rank's embedding rows are in its memory alone, so all ranks then
start again from the last checkpoint, which any number of them loads (`elastic_launch`). The launcher must
know whether a start has got anywhere, and ranks must know that others could join them, all at the same place.
Both is told by files in a folder: the first rank looks there after each save, and what it sees decides for
all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gmeta.core.collectives.driver import horovod_elastic
from gmeta.core.collectives.driver.notes import LEAVES, tell
from gmeta.core.collectives.driver.rendezvous import server_name

ELASTIC = "GMETA_ELASTIC"
"""Environment variable: the folder."""

SAVED, CHANGE = "saved", "change"
"""Files in it: a checkpoint has been saved since this start; another number of ranks is wanted."""

AGAIN = 85  # Linux's ERESTART
"""The exit code of a rank that wants to be started again, with another number of ranks."""


def after_save(from_first: Callable[[Callable[[], bool]], bool]) -> None:
    """Tell the launcher of a checkpoint, and leave if there should be another number of ranks.

    All ranks call it when a checkpoint is whole. Outside of an elastic job it does nothing.

    Args:
      from_first: Gives every rank what the first rank's function returns.

    Raises:
      SystemExit: On all ranks, with the code `AGAIN`: the job goes on from this checkpoint.
    """
    if horovod_elastic.is_driven():
        horovod_elastic.note_checkpoint()
    elif ELASTIC in os.environ:
        (Path(os.environ[ELASTIC]) / SAVED).touch()
    else:
        return
    if from_first(is_change_wanted):
        horovod_elastic.start_again_at_exit()
        tell(LEAVES)
        raise SystemExit(AGAIN)


def job() -> str:
    """A name of the elastic job that this process is a rank of, the same in all its starts; else empty."""
    if horovod_elastic.is_driven():
        return server_name()
    return os.environ.get(ELASTIC, "")


def is_change_wanted() -> bool:
    """Whether the launcher of an elastic job wants another number of ranks. Rank 0 knows."""
    if horovod_elastic.is_driven():
        return horovod_elastic.have_hosts_changed()
    return ELASTIC in os.environ and (Path(os.environ[ELASTIC]) / CHANGE).exists()

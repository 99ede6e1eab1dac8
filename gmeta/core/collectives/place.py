"""The ranks of this job, and which of them this process is."""

from __future__ import annotations

import os
from dataclasses import dataclass

from gmeta.core.errors import ConfigError
from gmeta.core.shares import Shares, total_shares

LAUNCHER = "GMETA_LAUNCHER_PID"
"""Environment variable: the id of the process that started this rank; the rank must end with it."""

_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # horovodrun, Open MPI, other MPIs


@dataclass(frozen=True)
class World:
    """The ranks of a job.

    Attributes:
      rank: The number of this process's rank, from 0.
      size: How many ranks there are.
      local_rank: The number of this rank among those on this machine, which is the number of its GPU.
    """

    rank: int
    size: int
    local_rank: int

    @property
    def shares(self) -> Shares:
        """The shares of each step's data that this rank takes: one share, unless the job has lost ranks.

        ``shares.total`` is how many batches a step has, whatever the number of ranks.

        Raises:
          ConfigError: There are fewer shares than ranks.
        """
        return Shares.of(self.rank, self.size, total_shares(self.size))


_ALONE = World(rank=0, size=1, local_rank=0)
_world = _ALONE


def world() -> World:
    """Return the ranks of this job: one rank until `init` has found more."""
    return _world


def enter(here: World) -> None:
    """Make this process a rank: `world` returns ``here`` from now on. `gmeta.init` calls it."""
    global _world
    _world = here


def has_entered() -> bool:
    """Return whether this process is one of several ranks, or the only one that an elastic driver started."""
    return _world is not _ALONE


def under_launcher() -> bool:
    """Return whether a launcher started this process as a rank, perhaps the only one."""
    return any(variable in os.environ for variable in _SIZES)


def launched_size() -> int:
    """Return how many ranks the launcher of this process states; 1 without a launcher.

    Raises:
      ConfigError: The launcher's environment holds no number.
    """
    for variable in _SIZES:
        text = os.environ.get(variable)
        if text is not None:
            if not text.isdecimal() or int(text) < 1:
                raise ConfigError(f"{variable}={text!r} is no number of ranks; unset it, or use a launcher")
            return int(text)
    return 1


def check_init() -> None:
    """Refuse to train alone in a process that a launcher has started as one of several ranks.

    Raises:
      ConfigError: `init` wasn't called.
    """
    size = launched_size()
    if size > 1 and not has_entered():
        raise ConfigError(
            f"a launcher started this process as one of {size} ranks, but gmeta.init() wasn't called, so "
            "each would train a model of its own: call gmeta.init() right after the imports"
        )

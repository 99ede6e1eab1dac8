"""The ranks of this job, and which of them this process is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

from gmeta.core.errors import ConfigError
from gmeta.core.shares import Shares, total_shares

LAUNCHER = "GMETA_LAUNCHER_PID"
"""Environment variable: the id of the process that started this rank; the rank must end with it."""

GROUPS = "GMETA_GROUPS"
"""Environment variable: the number of groups that the ranks form; by default 1."""

OWN = "GMETA_"
"""The variables by which gmeta's launcher tells a rank its place, without Horovod, begin with this."""

PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
"""Their rest, in the order of `Place`; Horovod's are the same behind ``HOROVOD_``."""

# gmeta's launcher, horovodrun, Open MPI, other MPIs
_SIZES = (f"{OWN}SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class Place(NamedTuple):
    """What a rank is told of its place.

    Attributes:
      rank: The number of this process's rank.
      size: How many ranks there are.
      local_rank: Its number among those on this machine.
      local_size: How many these are.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    def variables(self) -> dict[str, str]:
        """Return the environment variables that say it."""
        return {f"{OWN}{name}": str(value) for name, value in zip(PLACE, self, strict=True)}


@dataclass(frozen=True)
class World:
    """The ranks of a job.

    Attributes:
      rank: The number of this process's rank, from 0.
      size: How many ranks there are.
      local_rank: The number of this rank among those on this machine, which is the number of its GPU.
      groups: How many groups the ranks form. The ranks of a group are consecutive. They divide the rows of
        tables among them, and each group has all rows.
    """

    rank: int
    size: int
    local_rank: int
    groups: int = 1

    @property
    def group(self) -> int:
        """The number of this rank's group, from 0."""
        return self.rank // self.group_size

    @property
    def group_size(self) -> int:
        """How many ranks a group has."""
        return self.size // self.groups

    @property
    def group_rank(self) -> int:
        """The number of this rank within its group, from 0, which says what rows it owns."""
        return self.rank % self.group_size

    @property
    def group_ranks(self) -> range:
        """The ranks of this rank's group."""
        return range(self.group * self.group_size, (self.group + 1) * self.group_size)

    @property
    def replicas(self) -> range:
        """The ranks that own the same rows as this one, itself among them: one of each group, in order."""
        return range(self.group_rank, self.size, self.group_size)

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


def told_place() -> Place | None:
    """Return the place that gmeta's launcher has told this rank without Horovod; None under other launchers.

    Raises:
      ConfigError: A variable is missing, or no number.
    """
    if f"{OWN}SIZE" not in os.environ:
        return None
    told = [os.environ.get(f"{OWN}{name}", "") for name in PLACE]
    if not all(text.isdecimal() for text in told):
        said = ", ".join(f"{OWN}{name}={text!r}" for name, text in zip(PLACE, told, strict=True))
        raise ConfigError(f"{said}: these are no place of a rank; unset them, or start it by gmeta launch")
    return Place(*map(int, told))


def launched_rank() -> str:
    """Return the number of this rank as its launcher states it; "unknown" without one."""
    return os.environ.get(f"{OWN}RANK") or os.environ.get("HOROVOD_RANK") or "unknown"


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


def choose_groups(given: int | None, size: int) -> int:
    """Return how many groups the ranks form.

    Args:
      given: What the caller of `init` says; None: what the environment variable ``GMETA_GROUPS`` says.
      size: How many ranks there are.

    Raises:
      ConfigError: It is no number of groups, they differ, or the ranks can't be divided into so many.
    """
    text = os.environ.get(GROUPS)
    if text is not None and (not text.isdecimal() or int(text) < 1):
        raise ConfigError(f"{GROUPS}={text!r} is no number of groups; unset it, or give at least 1")
    if given is not None and given < 1:
        raise ConfigError(f"groups={given} is no number of groups; give at least 1")
    if given is not None and text is not None and int(text) != given:
        raise ConfigError(f"groups={given}, but {GROUPS}={text}: unset it, or give the same number")
    groups = given if given is not None else int(text or 1)
    if size % groups:
        ranks = "1 rank" if size == 1 else f"{size} ranks"
        raise ConfigError(
            f"{ranks} can't form {groups} groups of equal size: start a multiple of {groups} ranks, or set "
            f"another number of groups by gmeta.init(groups=...) or {GROUPS}"
        )
    return groups


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

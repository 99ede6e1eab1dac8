"""The ranks of this job, the rank of this process, and whether Horovod connects them.

Horovod is optional: gmeta's launcher connects ranks without it. ``GMETA_RANKS`` is one of

* ``auto``, the default: Horovod if it is installed, otherwise gmeta's own store and lanes;
* ``horovod``: Horovod;
* ``gmeta``: gmeta's own store and lanes, even if Horovod is installed;
* ``one``: each process is a job of one rank, even if a launcher started several.

The launcher and its ranks read it. This module imports Horovod only when a function needs it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from gmeta.core.errors import ConfigError
from gmeta.core.shares import Shares, total_shares
from gmeta.core.version import find_tensorflow

LAUNCHER = "GMETA_LAUNCHER_PID"
"""Environment variable: the id of the process that started this rank; the rank must end with it."""

GROUPS = "GMETA_GROUPS"
"""Environment variable: the number of groups that the ranks form; by default 1."""

OWN = "GMETA_"
"""The prefix of the variables by which gmeta's launcher passes a rank its place, without Horovod."""

PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
"""Their rest, in the order of `RankPlace`; Horovod's are the same behind ``HOROVOD_``."""

_MEET = (f"{OWN}SIZE", "HOROVOD_SIZE")
"""The variables by which gmeta's launcher and horovodrun state how many ranks they have started."""

_MPI = {
    "OMPI_COMM_WORLD_SIZE": ("mpirun of Open MPI", "OMPI_COMM_WORLD_RANK"),
    "PMI_SIZE": ("an MPI's mpirun", "PMI_RANK"),
    "MV2_COMM_WORLD_SIZE": ("mpirun of MVAPICH", "MV2_COMM_WORLD_RANK"),
}
"""The same of MPIs, whose ranks a Horovod that is built with MPI joins -> (launcher, the rank's variable)."""

_STRANGERS = {
    "SLURM_STEP_NUM_TASKS": ("srun", "SLURM_PROCID"),
    "JSM_NAMESPACE_SIZE": ("jsrun", "JSM_NAMESPACE_RANK"),
    "WORLD_SIZE": ("torchrun", "RANK"),
}
"""The same for launchers whose ranks gmeta can't join.

A shell of salloc or a script of sbatch has SLURM_NTASKS too, but only what srun starts has the other one.
"""


class RankPlace(NamedTuple):
    """The place of a rank in its job.

    Attributes:
      rank: The number of this process's rank.
      size: How many ranks there are.
      local_rank: Its number among the ranks on this machine.
      local_size: Number of ranks on this machine.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    def variables(self) -> dict[str, str]:
        """Return the environment variables that describe the place."""
        return {f"{OWN}{name}": str(value) for name, value in zip(PLACE, self, strict=True)}


@dataclass(frozen=True)
class World:
    """The ranks of a job.

    Attributes:
      rank: The number of this process's rank, from 0.
      size: How many ranks there are.
      local_rank: The number of this rank among those on this machine, which is the number of its GPU.
      groups: How many groups the ranks form. The ranks of a group are consecutive and divide the rows of
        tables; each group has all rows.
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
        """The number of this rank within its group, from 0, which determines the rows that it owns."""
        return self.rank % self.group_size

    @property
    def group_ranks(self) -> range:
        """The ranks of this rank's group."""
        return range(self.group * self.group_size, (self.group + 1) * self.group_size)

    @property
    def replicas(self) -> range:
        """The ranks that own the same rows as this one, including itself: one of each group, in order."""
        return range(self.group_rank, self.size, self.group_size)

    @property
    def shares(self) -> Shares:
        """The shares of each step's data that this rank takes: one share, unless the job has lost ranks.

        ``shares.total`` is how many batches a step has, regardless of the number of ranks.

        Raises:
          ConfigError: There are fewer shares than ranks.
        """
        return Shares.of(self.rank, self.size, total_shares(self.size))


_ALONE = World(rank=0, size=1, local_rank=0)
_world = _ALONE
_is_alone: ContextVar[bool] = ContextVar("is_alone", default=False)


def world() -> World:
    """Return the ranks of this job: one rank until `init` finds more."""
    return _ALONE if _is_alone.get() else _world


@contextmanager
def as_one_rank() -> Iterator[None]:
    """Make `world` return one rank in this thread, in a ``with`` block: what is traced has no collectives."""
    token = _is_alone.set(True)
    try:
        yield
    finally:
        _is_alone.reset(token)


def enter(here: World) -> None:
    """Make this process a rank: `world` returns ``here`` from now on. `gmeta.init` calls it."""
    global _world
    _world = here


def has_entered() -> bool:
    """Return whether this process is one of several ranks, or the only rank of an elastic driver."""
    return _world is not _ALONE


def under_launcher() -> bool:
    """Return whether a launcher that gmeta supports started this process, possibly as the only rank."""
    return any(variable in os.environ for variable in (*_MEET, *_joined_mpi()))


def told_place() -> RankPlace | None:
    """Return the place that gmeta's launcher assigned without Horovod; None under other launchers.

    Raises:
      ConfigError: A variable is missing, or no number.
    """
    return _place_by(OWN) if f"{OWN}SIZE" in os.environ else None


def launched_place() -> RankPlace:
    """Return the place that gmeta's launcher or horovodrun assigned; one rank without a launcher.

    Raises:
      ConfigError: A variable is missing, or no number; or the launcher uses MPI.
    """
    if not under_launcher():
        return RankPlace(0, 1, 0, 1)
    prefix = next((one for one in (OWN, "HOROVOD_") if f"{one}SIZE" in os.environ), None)
    if prefix is None:
        raise ConfigError(
            f"one of {launched_size()} processes of an MPI's mpirun: start the command once, with --np, or "
            "its processes by gmeta launch"
        )
    return _place_by(prefix)


def _place_by(prefix: str) -> RankPlace:
    told = [os.environ.get(f"{prefix}{name}", "") for name in PLACE]
    if not all(text.isdecimal() for text in told):
        said = ", ".join(f"{prefix}{name}={text!r}" for name, text in zip(PLACE, told, strict=True))
        raise ConfigError(f"{said}: these are no place of a rank; unset them, or start it by gmeta launch")
    return RankPlace(*map(int, told))


def launched_rank() -> str:
    """Return the number of this rank as its launcher states it; "unknown" without one."""
    return os.environ.get(f"{OWN}RANK") or os.environ.get("HOROVOD_RANK") or "unknown"


def launched_size() -> int:
    """Return the launcher's number of ranks; 1 without a launcher that gmeta supports.

    Raises:
      ConfigError: The launcher's environment has no number.
    """
    return next((_number(name) for name in (*_MEET, *_joined_mpi()) if name in os.environ), 1)


def _joined_mpi() -> tuple[str, ...]:
    return () if choice() == ONE else tuple(_MPI)


def _number(variable: str) -> int:
    text = os.environ[variable]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{variable}={text!r} is no number of ranks; unset it, or use a launcher")
    return int(text)


def started_with() -> str:
    """Describe how an unsupported launcher started this process with others.

    Returns:
      A phrase such as ``one of 2 by srun (SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=1)``; "" if the process is
      alone, if gmeta's launcher or horovodrun started it, or with ``GMETA_RANKS=one``.

    Raises:
      ConfigError: A variable isn't what its launcher writes.
    """
    if choice() == ONE or any(variable in os.environ for variable in _MEET):
        return ""
    for size, (launcher, rank) in {**_MPI, **_STRANGERS}.items():
        if size in os.environ and rank in os.environ and _number(size) > 1:
            variables = f"{size}={os.environ[size]}, {rank}={os.environ[rank]}"
            return f"one of {os.environ[size]} by {launcher} ({variables})"
    if os.environ.get("PMIX_RANK", "0") != "0":  # PMIx doesn't provide the number of processes
        return f"one of several by a launcher of PMIx (PMIX_RANK={os.environ['PMIX_RANK']})"
    tasks = _tasks_of_cluster()
    return f"one of {tasks} tasks of a cluster (TF_CONFIG)" if tasks > 1 else ""


def _tasks_of_cluster() -> int:
    text = os.environ.get("TF_CONFIG")
    if not text:
        return 1
    try:
        return sum(len(tasks) for tasks in json.loads(text).get("cluster", {}).values())
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"TF_CONFIG={text!r} describes no cluster ({error}); unset it") from error


def check_alone(what: str) -> None:
    """Refuse to run as a job of one rank in a process that was started with others.

    Args:
      what: What each of them would do, such as "train a model of its own".

    Raises:
      ConfigError: `started_with` names others. The message lists the variables that it found.
    """
    found = started_with()
    if found:
        mpi = ", or build Horovod with HOROVOD_WITH_MPI=1 to join MPI's ranks" if "mpirun" in found else ""
        raise ConfigError(
            f"this process was started as {found}, and gmeta sees one rank: each of them would {what}. Start "
            "the program once, by `gmeta launch --np 4 -- python train.py`, on several machines with "
            f"`--hosts a:2,b:2`, or by horovodrun{mpi}; if each process is meant to be a job of its own, set "
            f"{RANKS}={ONE}"
        )


def choose_groups(given: int | None, size: int) -> int:
    """Return how many groups the ranks form.

    Args:
      given: The argument of `init`; None: the environment variable ``GMETA_GROUPS``.
      size: How many ranks there are.

    Raises:
      ConfigError: The number is invalid, the two differ, or the ranks can't be divided into that many groups.
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
    """Refuse to train alone in a process that a launcher started as one of several ranks.

    Raises:
      ConfigError: `init` wasn't called, or gmeta doesn't support this launcher.
    """
    if has_entered():
        return
    size = launched_size()
    if size > 1:
        raise ConfigError(
            f"a launcher started this process as one of {size} ranks, but gmeta.init() wasn't called, so "
            "each would train a model of its own: call gmeta.init() right after the imports"
        )
    check_alone("train a model of its own")


LAST_TENSORFLOW = (2, 18)
"""The last minor version of TensorFlow that Horovod 0.28.1 builds against."""

RANKS = "GMETA_RANKS"
ONE = "one"
CHOICES = ("auto", "horovod", "gmeta", ONE)
DEFAULT = "auto"

_BACKENDS = ("gloo", "mpi", "nccl", "cuda")


def horovod_advice() -> str:
    """Explain how to build Horovod for the installed TensorFlow, or list the supported versions."""
    found = find_tensorflow()
    if found is not None and tuple(map(int, found[1].split(".")[:2])) > LAST_TENSORFLOW:
        last = ".".join(map(str, LAST_TENSORFLOW))
        return f"take TensorFlow {last} or older: Horovod 0.28.1 doesn't build against {found[1]}"
    # Plain pip builds it without TensorFlow.
    return (
        "build it by `make setup` in a checkout; elsewhere `pip install 'setuptools<70' wheel 'cmake<4'`, "
        "then `HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 pip install --no-cache-dir --no-build-isolation "
        "--force-reinstall horovod==0.28.1`"
    )


def horovod_version() -> str | None:
    """Return the installed Horovod's version, or None if it isn't installed, without importing it."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None


def uses_horovod(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher should connect ranks by Horovod, according to ``GMETA_RANKS``.

    Args:
      environment: The environment of the ranks.

    Raises:
      ConfigError: The value is unknown, or selects Horovod, which isn't installed.
    """
    name = choice(environment)
    if name == ONE:
        raise ConfigError(f"{RANKS}={ONE} makes each process a job of one rank: unset it to start several")
    if name == "horovod" and horovod_version() is None:
        raise ConfigError(f"{RANKS}=horovod, but Horovod is not installed: unset it, or {horovod_advice()}")
    return name == "horovod" or (name == "auto" and horovod_version() is not None)


def check_launcher(*, own: bool) -> None:
    """Refuse to be a rank of a launcher other than the one that ``GMETA_RANKS`` selects.

    Args:
      own: Whether gmeta's launcher started this rank without Horovod.

    Raises:
      ConfigError: The selection doesn't match, or is unknown.
    """
    name = choice()
    if name in (ONE, "horovod" if own else "gmeta"):
        by = "gmeta's launcher without Horovod" if own else "a launcher of Horovod's or MPI's"
        raise ConfigError(
            f"{RANKS}={name}, but {by} started this rank: unset it, or start the job by `gmeta launch`"
        )


def choice(environment: Mapping[str, str] = os.environ) -> str:
    """Return the value of ``GMETA_RANKS``.

    Raises:
      ConfigError: It is none of the choices.
    """
    name = environment.get(RANKS, DEFAULT)
    if name not in CHOICES:
        raise ConfigError(f"{RANKS}={name!r}: give one of {', '.join(CHOICES)}")
    return name


@functools.cache
def import_horovod() -> ModuleType:
    """Import ``horovod.tensorflow`` on the first call and return it, without initializing it.

    Raises:
      ConfigError: Horovod isn't installed, or doesn't load into the installed TensorFlow.
    """
    if horovod_version() is None:
        raise ConfigError(
            "Horovod is not installed: start ranks by `gmeta launch`, which doesn't need it, or "
            f"{horovod_advice()}"
        )
    try:
        import horovod.tensorflow as hvd
    except Exception as error:  # an extension built against another TensorFlow fails in many ways
        raise ConfigError(f"Horovod {horovod_version()} doesn't load: {error}; {horovod_advice()}") from error
    return hvd


def built_backends() -> dict[str, bool]:
    """Return which of Horovod's backends were compiled in: ``gloo``, ``mpi``, ``nccl``, ``cuda``.

    Raises:
      ConfigError: As `import_horovod`.
    """
    hvd = import_horovod()
    return {name: bool(getattr(hvd, f"{name}_built")()) for name in _BACKENDS}


def node_name(name: str) -> str:
    """Return the name of a collective's op, which appears in errors.

    Horovod matches the ranks' ops by the part of their names after the last slash, so the name contains none:
    otherwise, Horovod would confuse the exchanges of two collections.

    Example:
      >>> node_name("items/keys")
      'gmeta_items_keys'
    """
    return re.sub(r"[^A-Za-z0-9_]", "_", f"gmeta_{name}")

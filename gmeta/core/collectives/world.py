"""The ranks of this job, and which of them this process is."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import threading
import time
from dataclasses import dataclass

from gmeta.core.collectives import backend, horovod_elastic, rendezvous, telling
from gmeta.core.collectives.first_words import say_errors_first
from gmeta.core.collectives.shares import Shares, total_shares
from gmeta.core.errors import CollectiveError, ConfigError

LAUNCHER = "GMETA_LAUNCHER_PID"
"""Environment variable: the process that started this rank, and without which it must not go on."""

DEFAULTS = {
    # Milliseconds between two looks at what is to be sent. A small collective takes 2.1 ms at Horovod's own
    # default of 1 ms, and 0.8 ms at 0.1.
    "HOROVOD_CYCLE_TIME": "0.1",
    # How long a rank may keep the others waiting in a collective (`stalls`); 0, Horovod's own, is for ever.
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
    # How long a rank waits for a machine that has gone silent, and for the slowest import at the start.
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "50",
}
"""What `init` sets of Horovod's environment where the user hasn't."""

_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # horovodrun, Open MPI, other MPIs


@dataclass(frozen=True)
class World:
    """The ranks of a job.

    Attributes:
      rank: Which one this process is, from 0.
      size: How many there are.
      local_rank: Which one it is among those on this machine: the number of its GPU.
    """

    rank: int
    size: int
    local_rank: int

    @property
    def shares(self) -> Shares:
        """What this rank takes of the data of each step: one share, unless the job has lost ranks.

        ``shares.total`` is how many batches a step has, whatever the number of ranks.

        Raises:
          ConfigError: There are fewer shares than ranks.
        """
        return Shares.of(self.rank, self.size, total_shares(self.size))


_ALONE = World(rank=0, size=1, local_rank=0)
_world = _ALONE


def world() -> World:
    """The ranks of this job; one rank until `init` has found more."""
    return _world


def under_launcher() -> bool:
    """Whether a launcher started this process as a rank, perhaps the only one."""
    return any(variable in os.environ for variable in _SIZES)


def launched_size() -> int:
    """How many ranks the launcher that started this process speaks of; 1 without a launcher.

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
    if size > 1 and _world is _ALONE:
        raise ConfigError(
            f"a launcher started this process as one of {size} ranks, but gmeta.init() wasn't called, so "
            "each would train a model of its own: call gmeta.init() right after the imports"
        )


def init() -> World:
    """Become a rank of the job that the launcher started. ``gmeta.init()`` in a user's script.

    Call it once, before TensorFlow has touched a GPU. Under ``horovodrun``, ``mpirun`` or
    ``gmeta train --np N`` it starts Horovod, takes the GPU of its local rank, and checks that all ranks run
    the same versions; without a launcher it does nothing, so a script runs unchanged on one rank. A second
    call returns the same world.

    Returns:
      The world, which `world` returns from now on.

    Raises:
      ConfigError: Horovod is missing or broken, ranks differ in a version, or there is no GPU for this rank.
      CollectiveError: The other ranks can't be reached.

    Example:
      >>> from gmeta.core import collectives
      >>> collectives.init()
      World(rank=0, size=1, local_rank=0)
    """
    global _world
    if _world is not _ALONE:
        return _world
    _end_with_launcher()
    driven = horovod_elastic.is_driven()
    if driven:
        horovod_elastic.find_place()
    total_shares(launched_size())  # which refuses too many ranks
    # Under Horovod's driver the only rank has to hear of hosts that come.
    if launched_size() == 1 and not driven:
        return _world
    for variable, value in DEFAULTS.items():
        os.environ.setdefault(variable, value)
    hvd = backend.import_horovod()
    rendezvous.through_proxy()
    try:
        hvd.init()
    except Exception as error:  # whatever the network and the rendezvous may raise
        telling.tell(telling.LOST_PEERS)
        horovod_elastic.start_again_at_exit()
        rank = os.environ.get("HOROVOD_RANK", "unknown")
        raise CollectiveError(
            f"rank {rank} of {launched_size()} on {platform.node()} can't reach the others: {error}; see "
            "whether every rank has started, and whether the machines reach each other over "
            "HOROVOD_GLOO_IFACE"
        ) from error
    if driven:
        horovod_elastic.watch_hosts()
    _world = World(rank=hvd.rank(), size=hvd.size(), local_rank=hvd.local_rank())
    say_errors_first(_world.rank, _world.size)
    # Before anything is computed or exchanged: NCCL refuses two ranks on one GPU.
    _take_gpu(_world.local_rank, hvd.local_size())
    # These import TensorFlow.
    from gmeta.core.collectives.agreement import check_agreement
    from gmeta.core.collectives.stalls import watch_for_stalls

    watch_for_stalls(_world, os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"])
    check_agreement(versions(), advice="install the same on every machine")
    return _world


def versions() -> dict[str, str]:
    """What every rank must have alike: the versions of Python, gmeta and the packages that compute.

    Python by its minor version, as packages are built for it.
    """
    import gmeta

    major, minor, _ = platform.python_version_tuple()
    packages = ("tensorflow", "tf-keras", "numpy", "horovod")
    found = {package: importlib.metadata.version(package) for package in packages}
    return {"python": f"{major}.{minor}", "gmeta": gmeta.__version__, **found}


def _take_gpu(local_rank: int, local_size: int) -> None:
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    # One visible GPU is the one that the launcher or CUDA_VISIBLE_DEVICES gave to this rank.
    if 1 < len(gpus) < local_size:
        raise ConfigError(
            f"{local_size} ranks on {platform.node()} but {len(gpus)} GPUs; start at most {len(gpus)} ranks "
            "there, or hide the GPUs with CUDA_VISIBLE_DEVICES=''"
        )
    mine = gpus[0] if len(gpus) == 1 else gpus[local_rank]
    try:
        tf.config.set_visible_devices(mine, "GPU")
        tf.config.experimental.set_memory_growth(mine, True)
    except RuntimeError as error:
        raise ConfigError(
            f"local rank {local_rank} can't take {mine.name}: {error}; call gmeta.init() before anything "
            "that computes"
        ) from error


@functools.cache  # one watch
def _end_with_launcher() -> None:
    """Leave when the launcher is gone, however it went: nobody else would end this rank."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="gmeta-launcher-watch", daemon=True).start()

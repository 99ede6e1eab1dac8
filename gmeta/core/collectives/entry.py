"""Makes a process a rank of its job."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import threading
import time
from typing import TYPE_CHECKING

from gmeta.core.collectives import elastic
from gmeta.core.collectives.place import (
    GROUPS,
    LAUNCHER,
    RankPlace,
    World,
    check_alone,
    check_launcher,
    choose_groups,
    enter,
    has_entered,
    horovod_version,
    launched_place,
    launched_size,
    told_place,
    world,
)
from gmeta.core.errors import ConfigError
from gmeta.core.shares import total_shares
from gmeta.core.version import __version__, find_tensorflow

if TYPE_CHECKING:
    from gmeta.core.collectives.objects import Peers

DEFAULTS = {
    # Milliseconds between two checks for data to send. A small collective takes 2.1 ms at Horovod's own
    # default of 1 ms, and 0.8 ms at 0.1.
    "HOROVOD_CYCLE_TIME": "0.1",
    # How long a rank may make the others wait in a collective (`stalls`); 0, Horovod's default: no limit.
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
    # How long a rank waits for a silent machine, and for the slowest import at the start.
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "50",
}
"""Environment variables of Horovod that `init` sets unless the user has set them."""

_ALONE = "train a model of its own"


def init(groups: int | None = None) -> World:
    """Become a rank of the job that the launcher started; scripts call it as ``gmeta.init()``.

    Call it once, before TensorFlow has touched a GPU. Under ``gmeta launch``, ``gmeta train --np N``,
    ``horovodrun`` or ``mpirun``, it connects to the other ranks, through Horovod or, if gmeta's launcher
    started them without it, only by lanes. It selects the GPU of its local rank, and checks that all ranks
    run the same versions. Without a launcher, it does nothing, so a script runs unchanged on one rank. A
    second call returns the same world. A process that another launcher started with others is refused, unless
    ``GMETA_RANKS=one`` declares each a separate job.

    With G groups, N ranks store the rows of tables G times: the N / G ranks of a group divide the rows and
    request them only from each other, and the groups train on different data. The owners of the same rows
    exchange the keys that their groups looked up, and sum their groups' gradients. All copies of a row stay
    bitwise equal, and a step equals that of one group up to the rounding of sums. Ranks 0 to N / G - 1 are
    the first group, so a machine can be a group. G groups take G times the memory, and send rows only within
    a group.

    Args:
      groups: G. None: the environment variable ``GMETA_GROUPS``, or 1. One rank can't form several groups, so
        a script that also runs on one rank leaves this to the launcher's environment.

    Returns:
      The world, which `world` returns from then on.

    Raises:
      ConfigError: Horovod is missing or broken, ranks differ in a version, or there is no GPU for this rank;
        the process is one of several of a launcher whose ranks gmeta can't join (mpirun with a Horovod
        without MPI, srun, torchrun, TF_CONFIG);
        ``GMETA_LANE`` isn't a lane (`lane`); the number of ranks isn't a multiple of ``groups``, ranks differ
        in it, or another call set another number.
      CollectiveError: The other ranks can't be reached.

    Example:
      >>> from gmeta.core import collectives
      >>> collectives.init()
      World(rank=0, size=1, local_rank=0, groups=1)
    """
    if has_entered():
        if groups not in (None, world().groups):
            raise ConfigError(
                f"gmeta.init(groups={groups}), but this rank is one of {world().groups} groups already: "
                "pass groups in the first call"
            )
        return world()
    _end_with_launcher()
    driven = elastic.is_driven()
    if driven:
        elastic.find_place()
    total_shares(launched_size())  # refuses too many ranks
    groups = choose_groups(groups, launched_size())
    # Under Horovod's driver, even a single rank must be notified of new hosts.
    if launched_size() == 1 and not driven:
        check_alone(_ALONE)
        return world()
    for variable, value in DEFAULTS.items():
        os.environ.setdefault(variable, value)
    peers = _find_peers()
    place = peers.start()
    if place.size == 1:
        check_alone(_ALONE)  # a Horovod that isn't built with MPI sees one rank under mpirun
    here = World(place.rank, place.size, place.local_rank, groups)
    enter(here)
    # These import TensorFlow.
    from gmeta.core.collectives.lane import open_lanes
    from gmeta.core.collectives.monitoring import print_errors_first, watch_for_stalls
    from gmeta.core.collectives.objects import check_agreement, use_peers

    print_errors_first(here.rank, here.size)
    # Before any computation or exchange, because NCCL refuses two ranks on one GPU.
    _take_gpu(place.local_rank, place.local_size)
    watch_for_stalls(here, os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"])
    peers.connect(here)
    use_peers(peers)
    check_agreement(versions(peers.packages), advice="install the same on every machine")
    check_agreement({GROUPS: str(groups)}, advice="give every rank the same number of groups")
    open_lanes(here)
    return here


def init_apart() -> RankPlace:
    """Become one of the processes among which a launcher divides work, without communication.

    The process is a world of one rank, `world`, so it stores whole tables and waits for no other. It selects
    the GPU of its place, and ends with its launcher.

    Returns:
      Its place among the processes; without a launcher, the only one.

    Raises:
      ConfigError: The launcher assigns no place, or it is neither gmeta's nor horovodrun.
    """
    place = launched_place()
    if place.size == 1:
        check_alone("do all of the work")
        return place
    _end_with_launcher()
    enter(World(0, 1, place.local_rank))
    _take_gpu(place.local_rank, place.local_size)
    return place


def _find_peers() -> Peers:
    """Return the connection of this job's ranks, as chosen by its launcher."""
    check_launcher(own=told_place() is not None)
    if horovod_version() is None:
        check_alone(_ALONE)
    # These import TensorFlow.
    if told_place() is None:
        from gmeta.core.collectives.peers import HorovodPeers

        return HorovodPeers()
    from gmeta.core.collectives.peers import LanePeers

    return LanePeers()


def versions(more: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the versions that must be equal on all ranks: of Python, gmeta and the packages that compute.

    The minor version of Python counts, because packages are built for it.

    Args:
      more: Other packages that take part (`gmeta.core.collectives.objects.Peers`).
    """
    major, minor, _ = platform.python_version_tuple()
    packages = ("tf-keras", "numpy", *more)
    found = {package: importlib.metadata.version(package) for package in packages}
    tensorflow = find_tensorflow()
    version = tensorflow[1] if tensorflow else "none"
    return {"python": f"{major}.{minor}", "gmeta": __version__, "tensorflow": version, **found}


def _take_gpu(local_rank: int, local_size: int) -> None:
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    # A single visible GPU is the one that the launcher or CUDA_VISIBLE_DEVICES assigned to this rank.
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


@functools.cache  # one watching thread
def _end_with_launcher() -> None:
    """End this process when the launcher is gone for any reason; nothing else would end it."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="gmeta-launcher-watch", daemon=True).start()

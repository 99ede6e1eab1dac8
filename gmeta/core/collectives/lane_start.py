"""Opens the lanes that carry the collectives of steps (`lane`), as the environment chooses.

``GMETA_LANE`` is one of

* ``auto``, the default: tensors in host memory go over TCP. Those on GPUs go by NCCL, if each rank has a GPU
  of its own and finds NCCL, else through Horovod.
* ``tcp``: as ``auto``, but all tensors on GPUs go through Horovod.
* ``horovod``: everything goes through Horovod.

If only some ranks see a GPU, tensors on GPUs go over TCP too: all ranks must take one way. Without Horovod
(`lane_peers`), TCP carries what Horovod would.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from gmeta.core.collectives.failures import name_failures
from gmeta.core.collectives.greeting import sign
from gmeta.core.collectives.lane import DEVICES, Lane, LaneDevice, find_lane, use_lanes
from gmeta.core.collectives.objects import allgather_objects, check_agreement
from gmeta.core.collectives.place import World
from gmeta.core.collectives.rendezvous import SECRET
from gmeta.core.collectives.wire import choose_addresses, name_loopback, name_machine
from gmeta.core.errors import CollectiveError, ConfigError
from gmeta.core.native import build_info, library_path, load_op_library

VARIABLE = "GMETA_LANE"
CHOICES = ("auto", "tcp", "horovod")
DEFAULT = "auto"


@dataclass(frozen=True)
class Gpu:
    """A rank's GPU, as the rank sees it.

    Attributes:
      seen: Whether TensorFlow sees one.
      address: Where it is on the machine's bus.
      version: NCCL's version, as a number.
      id: The communicator's id, made by rank 0.
      why: What keeps this rank from using NCCL; "" if nothing does.
    """

    seen: bool
    address: str = ""
    version: int = 0
    id: bytes = b""
    why: str = ""


def choose_lane() -> str:
    """Return the lane that this process's environment chooses.

    Raises:
      ConfigError: It names no lane.
    """
    name = os.environ.get(VARIABLE, DEFAULT)
    if name not in CHOICES:
        raise ConfigError(f"{VARIABLE}={name!r}: give one of {', '.join(CHOICES)}")
    return name


def open_lanes(here: World) -> None:
    """Connect this rank with the others, as chosen; all ranks call it, in `gmeta.init`.

    Raises:
      ConfigError: The ranks choose differently, or ``HOROVOD_GLOO_IFACE`` has no address.
      CollectiveError: A rank can't be reached.
    """
    name = choose_lane()
    check_agreement({VARIABLE: name}, advice="set it alike on every rank")
    if name == "horovod" or here.size == 1:
        return
    opened = find_lane("cpu", "gmeta.init")  # open already if there is no Horovod
    gpu = _find_gpu(make_id=here.rank == 0) if name == "auto" else Gpu(_sees_gpu(), why=f"{VARIABLE}={name}")
    ranks = allgather_objects((name_machine(), asdict(gpu), name_loopback()))
    machines, gpus = [rank[0] for rank in ranks], [Gpu(**rank[1]) for rank in ranks]
    local = all(loopback == name_loopback() for *_, loopback in ranks)
    try:
        with name_failures("gmeta.init()"):
            host = opened or open_lane("cpu", here, local, allgather_objects)
            lanes: dict[LaneDevice, Lane] = {"cpu": host}
            if can_use_nccl(machines, gpus):
                lanes["gpu"] = open_lane("gpu", here, local, allgather_objects, first=gpus[0])
            elif opened or {gpu.seen for gpu in gpus} == {True, False}:
                lanes["gpu"] = host
    except CollectiveError as error:
        without = "" if opened else f"; {VARIABLE}=horovod does without these connections"
        raise CollectiveError(f"{error}{without}") from error
    use_lanes(lanes)


def can_use_nccl(machines: Sequence[tuple[str, str]], gpus: Sequence[Gpu]) -> bool:
    """Return whether every rank has NCCL, of one version, and a GPU of its own."""
    own = {(machine, gpu.address) for machine, gpu in zip(machines, gpus, strict=True)}
    return (
        all(gpu.seen and not gpu.why for gpu in gpus)
        and len({gpu.version for gpu in gpus}) == 1
        and len(own) == len(gpus)
    )


def open_lane(
    place: LaneDevice,
    here: World,
    local: bool,
    gather: Callable[[Any], Sequence[Any]],
    *,
    first: Gpu | None = None,
    start: int | None = None,
) -> Lane:
    """Open a lane, with all ranks.

    Args:
      place: Where its tensors are.
      here: This rank.
      local: Whether all ranks have the same loopback address.
      gather: Gives every rank the objects of all.
      first: The GPU of rank 0, if it is a lane of GPUs.
      start: How many seconds the others have to come; None: as long as ranks have at the start of a job.

    Raises:
      ConfigError: ``HOROVOD_GLOO_IFACE`` has no address.
      tf.errors.OpError: A rank can't be reached, for `name_failures`.
    """
    bound, told = choose_addresses(local)
    native = load_op_library("ops")
    with tf.device(DEVICES[place]):
        handle, port = native.gmeta_lane(host=bound)
    found = gather({"host": told, "port": int(port), "lane": secrets.token_hex(32)})
    with tf.device(DEVICES[place]):
        native.gmeta_lane_connect(
            lane=handle,
            rank=here.rank,
            hosts=[rank["host"] for rank in found],
            ports=[rank["port"] for rank in found],
            key=lane_key(found[0]["lane"]),
            start=start_seconds() if start is None else start,
            patience=patience_seconds(),
            id=b"" if first is None else first.id,
        )
    if first is None:
        return Lane(handle, place, "TCP, loopback" if local else f"TCP, {told}")
    major, minor = divmod(first.version // 100, 100)
    return Lane(handle, place, f"NCCL {major}.{minor}.{first.version % 100}")


def lane_key(lane: str) -> bytes:
    """Derive the key by which the ranks of a lane prove that they belong to the job (``ops/lane/mesh.h``).

    It is made of the job's secret, which a launcher gives its ranks and no lane sends, and of the lane's
    name. Plain ``horovodrun`` gives none: then the name is all, which Horovod carries between the ranks.
    """
    return sign(os.environ.get(SECRET, "").encode(), b"lane", lane.encode())


def start_seconds() -> int:
    """Return how many seconds a rank waits at the start of a job for the others."""
    return int(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "50"))


def patience_seconds() -> int:
    """Return how many seconds a rank waits in a collective for the others; 0: without a limit."""
    return int(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "60"))


def _sees_gpu() -> bool:
    return bool(tf.config.get_visible_devices("GPU"))


def _find_gpu(make_id: bool) -> Gpu:
    if not _sees_gpu():
        return Gpu(False)
    if build_info(library_path("ops"))["cuda"] != "1":
        return Gpu(True, why="gmeta was built without CUDA")
    with tf.device("GPU:0"):
        address, version, made, why = load_op_library("ops").gmeta_lane_find(
            files=_nccl_files(), make_id=make_id
        )
    return Gpu(True, address.numpy().decode(), int(version), made.numpy(), why.numpy().decode())


def _nccl_files() -> list[str]:
    """List where NCCL may be: where the linker looks, then in its Python package."""
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        package = None
    folders = [] if package is None else package.submodule_search_locations or []
    return ["libnccl.so.2", *(str(Path(folder) / "lib" / "libnccl.so.2") for folder in folders)]

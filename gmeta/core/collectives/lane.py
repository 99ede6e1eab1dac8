"""Lanes: gmeta's own ordered channels for the collectives of a step, with or without Horovod.

A lane sends tensors between ranks: from host memory over TCP, from GPUs by NCCL (``ops/lane``). Horovod's
ranks first agree on which tensors are ready, so a small exchange takes a millisecond. A lane needs no
agreement: all ranks run the same program, so they run the same collectives in the same order. The ops take
the lane as a resource, so TensorFlow runs them one after another, in the order of tracing, and neither merges
nor drops any. Each lane keeps its own order; ``ops/lane/nccl_lane.h`` explains why two can't wait for each
other.

Only the thread that called `gmeta.init` takes part in this order. Exchanges of other threads, such as of the
next batch or the outcome of a save, go through Horovod, which matches collectives by name. Without Horovod,
each name that such a thread uses is a separate lane, opened at its first use. The invariant: *collectives of
one lane run in the same order on all ranks*. It holds because collectives of the same name may not run at the
same time, and those of different names need no order. Threads may therefore run in any order, and a waiting
thread blocks only those that use the same name. The number of names is bounded (`MOST_NAMES`).

`open_lanes` opens the lanes of a job as the environment configures them. ``GMETA_LANE`` is one of

* ``auto``, the default: tensors in host memory go over TCP. Those on GPUs go by NCCL if each rank has its own
  GPU and finds NCCL, otherwise through Horovod.
* ``tcp``: like ``auto``, but all tensors on GPUs go through Horovod.
* ``horovod``: everything goes through Horovod.

If only some ranks see a GPU, tensors on GPUs go over TCP too: all ranks must use the same transport. Without
Horovod (`LanePeers`), TCP replaces it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf

from gmeta.core.collectives.monitoring import LaneCounts, add_counts, name_failures
from gmeta.core.collectives.objects import allgather_objects, check_agreement
from gmeta.core.collectives.place import World, node_name
from gmeta.core.collectives.rendezvous import SECRET
from gmeta.core.collectives.wire import choose_addresses, name_loopback, name_machine, sign
from gmeta.core.errors import CollectiveError, ConfigError
from gmeta.core.native import build_info, library_path, load_op_library

LaneDevice = Literal["cpu", "gpu"]
"""Where a collective's tensors are: in host memory or on this process's GPU."""

SUMMED = (tf.float32, tf.float64, tf.int32, tf.int64)
"""Types that a lane sums; others are summed as wider ones."""

DEVICES: dict[LaneDevice, str] = {"cpu": "CPU:0", "gpu": "GPU:0"}

MOST_NAMES = 64
"""The most names of collectives that other threads than the main one use without Horovod."""


@dataclass(frozen=True)
class Lane:
    """An open lane.

    Attributes:
      handle: The resource.
      place: Where its tensors are.
      way: A description of the transport for users.
    """

    handle: tf.Tensor
    place: LaneDevice
    way: str

    @property
    def kind(self) -> str:
        """``"tcp"`` or ``"nccl"``."""
        return "tcp" if self.place == "cpu" else "nccl"


_lanes: dict[LaneDevice, Lane] = {}
_thread = 0

_named: dict[str, Lane] = {}
_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
_open: Callable[[str], Lane] | None = None


def use_lanes(lanes: dict[LaneDevice, Lane], open_named: Callable[[str], Lane] | None = None) -> None:
    """Make the calling thread's collectives use these lanes, by the place of their tensors.

    Args:
      lanes: The lanes.
      open_named: Opens, with all ranks, a lane for exchanges of other threads under a name. None: these go
        through Horovod, or as set by an earlier call.
    """
    global _thread, _open
    _thread = threading.get_ident()
    _open = open_named or _open
    _lanes.update(lanes)
    if lanes:
        add_counts(_read_counts)


def lane_kind(place: LaneDevice = "cpu") -> str:
    """Return which lane collectives of steps use for tensors in a place: tcp, nccl or horovod."""
    return kind_of(_lanes.get(place))


def kind_of(lane: Lane | None) -> str:
    """Return the transport of a lane: tcp, nccl or, without a lane, horovod."""
    return "horovod" if lane is None else lane.kind


def describe_way(place: LaneDevice) -> str:
    """Describe how tensors in a place are sent between ranks."""
    return _lanes[place].way if place in _lanes else "Horovod"


def find_lane(place: LaneDevice, name: str) -> Lane | None:
    """Return the lane of a collective; None if it goes through Horovod.

    Args:
      place: Where its tensors are. Threads other than the main one exchange tensors in host memory.
      name: Its name.

    Raises:
      ConfigError: Other threads use too many names.
      CollectiveError: On another thread's first use of the name, a rank didn't join.
    """
    if _thread == threading.get_ident():
        return _lanes.get(place)
    if _open is None:
        return None
    with _locks[name]:
        if name not in _named:
            if len(_named) == MOST_NAMES:
                raise ConfigError(
                    f"{name!r} is the name of a collective outside of the main thread, and such have "
                    f"{MOST_NAMES} names already: use the same names again; each has its connections"
                )
            with tf.init_scope():  # it isn't part of the traced function
                _named[name] = _open(name)
        return _named[name]


def beside_lanes() -> Any:
    """Return the device scope for Horovod's collectives: host memory if a GPU lane is open.

    Two active NCCL communicators on one GPU may hang.
    """
    return tf.device("CPU:0") if lane_kind("gpu") == "nccl" else contextlib.nullcontext()


def exchange(
    lane: Lane,
    rows: tf.Tensor,
    splits: tf.Tensor,
    expected: tf.Tensor | None,
    name: str,
    ranks: Sequence[int] = (),
) -> tuple[Any, Any]:
    """Exchange rows through a lane; arguments and results are those of `tensors.alltoall`.

    Splits cover all ranks even if only some ``ranks`` take part.
    """
    expected = [] if expected is None else expected
    return _exchange(lane.handle, lane.place, rows, splits, expected, name, ranks)


def add_up(lane: Lane, terms: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Sum tensors of one of the types `SUMMED` over all ranks, through a lane."""
    return _add_up(lane.handle, lane.place, terms, name)


def _exchange(
    handle: tf.Tensor,
    place: LaneDevice,
    rows: tf.Tensor,
    splits: tf.Tensor,
    expected: Any,
    name: str,
    ranks: Sequence[int],
) -> tuple[Any, Any]:
    with tf.device("CPU:0"):  # sizes are in host memory
        expected = tf.convert_to_tensor(expected, tf.int32)
    with tf.device(DEVICES[place]):
        return load_op_library("ops").gmeta_lane_alltoall(
            lane=handle,
            rows=rows,
            splits=splits,
            expected=expected,
            label=name,
            place=place,
            ranks=list(ranks),
            name=node_name(name),
        )


def _add_up(handle: tf.Tensor, place: LaneDevice, terms: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    with tf.device(DEVICES[place]):
        return list(
            load_op_library("ops").gmeta_lane_allreduce(
                lane=handle, terms=terms, label=name, place=place, name=node_name(name)
            )
        )


def _read_counts() -> dict[str, LaneCounts]:
    found = {"alltoall": LaneCounts(), "allreduce": LaneCounts()}
    for lane in [*{lane.place: lane for lane in _lanes.values()}.values(), *list(_named.values())]:
        with tf.device(DEVICES[lane.place]):
            counts = load_op_library("ops").gmeta_lane_counts(lane=lane.handle).numpy().tolist()
        for kind, (begun, ended, calls, size) in zip(found, counts, strict=True):
            before = found[kind]
            found[kind] = LaneCounts(
                before.under_way + begun - ended, before.calls + calls, before.bytes + size
            )
    return found


@tf.RegisterGradient("GmetaLaneAlltoall")
def _exchange_back(op: tf.Operation, rows: tf.Tensor, _: Any) -> list[Any]:
    sent, place, name = _of(op)
    ranks = op.get_attr("ranks")
    back, _ = _exchange(op.inputs[0], place, rows, op.outputs[1], sent[1], f"{name}/back", ranks)
    return [None, back, None, None]


@tf.RegisterGradient("GmetaLaneAllreduce")
def _add_up_back(op: tf.Operation, *sums: tf.Tensor) -> list[Any]:
    _, place, name = _of(op)
    return [None, *_add_up(op.inputs[0], place, sums, f"{name}/back")]


def _of(op: tf.Operation) -> tuple[Any, LaneDevice, str]:
    """Return an op's inputs after the lane, its place and its label."""
    return op.inputs[1:], op.get_attr("place").decode(), op.get_attr("label").decode()


_LANE = "GMETA_LANE"
_WAYS = ("auto", "tcp", "horovod")


@dataclass(frozen=True)
class Gpu:
    """A rank's GPU, as the rank sees it.

    Attributes:
      seen: Whether TensorFlow sees one.
      address: Its address on the machine's bus.
      version: NCCL's version, as a number.
      id: The communicator's id, made by rank 0.
      why: Why this rank can't use NCCL; "" if it can.
    """

    seen: bool
    address: str = ""
    version: int = 0
    id: bytes = b""
    why: str = ""


def choose_lane() -> str:
    """Return the lane that this process's environment selects.

    Raises:
      ConfigError: It isn't a lane.
    """
    name = os.environ.get(_LANE, _WAYS[0])
    if name not in _WAYS:
        raise ConfigError(f"{_LANE}={name!r}: give one of {', '.join(_WAYS)}")
    return name


def open_lanes(here: World) -> None:
    """Connect this rank to the others as configured; all ranks call it, in `gmeta.init`.

    Raises:
      ConfigError: The ranks choose differently, or ``HOROVOD_GLOO_IFACE`` has no address.
      CollectiveError: A rank can't be reached.
    """
    name = choose_lane()
    check_agreement({_LANE: name}, advice="set it alike on every rank")
    if name == "horovod" or here.size == 1:
        return
    opened = find_lane("cpu", "gmeta.init")  # already open without Horovod
    gpu = _find_gpu(make_id=here.rank == 0) if name == "auto" else Gpu(_sees_gpu(), why=f"{_LANE}={name}")
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
        without = "" if opened else f"; {_LANE}=horovod does without these connections"
        raise CollectiveError(f"{error}{without}") from error
    use_lanes(lanes)


def can_use_nccl(machines: Sequence[tuple[str, str]], gpus: Sequence[Gpu]) -> bool:
    """Return whether every rank has its own GPU, and the same version of NCCL."""
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
    """Open a lane; all ranks call it.

    Args:
      place: Where its tensors are.
      here: This rank.
      local: Whether all ranks have the same loopback address.
      gather: Returns the objects of all ranks on every rank.
      first: The GPU of rank 0, for a GPU lane.
      start: How many seconds to wait for the others; None: as at the start of a job.

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
    """Derive the key with which the ranks of a lane prove that they belong to the job (``ops/lane/mesh.h``).

    It is derived from the job's secret, which the launcher passes to its ranks and no lane sends, and from
    the lane's name. Plain ``horovodrun`` passes no secret: the key then depends only on the name, which
    Horovod sends to the ranks.
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
    """List the possible locations of NCCL: where the linker looks, then its Python package."""
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        package = None
    folders = [] if package is None else package.submodule_search_locations or []
    return ["libnccl.so.2", *(str(Path(folder) / "lib" / "libnccl.so.2") for folder in folders)]

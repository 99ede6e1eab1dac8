"""The ranks of a job, connected by Horovod or by gmeta's own lanes, and the objects that they send.

Without Horovod, ranks find each other by the launcher's store, and send objects between steps by lanes. They
open the first lane by exchanging addresses in the store; from then on, they need the store only for the lanes
of other threads (`lane`). On a lane an object is an all-to-all: an allgather sends the same bytes to all
ranks, and in a broadcast, only one rank sends bytes.
"""

from __future__ import annotations

import functools
import itertools
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.collectives import elastic, rendezvous
from gmeta.core.collectives.lane import (
    Lane,
    choose_lane,
    exchange,
    find_lane,
    open_lane,
    patience_seconds,
    start_seconds,
    use_lanes,
)
from gmeta.core.collectives.monitoring import count, count_as, count_start, leave_out_alltoall, name_failures
from gmeta.core.collectives.place import (
    RankPlace,
    World,
    import_horovod,
    launched_rank,
    launched_size,
    told_place,
    world,
)
from gmeta.core.collectives.rendezvous import LOST_PEERS, Store, leave_note
from gmeta.core.collectives.wire import name_loopback
from gmeta.core.errors import CollectiveError, ConfigError

_PIECE = 64 << 20  # bytes that a rank sends to all others in a piece of a broadcast
_HEAD = 8  # bytes of a broadcast's size, before its first piece


class LanePeers:
    """The ranks of a job without Horovod; see `gmeta.core.collectives.objects.Peers`."""

    packages: tuple[str, ...] = ()

    def start(self) -> RankPlace:
        """Return the place that the launcher assigned to this rank.

        Raises:
          ConfigError: It assigned none, or ``GMETA_LANE`` selects Horovod.
        """
        place = told_place()
        if place is None:
            raise ConfigError("no launcher assigned this process its place: start it by `gmeta launch`")
        if choose_lane() == "horovod":
            raise ConfigError(
                "GMETA_LANE=horovod, but these ranks start without Horovod: unset it, or install Horovod and "
                "set GMETA_RANKS=horovod"
            )
        return place

    def connect(self, here: World) -> None:
        """Open the lane for tensors in host memory.

        Raises:
          ConfigError: ``HOROVOD_GLOO_IFACE`` has no address.
          CollectiveError: A rank can't be reached.
        """
        store, seconds = Store(), start_seconds()

        def gather_as(scope: str, wait: int) -> Callable[[Any], list[Any]]:
            return lambda value: store.gather(scope, here.rank, here.size, value, wait)

        own = name_loopback()
        local = all(other == own for other in gather_as("gmeta.init", seconds)(own))

        def open_named(name: str) -> Lane:
            wait = patience_seconds()
            with name_failures(f"the first collective {name!r} outside of the main thread"):
                return open_lane("cpu", here, local, gather_as(f"lane {name}", wait), start=wait or 1 << 30)

        with name_failures("gmeta.init()"):
            first = open_lane("cpu", here, local, gather_as("lanes", seconds))
        use_lanes({"cpu": first}, open_named)

    def come(self, name: str) -> None:
        """Do nothing: objects are sent by lanes, which compare what the ranks do."""

    def allgather(self, data: bytes) -> list[bytes]:
        """Give every rank the bytes of all."""
        return _send_to_all("allgather", data)

    def broadcast(self, data: bytes, root: int) -> bytes:
        """Give every rank the bytes of one."""
        here = world()
        piece = max(_HEAD + 1, _PIECE // here.size)
        whole = len(data).to_bytes(_HEAD, "little") + data
        received, total = bytearray(), _HEAD
        while len(received) < total:
            part = whole[len(received) : len(received) + piece] if here.rank == root else b""
            received += _send_to_all("broadcast", part)[root]
            total = _HEAD + int.from_bytes(received[:_HEAD], "little")
        return bytes(received[_HEAD:])

    def barrier(self) -> None:
        """Wait for all ranks."""
        _send_to_all("barrier", b"")


def _send_to_all(kind: str, data: bytes) -> list[bytes]:
    """Send bytes to all ranks; return those received from each. Messages show the kind as the name."""
    size = world().size
    lane = find_lane("cpu", kind)
    assert lane is not None  # `connect` opened it, or opens those of other threads
    with tf.device("CPU:0"):
        rows, splits = tf.io.decode_raw(data * size, tf.uint8), tf.fill([size], len(data))
        rows, came = exchange(lane, rows, splits, None, kind)
    count_as(kind, len(data), len(data) * (size - 1))
    received, ends = rows.numpy().tobytes(), list(itertools.accumulate(came.numpy().tolist()))
    return [received[begin:end] for begin, end in itertools.pairwise([0, *ends])]


class HorovodPeers:
    """The ranks of a Horovod job; see `gmeta.core.collectives.objects.Peers`."""

    packages: tuple[str, ...] = ("horovod",)

    def start(self) -> RankPlace:
        """Start Horovod, which connects the ranks.

        Raises:
          ConfigError: Horovod is missing or broken.
          CollectiveError: The other ranks can't be reached.
        """
        hvd = import_horovod()
        rendezvous.through_proxy()
        try:
            hvd.init()
        except Exception as error:  # any error of the network or the rendezvous
            leave_note(LOST_PEERS)
            elastic.start_again_at_exit()
            raise CollectiveError(
                f"rank {launched_rank()} of {launched_size()} on {platform.node()} can't reach the others: "
                f"{error}; see whether every rank has started, and whether the machines reach each other "
                "over HOROVOD_GLOO_IFACE"
            ) from error
        if elastic.is_driven():
            elastic.watch_hosts()
        return RankPlace(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())

    def connect(self, here: World) -> None:
        """Do nothing: Horovod already connected the ranks."""

    def come(self, name: str) -> None:
        """Wait for all ranks to reach this collective, in the lane's order if there is a lane."""
        lane = find_lane("cpu", name)
        if lane is None:
            return
        with tf.device("CPU:0"):
            nothing, splits = tf.zeros([0], tf.uint8), tf.zeros([world().size], tf.int32)
            exchange(lane, nothing, splits, None, name)
        leave_out_alltoall()

    def allgather(self, data: bytes) -> list[bytes]:
        """Give every rank the bytes of all."""
        sent = np.frombuffer(data, np.uint8)
        sizes = _allgather("sizes", tf.int64)(tf.constant([sent.size], tf.int64)).numpy()
        received = _allgather("objects", tf.uint8)(tf.constant(sent)).numpy()
        ends = np.cumsum(sizes)
        return [received[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)]

    def broadcast(self, data: bytes, root: int) -> bytes:
        """Give every rank the bytes of one."""
        sent = np.frombuffer(data, np.uint8)
        size = _broadcast("size", tf.int64, root)(tf.constant([sent.size], tf.int64)).numpy()[0]
        if sent.size != size:
            sent = np.zeros(size, np.uint8)
        return bytes(_broadcast("object", tf.uint8, root)(tf.constant(sent)).numpy().tobytes())

    def barrier(self) -> None:
        """Wait for all ranks."""
        _barrier()(tf.constant([1]))


# An eager collective has the name of its op. Inside a function, it has a separate name, which Horovod reports
# if a rank is missing. The input signatures leave the length unspecified, so no function is traced twice.


def _function(dtype: tf.DType, run: Callable[[tf.Tensor], tf.Tensor], kind: str) -> Any:
    def function(tensor: tf.Tensor) -> tf.Tensor:
        result = run(*count_start(kind, [tensor]))
        count(kind, tf.size(tensor) * dtype.size, after=result)
        return result

    return tf.function(function, input_signature=[tf.TensorSpec([None], dtype)], autograph=False)


@functools.cache
def _allgather(name: str, dtype: tf.DType) -> Any:
    hvd = import_horovod()
    return _function(
        dtype, lambda t: hvd.allgather(t, name=f"gmeta_{name}", ignore_name_scope=True), "allgather"
    )


@functools.cache
def _broadcast(name: str, dtype: tf.DType, root: int) -> Any:
    hvd = import_horovod()
    return _function(
        dtype, lambda t: hvd.broadcast(t, root, name=f"gmeta_{name}", ignore_name_scope=True), "broadcast"
    )


@functools.cache
def _barrier() -> Any:
    hvd = import_horovod()

    def run(tensor: tf.Tensor) -> tf.Tensor:
        return hvd.mpi_ops._allreduce(tensor, name="gmeta_barrier", op=hvd.Sum, ignore_name_scope=True)

    return _function(tf.int32, run, "barrier")

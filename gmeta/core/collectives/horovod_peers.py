"""Ranks with Horovod: it connects them, and carries objects between steps."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.collectives import horovod_elastic, rendezvous
from gmeta.core.collectives.backend import import_horovod
from gmeta.core.collectives.counting import count, count_start, leave_out_alltoall
from gmeta.core.collectives.lane import exchange, find_lane
from gmeta.core.collectives.notes import LOST_PEERS, leave_note
from gmeta.core.collectives.place import RankPlace, World, launched_rank, launched_size, world
from gmeta.core.errors import CollectiveError


class HorovodPeers:
    """The ranks of a job of Horovod's; see `gmeta.core.collectives.objects.Peers`."""

    packages: tuple[str, ...] = ("horovod",)

    def start(self) -> RankPlace:
        """Start Horovod, which introduces the ranks.

        Raises:
          ConfigError: Horovod is missing or broken.
          CollectiveError: The other ranks can't be reached.
        """
        hvd = import_horovod()
        rendezvous.through_proxy()
        try:
            hvd.init()
        except Exception as error:  # any error of the network and the rendezvous
            leave_note(LOST_PEERS)
            horovod_elastic.start_again_at_exit()
            raise CollectiveError(
                f"rank {launched_rank()} of {launched_size()} on {platform.node()} can't reach the others: "
                f"{error}; see whether every rank has started, and whether the machines reach each other "
                "over HOROVOD_GLOO_IFACE"
            ) from error
        if horovod_elastic.is_driven():
            horovod_elastic.watch_hosts()
        return RankPlace(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())

    def connect(self, here: World) -> None:
        """Do nothing: Horovod has connected the ranks."""

    def come(self, name: str) -> None:
        """Wait for all ranks to come to this collective, in the order of the lane's, if there is a lane."""
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


# An eager collective has the name of its op. Inside a function it has a name of its own, which Horovod
# reports when a rank is missing. The input signatures leave the length open, so no function is traced twice.


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

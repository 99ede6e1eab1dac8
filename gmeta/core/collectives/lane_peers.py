"""Ranks without Horovod: the launcher's store introduces them, and lanes carry objects between steps.

The ranks open the first lane by exchanging addresses in the store; from then on they need the store only for
the lanes of other threads (`lane`). On a lane an object is an all-to-all: an allgather sends the same bytes
to all ranks, and in a broadcast all but one rank send nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gmeta.core.collectives.counting import count_as
from gmeta.core.collectives.failures import name_failures
from gmeta.core.collectives.lane import Lane, exchange, find_lane, use_lanes
from gmeta.core.collectives.lane_start import choose_lane, open_lane, patience_seconds, start_seconds
from gmeta.core.collectives.place import RankPlace, World, told_place, world
from gmeta.core.collectives.store import Store
from gmeta.core.collectives.wire import name_loopback
from gmeta.core.errors import ConfigError

_PIECE = 64 << 20  # bytes that a rank sends to all others in a piece of a broadcast
_HEAD = 8  # bytes of a broadcast's size, before its first piece


class LanePeers:
    """The ranks of a job without Horovod; see `gmeta.core.collectives.objects.Peers`."""

    packages: tuple[str, ...] = ()

    def start(self) -> RankPlace:
        """Return the place that the launcher has assigned to this rank.

        Raises:
          ConfigError: It assigned none, or ``GMETA_LANE`` chooses Horovod.
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
        """Open the lane of tensors in host memory.

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
        """Do nothing: objects go by the lanes, which compare what the ranks do."""

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
    """Send bytes to all ranks; return what came from each. The kind is the name that messages show."""
    size = world().size
    lane = find_lane("cpu", kind)
    assert lane is not None  # `connect` has opened it, or opens those of other threads
    with tf.device("CPU:0"):
        rows, splits = tf.io.decode_raw(data * size, tf.uint8), tf.fill([size], len(data))
        rows, came = exchange(lane, rows, splits, None, kind)
    count_as(kind, len(data), len(data) * (size - 1))
    received, ends = rows.numpy().tobytes(), list(itertools.accumulate(came.numpy().tolist()))
    return [received[begin:end] for begin, end in itertools.pairwise([0, *ends])]

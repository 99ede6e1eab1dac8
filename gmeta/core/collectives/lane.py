"""The lane: an ordered channel of gmeta's own for the collectives of a step, beside Horovod.

Horovod starts the ranks, introduces them and restarts them; the lane carries tensors of the CPU between them,
over TCP (``ops/lane``). Horovod's ranks first agree which tensor each of them has ready, and a small exchange
takes it a millisecond. The lane agrees on nothing: all ranks run the same program, so they make the same
collectives in the same order. The ops take the lane as a resource, so TensorFlow runs them one after another,
in the order in which they were traced, and neither merges nor drops one.

Only the thread that called `gmeta.init` has a place in this order. What another thread exchanges, such as the
next batch, goes through Horovod, and so does everything in a process that sees a GPU.

``GMETA_LANE=tcp`` chooses the lane, ``GMETA_LANE=horovod`` leaves everything to Horovod.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from gmeta.core.collectives.agreement import check_agreement
from gmeta.core.collectives.counting import LaneCounts, add_counts
from gmeta.core.collectives.failures import name_failures
from gmeta.core.collectives.objects import allgather_objects
from gmeta.core.collectives.place import World
from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library

VARIABLE = "GMETA_LANE"
LANES = ("horovod", "tcp")
DEFAULT = "horovod"

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR
SUMMED = (tf.float32, tf.float64, tf.int32, tf.int64)
"""Types that the lane sums; others are summed as wider ones."""


@dataclass(frozen=True)
class _Lane:
    handle: tf.Tensor
    thread: int


_lane: _Lane | None = None


def choose_lane() -> str:
    """Return which lane this process's environment chooses.

    Raises:
      ConfigError: It names none.
    """
    name = os.environ.get(VARIABLE, DEFAULT)
    if name not in LANES:
        raise ConfigError(f"{VARIABLE}={name!r}: give one of {', '.join(LANES)}")
    return name


def lane_kind() -> str:
    """Return which lane the collectives of this process's steps use."""
    return "horovod" if _lane is None else "tcp"


def find_handle() -> tf.Tensor | None:
    """Return the lane's handle; None if the calling thread's collectives go through Horovod."""
    return _lane.handle if _lane is not None and _lane.thread == threading.get_ident() else None


def open_lane(here: World) -> None:
    """Connect this rank with the others, if the lane is chosen; all ranks call it, in `gmeta.init`.

    Raises:
      ConfigError: The ranks choose different lanes, or ``HOROVOD_GLOO_IFACE`` has no address.
      CollectiveError: A rank can't be reached.
    """
    global _lane
    name = choose_lane()
    check_agreement({VARIABLE: name}, advice="set it alike on every rank")
    machine = _machine()
    gpus = bool(tf.config.get_visible_devices("GPU"))
    ranks = allgather_objects({"machine": machine, "gpus": gpus})
    if name == "horovod" or here.size == 1 or any(rank["gpus"] for rank in ranks):
        return
    bound, told = _place(all(rank["machine"] == machine for rank in ranks))
    native = load_op_library("ops")
    with name_failures("gmeta.init()"), tf.device("CPU:0"):
        handle, port = native.gmeta_lane(host=bound)
        found = allgather_objects({"host": told, "port": int(port), "token": secrets.token_hex(32)})
        native.gmeta_lane_connect(
            lane=handle,
            rank=here.rank,
            hosts=[rank["host"] for rank in found],
            ports=[rank["port"] for rank in found],
            token=found[0]["token"],
            start=int(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "50")),
            patience=int(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "60")),
        )
    _lane = _Lane(handle, threading.get_ident())
    add_counts(_read_counts)


def exchange(handle: tf.Tensor, rows: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[Any, Any]:
    """Exchange rows through the lane; arguments and results are those of `tensors.alltoall`."""
    with tf.device("CPU:0"):
        return load_op_library("ops").gmeta_lane_alltoall(
            lane=handle, rows=rows, splits=splits, label=name, name=_node(name)
        )


def add_up(handle: tf.Tensor, terms: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Sum tensors of one of the types `SUMMED` over all ranks, through the lane."""
    with tf.device("CPU:0"):
        return list(
            load_op_library("ops").gmeta_lane_allreduce(
                lane=handle, terms=terms, label=name, name=_node(name)
            )
        )


def _read_counts() -> dict[str, LaneCounts]:
    assert _lane is not None
    with tf.device("CPU:0"):
        counts = load_op_library("ops").gmeta_lane_counts(lane=_lane.handle).numpy().tolist()
    return {
        kind: LaneCounts(begun - ended, calls, size)
        for kind, (begun, ended, calls, size) in zip(("alltoall", "allreduce"), counts, strict=True)
    }


@tf.RegisterGradient("GmetaLaneAlltoall")
def _exchange_back(op: tf.Operation, rows: tf.Tensor, _: Any) -> list[Any]:
    name = f"{op.get_attr('label').decode()}/back"
    return [None, exchange(op.inputs[0], rows, op.outputs[1], name)[0], None]


@tf.RegisterGradient("GmetaLaneAllreduce")
def _add_up_back(op: tf.Operation, *sums: tf.Tensor) -> list[Any]:
    return [None, *add_up(op.inputs[0], sums, f"{op.get_attr('label').decode()}/back")]


def _node(name: str) -> str:
    """Make the name of an op, as Horovod does: errors show it."""
    return re.sub(r"[^A-Za-z0-9_]", "_", f"gmeta_{name}")


def _machine() -> tuple[str, ...]:
    """Tell apart what has a loopback address of its own: machines, and containers of one machine."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return platform.node(), boot, str(_NETWORK.readlink()) if _NETWORK.exists() else ""


def _place(local: bool) -> tuple[str, str]:
    """Choose the address at which this rank listens, and that at which the others reach it."""
    if local:
        return "127.0.0.1", "127.0.0.1"
    interface = os.environ.get("HOROVOD_GLOO_IFACE")
    if not interface:
        return "0.0.0.0", platform.node()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF_INTERFACE, request)
    except OSError as error:
        raise ConfigError(
            f"HOROVOD_GLOO_IFACE={interface!r} on {platform.node()} has no IPv4 address: {error}; name an "
            f"interface that has one, or set {VARIABLE}=horovod"
        ) from error
    address = socket.inet_ntoa(answer[20:24])
    return address, address

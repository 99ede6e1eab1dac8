"""The lanes: ordered channels of gmeta's own for the collectives of a step, beside Horovod or without it.

A lane carries tensors between ranks: those in host memory over TCP, those on GPUs by NCCL (``ops/lane``).
Horovod's ranks first agree which tensor each of them has ready, and a small exchange takes it a millisecond.
A lane agrees on nothing: all ranks run the same program, so they make the same collectives in the same order.
The ops take the lane as a resource, so TensorFlow runs them one after another, in the order in which they
were traced, and neither merges nor drops one. Each lane keeps its own order; ``ops/lane/nccl_lane.h`` says
why two can't wait for each other.

Only the thread that called `gmeta.init` has a place in this order. What another thread exchanges, such as the
next batch or the outcome of a save, goes through Horovod, which matches collectives by name. Without Horovod
each name that such a thread uses is a lane of its own, opened at its first use. The invariant: *collectives
of one lane come in the same order on all ranks*. It holds because collectives of one name may not run at the
same time, and those of different names need no order between them. So threads may come in any order, and one
that waits keeps none but those of its own name waiting. The number of names is bounded (`MOST_NAMES`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

from gmeta.core.collectives.backend import node_name
from gmeta.core.collectives.counting import LaneCounts, add_counts
from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library

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
      way: How they travel, for people.
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
    """Let the calling thread's collectives use these lanes, by the place of their tensors.

    Args:
      lanes: The lanes.
      open_named: Opens, with all ranks, a lane for what other threads exchange under a name. None: that goes
        through Horovod, or is what an earlier call says.
    """
    global _thread, _open
    _thread = threading.get_ident()
    _open = open_named or _open
    _lanes.update(lanes)
    if lanes:
        add_counts(_read_counts)


def lane_kind(place: LaneDevice = "cpu") -> str:
    """Return which lane the steps' collectives of tensors in a place use: tcp, nccl or horovod."""
    return kind_of(_lanes.get(place))


def kind_of(lane: Lane | None) -> str:
    """Return the transport of a lane: tcp, nccl or, without a lane, horovod."""
    return "horovod" if lane is None else lane.kind


def describe_way(place: LaneDevice) -> str:
    """Describe how tensors in a place travel between ranks."""
    return _lanes[place].way if place in _lanes else "Horovod"


def find_lane(place: LaneDevice, name: str) -> Lane | None:
    """Return the lane of a collective; None if it goes through Horovod.

    Args:
      place: Where its tensors are. What other threads than the main one exchange travels in host memory.
      name: Its name.

    Raises:
      ConfigError: Other threads use too many names.
      CollectiveError: It is the first use of the name by another thread, and a rank doesn't come to it.
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
            with tf.init_scope():  # it isn't a part of the function that is traced
                _named[name] = _open(name)
        return _named[name]


def beside_lanes() -> Any:
    """Return the device scope for Horovod's collectives: host memory, if a lane of GPUs is open.

    Two communicators of NCCL at work on one GPU may hang.
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

    Splits are for all ranks even if only some ``ranks`` take part.
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

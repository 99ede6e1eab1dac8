"""A rank's view of its collectives: how many it ran, whether it waits in one, and why one failed.

A collective takes about a millisecond before it sends a byte, so their number determines a step's speed.
They are counted when they run in the graph, not when they are traced. A counter is a variable on the CPU, to
which each executed collective adds; nothing waits for it. A second variable counts the collectives that have
started: if the two differ, this rank is in a collective (`watch_for_stalls`). The lane counts its collectives
natively (`add_counts`), because ten counting ops would take longer than a small exchange. It counts objects
as all-to-alls; `count_as` corrects their kind.

For an error from a collective, `name_failures` and `explain` state which rank reports it, and what to do.
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.collectives.elastic import start_again, start_again_at_exit
from gmeta.core.collectives.place import World, world
from gmeta.core.collectives.rendezvous import LOST_PEERS, leave_note
from gmeta.core.errors import CollectiveError, ConfigError, GmetaError, without_ops
from gmeta.core.graph import lift_variables

KINDS = ("alltoall", "allreduce", "allgather", "broadcast", "barrier")


@dataclass
class CollectiveCounts:
    """The counts of `count_collectives`, which fills them when the ``with`` block ends.

    Attributes:
      calls: Executed collectives by kind: ``alltoall``, ``allreduce`` (a group is one), ``allgather``,
        ``broadcast``, ``barrier``. Kinds that didn't run are omitted.
      bytes: By kind, the bytes of this rank's input; for an alltoall, only the bytes for other ranks.
    """

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Total number of executed collectives."""
        return sum(self.calls.values())


@contextmanager
def count_collectives() -> Iterator[CollectiveCounts]:
    """Count the collectives that are executed on this rank inside a ``with`` block.

    A job of one rank executes no collectives.

    Yields:
      The counts, which are zero until the block ends.

    Example:
      >>> with count_collectives() as counts:
      ...     exchanged, _ = alltoall(tf.constant([1, 2]), tf.constant([2]), name="keys")
      >>> counts.total
      0
    """
    counts = CollectiveCounts()
    before = {kind: _ended_well(kind) for kind in KINDS}
    yield counts
    for kind in KINDS:
        calls, size = (_ended_well(kind) - before[kind]).tolist()
        if calls:
            counts.calls[kind], counts.bytes[kind] = calls, size


def counter(kind: str) -> tf.Variable:
    """Return the variable that counts executed collectives and their bytes, int64 (2,)."""
    return _variable(f"gmeta/{kind}_count", [0, 0])


def starts(kind: str) -> tf.Variable:
    """Return the variable that counts started collectives, int64.

    It isn't part of `counter`, because then one collective would wait for the end of another.
    """
    return _variable(f"gmeta/{kind}_starts", 0)


def _variable(name: str, first: int | list[int]) -> tf.Variable:
    with _making:  # shared by all threads: some of them count, and another compares the counts
        if name not in _variables:
            with lift_variables(), tf.device("CPU:0"):
                _variables[name] = tf.Variable(first, dtype=tf.int64, trainable=False, name=name)
        return _variables[name]


_variables: dict[str, tf.Variable] = {}
_making = threading.Lock()


def count_start(kind: str, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Count the start of a collective, then return its inputs.

    In a graph, the inputs pass through placeholders with a default, whose value the graph optimizer can't
    know.
    """
    with tf.device("CPU:0"), tf.control_dependencies(inputs):
        start = starts(kind).assign_add(1, read_value=False)
    if tf.executing_eagerly():
        return list(inputs)
    with tf.control_dependencies([start]):
        return [tf.raw_ops.PlaceholderWithDefault(input=t, shape=t.shape) for t in inputs]


def waiting() -> dict[str, int]:
    """Count, by kind, the collectives that this rank has started but not ended; omit zero counts."""
    lane = _more_counts()
    open_ = {
        kind: int(starts(kind).numpy()) - int(counter(kind).numpy()[0]) + lane[kind].under_way
        for kind in KINDS
    }
    return {kind: number for kind, number in open_.items() if number > 0}


def forget_starts() -> None:
    """Reset the unfinished collectives: after a failure, none is running."""
    for kind in KINDS:
        starts(kind).assign(counter(kind)[0])


def count_finished() -> int:
    """Count all collectives that this rank has completed since the start."""
    return sum(int(_ended_well(kind)[0]) for kind in KINDS)


@dataclass(frozen=True)
class LaneCounts:
    """Collectives of one kind that the lane counted.

    Attributes:
      under_way: Number of started but unfinished ones.
      calls: Number of successful ones.
      bytes: Bytes of this rank's input to these.
    """

    under_way: int = 0
    calls: int = 0
    bytes: int = 0


def add_counts(read: Callable[[], Mapping[str, LaneCounts]]) -> None:
    """Include the counts that ``read`` returns, by kind, from now on."""
    global _read
    _read = read


_read: Callable[[], Mapping[str, LaneCounts]] | None = None


def _more_counts() -> dict[str, LaneCounts]:
    found = {} if _read is None else _read()
    return {kind: found.get(kind, LaneCounts()) for kind in KINDS}


_renamed: dict[str, npt.NDArray[np.int64]] = {}
_renaming = threading.Lock()


def count_as(kind: str, size: int, away: int) -> None:
    """Count a finished all-to-all of a lane, which sent ``away`` bytes to others, as another kind.

    Args:
      kind: Its purpose: ``allgather``, ``broadcast`` or ``barrier``.
      size: The bytes of this rank's input to it.
      away: The bytes that the lane counted.
    """
    with _renaming:
        for name, change in ((kind, [1, size]), ("alltoall", [-1, -away])):
            _renamed[name] = _renamed.get(name, np.zeros(2, np.int64)) + change


def _ended_well(kind: str) -> npt.NDArray[np.int64]:
    """Collectives of a kind and their bytes."""
    with _renaming:
        lane, renamed = _more_counts()[kind], _renamed.get(kind, np.zeros(2, np.int64))
    return np.asarray(np.add(counter(kind).numpy(), [lane.calls, lane.bytes]) + renamed)


def leave_out_alltoall() -> None:
    """Remove from the counts a finished all-to-all of a lane that sent nothing."""
    with _renaming:
        _renamed["alltoall"] = _renamed.get("alltoall", np.zeros(2, np.int64)) - [1, 0]


def count(kind: str, size: tf.Tensor | int, after: tf.Tensor) -> None:
    """Count one collective of `size` bytes once its result, `after`, is computed.

    The dependence also keeps a collective whose result isn't used from being pruned on this rank alone.
    """
    with tf.device("CPU:0"), tf.control_dependencies([after]):
        counter(kind).assign_add(tf.stack([tf.constant(1, tf.int64), tf.cast(size, tf.int64)]))


_NODE = re.compile(r"\{\{node (?:[^}]*/)?(Horovod[^}]*|gmeta_[^}]*)\}\}")
_COLLECTIVE = re.compile(r"horovod|gloo|nccl|gmeta lane", re.IGNORECASE)
# Messages of Horovod, Gloo and the lane for a lost peer, as opposed to a peer that ran another collective.
_PEER_IS_GONE = re.compile(
    r"has been shut ?down|connection (closed|reset)|timed out|broken pipe|stalled", re.IGNORECASE
)
_UNLIKE = re.compile(r"rank \d+ is in all\w+ '.*, while rank \d+ is in all\w+ '")
_NOT_THE_USERS = tuple(
    f"{Path(folder).resolve()}/"
    for folder in (
        str(Path(__file__).parents[2]),
        str(Path(sys.executable).parent),
        sysconfig.get_paths()["stdlib"],
        *site.getsitepackages(),
        site.getusersitepackages(),
    )
)
"""Folders of code that a user hasn't written."""


@contextmanager
def name_failures(doing: str = "a collective") -> Iterator[None]:
    """Turn Horovod's and the lane's errors inside a ``with`` block into `CollectiveError`.

    A collective in a ``tf.function`` fails when the function is called, with TensorFlow's error for one of
    its nodes. Therefore wrap the calls of steps, not their definitions. Other errors pass through.

    Args:
      doing: What the block does, for the message.

    Raises:
      CollectiveError: A collective failed; the message names this rank and what to check.
    """
    try:
        yield
    except tf.errors.OpError as error:
        explained = explain(error, doing)
        if explained is None:
            raise
        _note(error)
        raise explained from error


def explain(error: tf.errors.OpError, doing: str = "a collective") -> CollectiveError | None:
    """Return a `CollectiveError` that explains `error`, or None if no collective raised it."""
    message = str(error.message)
    if not _COLLECTIVE.search(message):
        return None
    node = _NODE.search(message)
    what = f"{doing}, in {node[1]}" if node else doing
    here = world()
    # A function's error starts with the places that define its nodes and ends with the reason.
    last = message.split("[[", 1)[0].strip().splitlines()[-1]
    reason = without_ops(last).split(". ", 1)[0]
    rank = f"rank {here.rank} of {here.size}"
    if _UNLIKE.search(reason):
        both = reason.removeprefix("gmeta lane: ")
        return CollectiveError(
            f"{rank} during {what}: the ranks make different collectives: {both}; lookups in an "
            "EmbeddingCollection, steps, predict and saves are collectives: all ranks must make them equally "
            "often and in the same order, also a rank without samples; look for `if rank == 0`"
        )
    if _PEER_IS_GONE.search(message):
        remedy = (
            "another rank has ended or hangs: the cause is in its output, not here; "
            "start the job again and it resumes from its last checkpoint"
        )
    else:
        remedy = "see that all ranks run the same program with the same settings, and take the same steps"
    return CollectiveError(f"{rank} lost its peers during {what}: {reason}; {remedy}")


def _note(error: tf.errors.OpError) -> None:
    """Record that a collective has failed, and notify the launcher if other ranks are gone."""
    forget_starts()
    if _PEER_IS_GONE.search(str(error.message)):
        leave_note(LOST_PEERS)
        start_again_at_exit()


def print_errors_first(rank: int, size: int) -> None:
    """Print an error of gmeta or of a collective that ends this process in one line, before other output.

    A traceback of several chained errors, of which the last one matters, is hard to read in the output of
    several ranks. An error of a collective is printed without a traceback, unless the program sets its own
    ``sys.excepthook``: the line names the place in the program, and the cause is often another rank.

    Args:
      rank: This rank.
      size: How many ranks there are.
    """
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        said: BaseException | None = error
        if isinstance(error, tf.errors.OpError):  # in the user's own loop, without `name_failures`
            said = explain(error, "a step")
            if said is not None:
                _note(error)
        if isinstance(said, GmetaError):
            where = user_place(traceback) if isinstance(said, CollectiveError) else ""
            here = f"rank {rank} of {size}"
            on = "" if str(said).startswith(here) else f" on {here}"
            sys.stderr.write(f"gmeta: error{on}: {said}{where}\n")
            sys.stderr.flush()
        if not isinstance(said, CollectiveError) or usual is not sys.__excepthook__:
            usual(kind, error, traceback)

    sys.excepthook = hook


def user_place(at: TracebackType | FrameType | None) -> str:
    """Return the innermost line of the user's program, such as ``"; at train.py:41"``; "" if there is none.

    Args:
      at: The traceback of an error, or a thread's current frame.
    """
    places: list[tuple[str, int]] = []
    while isinstance(at, TracebackType):
        places.append((at.tb_frame.f_code.co_filename, at.tb_lineno))
        at = at.tb_next
    while at is not None:
        places.insert(0, (at.f_code.co_filename, at.f_lineno))
        at = at.f_back
    for file, line in reversed(places):
        path = Path(file)
        written = path.is_file() and not path.name.startswith("__autograph_generated")
        if written and not str(path.resolve()).startswith(_NOT_THE_USERS):
            return f"; at {file}:{line}"
    return ""


# Ends a rank that waits too long in a collective for another rank.
#
# A rank that loops, sleeps or does something else keeps its connection alive, so the network never fails and
# the others would wait forever. Horovod has a check for this, but version 0.28.1 on Gloo never acted, with
# any setting. Each rank therefore watches itself. A rank is in a collective if it has started more
# collectives than it has completed, and it stalls if none completes within the time limit. A rank that hangs
# outside collectives doesn't end itself, so the launcher can identify it.

STALLED_EXIT = 75  # the shell's EX_TEMPFAIL: nothing is wrong with this rank, try again

_EVERY = 1.0  # seconds between two checks


def watch_for_stalls(world: World, limit: str) -> None:
    """Start the watch, a daemon thread.

    Args:
      world: This rank.
      limit: How many seconds the rank may wait in a collective, the text of
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS; "0" means no limit.

    Raises:
      ConfigError: `limit` isn't a whole number of seconds.
    """
    if not limit.isdecimal():
        raise ConfigError(
            f"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={limit!r}: give whole seconds, or 0 for no limit"
        )
    if int(limit) > 0:
        threading.Thread(target=_watch, args=(world, int(limit)), name="gmeta-stalls", daemon=True).start()


def _watch(world: World, limit: int) -> None:
    seen, since = count_finished(), time.monotonic()
    while True:
        time.sleep(_EVERY)
        ended, kinds = count_finished(), waiting()
        now = time.monotonic()
        if ended != seen or not kinds:
            seen, since = ended, now
        elif now - since > limit:
            print(  # noqa: T201
                f"gmeta: error: rank {world.rank} of {world.size} has waited {now - since:.0f} s in "
                f"{', '.join(kinds)} for ranks that did not come; look at what they do (a long save or "
                "evaluation of one rank alone?), or allow more with HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
                f"{user_place(sys._current_frames().get(threading.main_thread().ident or 0))}",
                file=sys.stderr,
                flush=True,
            )
            leave_note(LOST_PEERS)
            start_again_at_exit()
            start_again()  # only under Horovod's driver, which would otherwise abandon the waiting ranks
            os._exit(STALLED_EXIT)  # the main thread is inside TensorFlow and can't be interrupted

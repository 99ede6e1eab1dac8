"""Explains an error from a collective: which rank reports it, and what to do."""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

import tensorflow as tf

from gmeta.core.collectives.counting import count_finished, forget_starts, waiting
from gmeta.core.collectives.elastic import start_again, start_again_at_exit
from gmeta.core.collectives.place import World, world
from gmeta.core.collectives.rendezvous import LOST_PEERS, leave_note
from gmeta.core.errors import CollectiveError, ConfigError, GmetaError

_NODE = re.compile(r"\{\{node (?:[^}]*/)?(Horovod[^}]*|gmeta_[^}]*)\}\}")
# "(0) INTERNAL: " stands before each error where several nodes failed, and the names of ops around that of an
# op which runs by itself.
_AROUND = re.compile(r"^\s*\(\d+\) [A-Z_]+:\s*|^\{\{function_node [^}]*\}\}\s*|\s*\[Op:\w+\].*$")
_COLLECTIVE = re.compile(r"horovod|gloo|nccl|gmeta lane", re.IGNORECASE)
# Horovod's, Gloo's and the lane's words for a lost peer, as opposed to a peer that called another collective.
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
    its nodes. So put this around the calls of steps, not around their definitions. Other errors pass through.

    Args:
      doing: What the block does, for the message.

    Raises:
      CollectiveError: A collective failed; the message names this rank and what to look at.
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
    """Make a `CollectiveError` that explains `error`; return None if it came from no collective."""
    message = str(error.message)
    if not _COLLECTIVE.search(message):
        return None
    node = _NODE.search(message)
    what = f"{doing}, in {node[1]}" if node else doing
    here = world()
    # A function's error starts with the places that define its nodes, and ends with the reason.
    last = message.split("[[", 1)[0].strip().splitlines()[-1]
    reason = _AROUND.sub("", last).split(". ", 1)[0]
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
    """Print an error of gmeta or of a collective that ends this process in one line, before all else.

    A traceback of several errors, of which the last one counts, is hard to read among the output of several
    ranks. An error of a collective is printed without one, unless the program has a ``sys.excepthook`` of its
    own: the line has the place in the program, and the cause is often another rank.

    Args:
      rank: This rank.
      size: How many ranks there are.
    """
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        said: BaseException | None = error
        if isinstance(error, tf.errors.OpError):  # in a loop of the user's own, without `name_failures`
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
      at: The traceback of an error, or the frame that a thread is in.
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
# the others would wait forever. Horovod has a check for this, but with 0.28.1 on Gloo it did not act,
# with any of its settings. So each rank watches itself. A rank is in a collective when it has started more
# collectives than it has ended, and it stalls when none has ended for the time allowed. A rank that hangs
# outside of collectives doesn't end itself, so the launcher knows which rank it was.

STALLED_EXIT = 75  # the shell's EX_TEMPFAIL: nothing is wrong with this rank, try again

_EVERY = 1.0  # seconds between two checks


def watch_for_stalls(world: World, limit: str) -> None:
    """Start the watch, a daemon thread.

    Args:
      world: This rank.
      limit: How many seconds the rank may wait in a collective, the text of
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS; "0" means no limit.

    Raises:
      ConfigError: `limit` is no whole number of seconds.
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
            start_again()  # only under Horovod's driver, which would otherwise give up the waiting ranks
            os._exit(STALLED_EXIT)  # the main thread is inside TensorFlow and can't be interrupted

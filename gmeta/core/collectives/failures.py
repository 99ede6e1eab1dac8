"""Explains an error from a collective: which rank reports it, and what to do."""

from __future__ import annotations

import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

import tensorflow as tf

from gmeta.core.collectives.counting import forget_starts
from gmeta.core.collectives.driver.horovod_elastic import start_again_at_exit
from gmeta.core.collectives.driver.notes import LOST_PEERS, tell
from gmeta.core.collectives.place import world
from gmeta.core.errors import CollectiveError, GmetaError

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
      CollectiveError: A collective failed; the message names this rank and says what to look at.
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
    """Make a `CollectiveError` that says what `error` means; return None if it came from no collective."""
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
    """Note that a collective has failed, and for the launcher if other ranks are gone."""
    forget_starts()
    if _PEER_IS_GONE.search(str(error.message)):
        tell(LOST_PEERS)
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
    """Return the innermost line of a user's own program, such as ``"; at train.py:41"``; "" if there is none.

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

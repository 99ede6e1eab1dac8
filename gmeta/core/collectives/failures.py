"""Explains an error from a collective: which rank reports it, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from gmeta.core.collectives.counting import forget_starts
from gmeta.core.collectives.driver.horovod_elastic import start_again_at_exit
from gmeta.core.collectives.driver.notes import LOST_PEERS, tell
from gmeta.core.collectives.place import world
from gmeta.core.errors import CollectiveError

_NODE = re.compile(r"\{\{node (?:[^}]*/)?(Horovod[^}]*|gmeta_[^}]*)\}\}")
# "(0) INTERNAL: " stands before each error where several nodes failed.
_NUMBER = re.compile(r"^\s*\(\d+\) [A-Z_]+:\s*")
_COLLECTIVE = re.compile(r"horovod|gloo|nccl|gmeta lane", re.IGNORECASE)
# Horovod's, Gloo's and the lane's words for a lost peer, as opposed to a peer that called another collective.
_PEER_IS_GONE = re.compile(
    r"has been shut ?down|connection (closed|reset)|timed out|broken pipe|stalled", re.IGNORECASE
)


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
        forget_starts()
        if _PEER_IS_GONE.search(str(error.message)):
            tell(LOST_PEERS)
            start_again_at_exit()
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
    reason = _NUMBER.sub("", last).split(". ", 1)[0]
    if _PEER_IS_GONE.search(message):
        remedy = (
            "another rank has ended or hangs: the cause is in its output, not here; "
            "start the job again and it resumes from its last checkpoint"
        )
    else:
        remedy = "see that all ranks run the same program with the same settings, and take the same steps"
    return CollectiveError(
        f"rank {here.rank} of {here.size} lost its peers during {what}: {reason}; {remedy}"
    )

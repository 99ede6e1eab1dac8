"""Ends a rank that waits too long in a collective for another rank.

A rank that loops, sleeps or does something else keeps its connection alive, so the network never fails and
the others would wait for ever. Horovod has a check for this, but with 0.28.1 on Gloo it did not act, whatever
its settings. So each rank watches itself. A rank is in a collective when it has started more collectives than
it has ended, and it stalls when none has ended for the time allowed. A rank that hangs outside of collectives
doesn't end itself, so the launcher knows which rank it was.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from gmeta.core.collectives.counting import count_finished, waiting
from gmeta.core.collectives.driver.horovod_elastic import start_again, start_again_at_exit
from gmeta.core.collectives.driver.notes import LOST_PEERS, tell
from gmeta.core.collectives.failures import user_place
from gmeta.core.collectives.place import World
from gmeta.core.errors import ConfigError

STALLED_EXIT = 75  # the shell's EX_TEMPFAIL: nothing is wrong with this rank, try again

_EVERY = 1.0  # seconds between two checks


def watch_for_stalls(world: World, limit: str) -> None:
    """Start the watch, a daemon thread.

    Args:
      world: This rank.
      limit: How many seconds the rank may wait in a collective, the text of
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS; "0" means for ever.

    Raises:
      ConfigError: `limit` is no whole number of seconds.
    """
    if not limit.isdecimal():
        raise ConfigError(f"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={limit!r}: give whole seconds, or 0 for ever")
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
            tell(LOST_PEERS)
            start_again_at_exit()
            start_again()  # only under Horovod's driver, which would otherwise give up the waiting ranks
            os._exit(STALLED_EXIT)  # the main thread is inside TensorFlow and can't be interrupted

"""Runs one rank for a launcher on another machine: ``python -m gmeta.core.launcher.host_rank``.

The first line of stdin is the command to run; each other line is a signal for it. When stdin ends, the
launcher or the connection is gone, and the rank is ended. See `rank_processes`.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress

from gmeta.core.collectives.notes import NOTES, notes_at
from gmeta.core.collectives.place import LAUNCHER, OWN
from gmeta.core.collectives.store import Store
from gmeta.core.errors import CollectiveError
from gmeta.core.launcher.rank_processes import ENDED

_GRACE = 5.0  # seconds between SIGTERM and SIGKILL


def main() -> int:
    """Run the rank and report its end; return the exit code for ssh."""
    # Unbuffered: a buffer's lock would be held by the thread that reads while this process ends.
    orders = io.FileIO(sys.stdin.fileno(), closefd=False)
    order = json.loads(orders.readline())
    os.environ.update(order["environment"])
    os.environ[LAUNCHER] = str(os.getpid())  # the rank ends with this process
    with tempfile.TemporaryDirectory(prefix="gmeta-notes-") as folder:
        os.environ[NOTES] = f"{folder}/rank"
        rank = subprocess.Popen(order["command"], stdin=subprocess.DEVNULL, start_new_session=True)
        cut = threading.Event()
        threading.Thread(target=_pass_signals, args=[orders, rank, cut], daemon=True).start()
        code = rank.wait()
        _signal(rank, signal.SIGKILL)  # processes that it has left behind
        told = sorted(notes_at(os.environ[NOTES]))
    del os.environ[NOTES]
    if not cut.is_set():  # else the launcher has lost this machine, and reports that
        with suppress(CollectiveError):  # the launcher is gone
            Store().put(ENDED, os.environ[f"{OWN}RANK"], {"code": code, "told": told})
    return code if code >= 0 else 128 - code


def _pass_signals(orders: io.FileIO, rank: subprocess.Popen[bytes], cut: threading.Event) -> None:
    for line in orders:
        _signal(rank, signal.Signals(int(line)))
    cut.set()
    _signal(rank, signal.SIGTERM)
    time.sleep(_GRACE)
    _signal(rank, signal.SIGKILL)


def _signal(rank: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, number)


if __name__ == "__main__":
    sys.exit(main())

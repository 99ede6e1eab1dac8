"""What a rank tells its launcher besides its output: a file in a folder that the launcher has made.

A rank that has lost its peers says so at once, however long it needs to leave then; its traceback comes last.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

TOLD = "GMETA_TOLD"
"""Environment variable: the folder."""

LOST_PEERS, LEAVES = "lost-peers", "leaves"
"""Other ranks are gone or didn't come; this rank leaves to start again with another number of ranks."""


def tell(what: str) -> None:
    """Tell the launcher, if there is one that listens."""
    if TOLD in os.environ:
        with suppress(OSError):  # the folder goes with the launcher
            (Path(os.environ[TOLD]) / f"{os.environ.get('HOROVOD_RANK')}.{what}").touch()


def things_told(folder: Path, rank: int) -> frozenset[str]:
    """What a rank has told."""
    return frozenset(what for what in (LOST_PEERS, LEAVES) if (folder / f"{rank}.{what}").exists())

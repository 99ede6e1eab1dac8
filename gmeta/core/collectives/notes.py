"""Notes from a rank to its launcher besides its output: files in a folder that the launcher has made.

A rank that has lost its peers leaves a note at once, however long it then needs to exit; its traceback comes
last.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

NOTES = "GMETA_NOTES"
"""Environment variable: the path that this rank's notes begin with, its number in the launcher's folder."""

LOST_PEERS, LEAVES = "lost-peers", "leaves"
"""Notes: other ranks are gone or didn't come; this rank leaves and restarts with another number of ranks."""


def leave_note(what: str) -> None:
    """Leave a note for the launcher, if one listens."""
    if NOTES in os.environ:
        with suppress(OSError):  # the folder disappears with the launcher
            Path(f"{os.environ[NOTES]}.{what}").touch()


def notes_at(path: str) -> frozenset[str]:
    """Return the notes that a rank has left, whose `NOTES` was ``path``."""
    return frozenset(what for what in (LOST_PEERS, LEAVES) if Path(f"{path}.{what}").exists())

"""Finds the drive that would hold the rows of tables, and how many bytes they would take there."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from gmeta.core.errors import ConfigError

ROW_BYTES = 12  # of a row on the drive, besides its record
FACTOR = 2  # the files have at most as many dead slots as rows


@dataclass(frozen=True)
class Drive:
    """The drive that would hold rows: a folder on it, and its free bytes."""

    folder: Path
    free: int


def find_drive(folder: Path) -> Drive:
    """Return the drive of a folder, which must be there.

    Raises:
      ConfigError: It isn't a folder, or can't be written to.
    """
    folder = folder.absolute()
    if not folder.is_dir():
        what = "isn't a folder" if folder.exists() else "doesn't exist"
        raise ConfigError(f"--ssd {folder} {what}: name a folder on the drive that would hold rows")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--ssd {folder} can't be written to: name a folder that can")
    return Drive(folder, shutil.disk_usage(folder).free)


def file_bytes(records: float, rows: float) -> int:
    """Return the bytes that the files of some rows take at most, whose records have so many bytes."""
    return math.ceil(FACTOR * (records + ROW_BYTES * rows))

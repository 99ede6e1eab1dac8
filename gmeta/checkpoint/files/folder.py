"""A checkpoint's folder: it appears under its name whole and on the disk, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gmeta.checkpoint.files.lock import FolderLock
from gmeta.core.errors import GmetaError


def staging_of(folder: Path) -> Path:
    """Where a checkpoint is written until it is whole: hidden, beside its place, the same for all ranks."""
    return folder.with_name(f".{folder.name}.partial")


def lock_of(folder: Path) -> FolderLock:
    """The lock of a checkpoint that is made: two processes must not write one staging folder."""
    return FolderLock(folder.with_name(f".{folder.name}.lock"), f"{folder} is written")


def begin(folder: Path) -> None:
    """Make an empty staging folder; one that a killed process has left is removed."""
    staging = staging_of(folder)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)


def commit(folder: Path) -> None:
    """Give the staged checkpoint its name. What was written in it reaches the disk before the name does."""
    staging = staging_of(folder)
    for path in staging.rglob("*"):
        sync(path)
    sync(staging)
    staging.rename(folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    """Flush a file's or a folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(folder: Path) -> None:
    """Remove a checkpoint: first its name, at once, so that half of one is never taken for a whole one."""
    doomed = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    sync(doomed.parent)
    shutil.rmtree(doomed)


def sweep(root: Path) -> None:
    """Remove what killed processes have left in a folder of checkpoints. No save may be going on there."""
    for pattern in (".*.partial", ".*.removed"):
        for path in root.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(".*.lock"):
        path.unlink(missing_ok=True)


@contextmanager
def explain_checkpoint_errors(folder: Path) -> Iterator[None]:
    """Say of a full disk, or of a folder that may not be written, which checkpoint and file it hit.

    Args:
      folder: The checkpoint.

    Raises:
      GmetaError: In place of an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None else f" ({error.filename})"
        raise GmetaError(
            f"{folder}: the checkpoint can't be written: {error.strerror or error}{where}; make room or "
            "mend the folder: the checkpoints before it are whole"
        ) from error

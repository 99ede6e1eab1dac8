"""A checkpoint's folder. It appears under its name only when it is whole and on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gmeta.checkpoint.files.lock import FolderLock
from gmeta.core.errors import GmetaError
from gmeta.core.files import sync


def staging_of(folder: Path) -> Path:
    """Return the hidden folder beside the final one where all ranks write a checkpoint until it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def lock_of(folder: Path) -> FolderLock:
    """Return the lock of a checkpoint in the making: two processes must not write to one staging folder."""
    return FolderLock(folder.with_name(f".{folder.name}.lock"), f"{folder} is written")


def begin(folder: Path) -> None:
    """Make an empty staging folder, and remove one that a killed process has left."""
    staging = staging_of(folder)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)


def commit(folder: Path) -> None:
    """Give the staged checkpoint its name, after flushing its content to the disk."""
    staging = staging_of(folder)
    for path in staging.rglob("*"):
        sync(path)
    sync(staging)
    staging.rename(folder)
    sync(folder.parent)


def discard(folder: Path) -> None:
    """Remove a checkpoint. Rename it first, so that a partly removed one is never taken for a whole one."""
    doomed = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    sync(doomed.parent)
    shutil.rmtree(doomed)


def sweep(root: Path) -> None:
    """Remove what killed processes have left in a folder of checkpoints. No save may be running there."""
    for pattern in (".*.partial", ".*.removed"):
        for path in root.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(".*.lock"):
        path.unlink(missing_ok=True)


@contextmanager
def explain_checkpoint_errors(folder: Path) -> Iterator[None]:
    """Name the checkpoint and the file in errors such as a full disk or a folder without write permission.

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

"""A folder that appears under its final name whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gmeta.core.errors import GmetaError


@contextmanager
def write_errors_explained(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` of the block into one line that names the path and the cause.

    Args:
      path: Named where the error itself names no file.

    Raises:
      GmetaError: In place of the ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise GmetaError(f"can't write {error.filename or path}: {error.strerror or error}") from error


@contextmanager
def staged_folder(final: Path) -> Iterator[Path]:
    """Fill a hidden folder beside ``final`` and give it that name at the end.

    An error or Ctrl-C inside the block removes the hidden folder and leaves ``final`` as it was. What stood
    at ``final`` is replaced: whether it may be is the caller's to decide first.

    Yields:
      The empty folder to fill, on the same file system as ``final``.

    Raises:
      GmetaError: The disk is full, or something may not be written.
    """
    target = Path(os.path.realpath(final))  # a link to a folder stays a link
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    previous = target.with_name(f".{target.name}.{os.getpid()}.previous")
    try:
        with write_errors_explained(final):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)  # of a killed process that had this process's id
            partial.mkdir()
            yield partial
            if target.exists():
                target.rename(previous)
            try:
                partial.rename(target)
            except BaseException:
                if previous.exists():
                    previous.rename(target)
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(previous, ignore_errors=True)

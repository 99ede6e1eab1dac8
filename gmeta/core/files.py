"""Writes a file whole or not at all, and states what a path must offer to be read."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol


class HasSize(Protocol):
    """The part of `os.stat_result` that readers use."""

    @property
    def st_size(self) -> int:
        """Size of the file in bytes."""


class ReadablePath(Protocol):
    """The part of `pathlib.Path` that readers use where a file may be in another file system."""

    def __truediv__(self, name: str, /) -> ReadablePath: ...

    def __fspath__(self) -> str: ...

    def read_text(self) -> str:
        """Return the file's content; raise OSError if it can't be read."""

    def read_bytes(self) -> bytes:
        """Return the file's content; raise OSError if it can't be read."""

    def exists(self) -> bool:
        """Return whether the file exists."""

    def stat(self) -> HasSize:
        """Return an object that holds the file's size."""


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write ``content`` so that ``path`` is only ever absent, unchanged or complete.

    The bytes go to a temporary name in the same folder, are flushed to the disk, and are then renamed over
    ``path``. An interruption leaves the old file as it was.

    Args:
      path: The file; its folder is created if it is missing.
      content: Text, written as UTF-8, or bytes.

    Returns:
      ``path``.

    Raises:
      OSError: The folder can't be written, or the disk is full. The temporary file is removed.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two processes don't share a name
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            raise type(error)(error.errno, error.strerror, str(path)) from error  # a full disk names no file
        raise
    return path


def beside_data(folder: Path, name: str) -> Path:
    """Return the path of a file that describes the data files in its folder.

    Its name begins with ``_``: `pyarrow.dataset`, pandas, Spark and others that read a folder as one table
    skip such files. Earlier versions of gmeta wrote ``name`` itself, whose path is returned if that is the
    file that the folder has.

    Example:
      >>> beside_data(Path("scores"), "manifest.json").name
      '_manifest.json'
    """
    path, earlier = folder / f"_{name}", folder / name
    return earlier if earlier.exists() and not path.exists() else path


def sync(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

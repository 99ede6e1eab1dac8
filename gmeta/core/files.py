"""Writes files atomically, and defines the interface of a readable path."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from gmeta.core.errors import GmetaError


class HasSize(Protocol):
    """The part of `os.stat_result` that readers use."""

    @property
    def st_size(self) -> int:
        """Size of the file in bytes."""


class ReadablePath(Protocol):
    """The part of `pathlib.Path` that readers use for files that may be in another file system."""

    def __truediv__(self, name: str, /) -> ReadablePath: ...

    def __fspath__(self) -> str: ...

    def read_text(self) -> str:
        """Return the file's content; raise OSError if it can't be read."""

    def read_bytes(self) -> bytes:
        """Return the file's content; raise OSError if it can't be read."""

    def exists(self) -> bool:
        """Return whether the file exists."""

    def stat(self) -> HasSize:
        """Return an object with the file's size."""


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write ``content`` so that ``path`` is only ever absent, unchanged or complete.

    The bytes go to a temporary name in the same folder, are flushed to the disk, and are then renamed over
    ``path``. An interruption leaves the old file unchanged.

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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # processes use distinct names
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


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes left of `write_atomically` and `stage_folder` in a folder.

    The caller must hold a lock by which no other process writes there.
    """
    for path in (*folder.glob(".*.tmp"), *folder.glob(".*.partial")):
        if path.suffixes[-2:-1] and path.suffixes[-2][1:].isdigit():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def beside_data(folder: Path, name: str) -> Path:
    """Return the path of a file that describes the data files in its folder.

    Its name begins with ``_``: `pyarrow.dataset`, pandas, Spark and others that read a folder as one table
    skip such files. Earlier versions of gmeta wrote ``name`` itself, whose path is returned if the folder
    contains it.

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


# A folder that appears under its final name complete or not at all.

_LOCK = "lock"
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Convert an ``OSError`` of the block to one line that names the path and the cause.

    Args:
      path: The path to name if the error itself names no file.

    Raises:
      GmetaError: In place of the ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise GmetaError(f"can't write {error.filename or path}: {error.strerror or error}") from error


@contextmanager
def stage_folder(final: Path) -> Iterator[Path]:
    """Fill a hidden folder beside ``final``, and rename it to ``final`` at the end.

    An error or Ctrl-C inside the block removes the hidden folder and leaves ``final`` unchanged. An existing
    ``final`` is replaced; the caller must check first whether that is allowed.

    Yields:
      The empty folder to fill, on the same file system as ``final``.

    Raises:
      GmetaError: The disk is full, or something may not be written.
    """
    target = Path(os.path.realpath(final))  # a link to a folder stays a link
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with explain_write_errors(final):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)  # from a killed process with the same id
            partial.mkdir()
            yield partial
            put_in_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def resumable_folder(final: Path, *, resume: bool) -> Iterator[Path]:
    """Fill a folder like `stage_folder`, but allow a run to continue the work of a killed run.

    The hidden folder has a fixed name, ``.<final>.partial``, and a lock: while one run fills it, others are
    refused.

    Args:
      final: The final name of the folder.
      resume: Keep an earlier run's work, and keep this run's work if it fails. Otherwise, both are removed,
        and only a killed process leaves files behind.

    Yields:
      The folder to fill; empty unless ``resume``.

    Raises:
      GmetaError: The disk is full, something may not be written, or another run is filling the folder.
    """
    target = Path(os.path.realpath(final))
    partial = target.with_name(f".{target.name}.partial")
    with explain_write_errors(final):
        partial.mkdir(parents=True, exist_ok=True)
        with lock_file(partial / _LOCK, f"another run is preparing {final}: wait for it, or end it"):
            keep = resume
            try:
                if not resume:
                    clear(partial)
                yield partial
                (partial / _LOCK).unlink()
                put_in_place(partial, target)
                keep = True
            finally:
                if not keep:
                    shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def lock_file(path: Path, refusal: str) -> Iterator[None]:
    """Hold the lock of a file, which is created if missing; a killed process releases the lock.

    Raises:
      GmetaError: Another process holds it; the message is `refusal`.
    """
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise GmetaError(refusal) from error
        yield


def clear(folder: Path) -> None:
    """Empty a folder that `resumable_folder` yields."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()


def put_in_place(partial: Path, target: Path) -> None:
    """Rename a folder to its final name; a previous folder of that name is removed only afterwards.

    If the file system can exchange two names atomically, a reader always finds the old folder or the new one,
    even if the process is killed. Otherwise, the old folder briefly has another name; `restore` renames it
    back if the process is killed in between.
    """
    if not target.exists():
        partial.rename(target)
        return
    if _exchange(partial, target):
        shutil.rmtree(partial, ignore_errors=True)
        return
    previous = _previous(target)
    shutil.rmtree(previous, ignore_errors=True)
    target.rename(previous)
    try:
        partial.rename(target)
    except BaseException:
        previous.rename(target)
        raise
    shutil.rmtree(previous, ignore_errors=True)


def restore(final: Path) -> None:
    """Restore a folder if a process was killed while replacing it."""
    target = Path(os.path.realpath(final))
    if not target.exists() and _previous(target).exists():
        with contextlib.suppress(FileNotFoundError):  # another process restored it
            _previous(target).rename(target)


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; return False if that isn't possible."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)

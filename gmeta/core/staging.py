"""A folder that appears under its final name whole, or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gmeta.core.errors import GmetaError

_LOCK = "lock"
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` of the block into one line that names the path and the cause.

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
    """Fill a hidden folder beside ``final`` and give it that name at the end.

    An error or Ctrl-C inside the block removes the hidden folder and leaves ``final`` as it was. An existing
    ``final`` is replaced; the caller decides beforehand whether it may be.

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
    """Fill a folder as `stage_folder` does, but let a run continue what a killed run left.

    The hidden folder has a fixed name, ``.<final>.partial``, and a lock: while one run fills it, any other is
    refused.

    Args:
      final: The name that the folder gets at the end.
      resume: Keep what an earlier run left, and keep this run's work if it fails. Otherwise both are
        removed, and only a killed process leaves something behind.

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
    """Hold the lock of a file, which is made if it isn't there; a killed process holds none.

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
    """Give a folder its final name; the folder that had the name is removed only afterwards.

    Where the file system can exchange two names at once, a reader finds the old folder or the new one, even
    if the process is killed. Elsewhere the old folder has another name for a moment; `restore` brings it back
    if the process is killed then.
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
    """Bring back a folder if a process was killed while replacing it."""
    target = Path(os.path.realpath(final))
    if not target.exists() and _previous(target).exists():
        with contextlib.suppress(FileNotFoundError):  # another process restored it
            _previous(target).rename(target)


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names at once; return False where that isn't possible."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)

"""Writes files and folders atomically, and defines the interfaces of paths and files in any file system."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
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
    ``path``; the new name is flushed too. An interruption, also of the power, leaves the old file unchanged.

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
        sync(path.parent)
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


def check_replaces(out: Path, mark: str, what: str) -> None:
    """Refuse to replace anything but an empty folder, or one that has a certain file.

    Args:
      out: What would be replaced, if it exists.
      mark: The name of the file.
      what: What a folder with this file is.

    Raises:
      GmetaError: ``out`` is something else.
    """
    if not out.exists() or (out / mark).is_file() or (out.is_dir() and not any(out.iterdir())):
        return
    raise GmetaError(f"{out} exists already and isn't {what}: name a folder that is to be made")


def sha256_of(files: Sequence[Path]) -> str:
    """Return a hash of the contents of files, in hexadecimal digits."""
    found = hashlib.sha256()
    for path in files:
        own = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                own.update(piece)
        found.update(own.digest())
    return found.hexdigest()


@contextmanager
def stage_folder(final: Path) -> Iterator[Path]:
    """Fill a hidden folder beside ``final``, flush it to the disk, and rename it to ``final`` at the end.

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

    The folder's files and names are flushed to the disk before, and its final name is flushed after.

    If the file system can exchange two names atomically, a reader always finds the old folder or the new one,
    even if the process is killed. Otherwise, the old folder briefly has another name; `restore` renames it
    back if the process is killed in between.
    """
    for here, _, names in os.walk(partial, topdown=False):
        for path in (*(Path(here, name) for name in names), Path(here)):
            if path.is_file() or path.is_dir():
                sync(path)
    if not target.exists():
        partial.rename(target)
        sync(target.parent)
        return
    if _exchange(partial, target):
        sync(target.parent)
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
    sync(target.parent)
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


# Files below a root that a single process writes, and any number of others read.

_WRITER_LOCK = ".lock"


class NamedPath(Protocol):
    """The part of `pathlib.Path` that the files of any file system have."""

    @property
    def name(self) -> str:
        """The part after the last slash."""

    def __fspath__(self) -> str: ...

    def read_text(self) -> str:
        """Return the file's content; raise OSError if it can't be read."""

    def read_bytes(self) -> bytes:
        """Return the file's content; raise OSError if it can't be read."""


class Files(Protocol):
    """Files below a root, by their paths within it, such as ``deltas/3``.

    Attributes:
      may_follow: How many files of an earlier writer may still appear after `claim`.
    """

    may_follow: int

    def path(self, name: str) -> NamedPath:
        """Return the path or address of a file or folder."""

    def list(self) -> dict[str, int]:
        """Return the files, without hidden ones, and their sizes in bytes; none if there is no root.

        Raises:
          OSError: They can't be listed.
        """

    def read(self, name: str) -> bytes:
        """Return a file's content.

        Raises:
          FileNotFoundError: There is no such file.
          OSError: It can't be read.
        """

    def write(self, name: str, data: bytes) -> None:
        """Write a file.

        Raises:
          GmetaError: It can't be written. In a remote file system it may appear nevertheless.
          ConfigError: Another writer has taken over.
        """

    def folder(self, name: str, last: str) -> contextlib.AbstractContextManager[Path]:
        """Write a folder, whose file ``last`` appears last.

        Yields:
          A local path, at which the caller makes the folder.

        Raises:
          GmetaError: As for `write`. The incomplete folder is removed if the file system answers.
          ConfigError: As for `write`.
        """

    def remove(self, name: str, first: str = "") -> None:
        """Remove a file or folder, of a folder the file ``first`` first; errors are ignored."""

    def claim(self, refusal: str) -> Callable[[], None]:
        """Become the only writer, and remove unfinished files of killed ones.

        Args:
          refusal: The message if another process writes here.

        Returns:
          A function that ends the claim.

        Raises:
          GmetaError: Another process writes to the local folder; or a file can't be written.
        """


class LocalFiles:
    """A local folder (`Files`)."""

    may_follow = 0

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def path(self, name: str) -> Path:
        """Return the path of a file or folder."""
        return self._root / name

    def list(self) -> dict[str, int]:
        """Return the files, without hidden ones, and their sizes in bytes."""
        found: dict[str, int] = {}
        for here, folders, names in os.walk(self._root):
            folders[:] = [name for name in folders if name[0] != "."]
            for name in (name for name in names if name[0] != "."):
                path = Path(here, name)
                with contextlib.suppress(FileNotFoundError):  # it is removed meanwhile
                    found[path.relative_to(self._root).as_posix()] = path.stat().st_size
        return found

    def read(self, name: str) -> bytes:
        """Return a file's content."""
        return self.path(name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Write a file."""
        with explain_write_errors(self.path(name)):
            write_atomically(self.path(name), data)

    @contextmanager
    def folder(self, name: str, last: str) -> Iterator[Path]:
        """Write a folder, which appears whole."""
        with stage_folder(self.path(name)) as staging:
            staging.rmdir()
            yield staging

    def remove(self, name: str, first: str = "") -> None:
        """Remove a file, or a folder, which disappears at once; errors are ignored."""
        path = self.path(name)
        hidden = path.with_name(f".{path.name}.{os.getpid()}.partial")
        with contextlib.suppress(OSError):
            if path.is_dir():
                path.rename(hidden)  # so that a killed process leaves no part under the folder's name
                shutil.rmtree(hidden, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def claim(self, refusal: str) -> Callable[[], None]:
        """Become the only writer; a second one is refused."""
        lock = contextlib.ExitStack()
        with explain_write_errors(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            lock.enter_context(lock_file(self._root / _WRITER_LOCK, refusal))
            for folder in (self._root, *(path for path in self._root.iterdir() if path.is_dir())):
                remove_unfinished(folder)
        return lock.close

"""A lock that allows one writer of a folder at a time. A file in the folder names the writer.

A second writer receives an error with that name. The file is locked in the kernel (POSIX record locks, which
NFS and Lustre also apply across machines), and contains the writer's machine, process and job. A new writer
takes over the lock of a dead process:

* if the process was on this machine: immediately, if the process no longer exists or another process now has
  its number;
* if the process was on another machine: if the file hasn't been touched for `STALE` seconds. A living
  writer touches it every few seconds. Times are those of the file system, so clocks need not agree;
* if the process belonged to an elastic job: immediately, by the job's next start, even if its first rank was
  on another machine.

On a file system without kernel locks, the file's content alone decides. Two writers that start within a
fraction of a second of each other may then both be refused.

All stores of one process count as one writer. So do the ranks of a job: rank 0 takes the lock for all.
Readers ignore the lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gmeta.core.collectives.elastic import job
from gmeta.core.errors import ConfigError, GmetaError
from gmeta.core.files import sync
from gmeta.core.json_values import parse_json

FILE_NAME = ".lock"

STALE = 60.0
"""Seconds without a heartbeat after which a writer on another machine counts as dead."""

_BEAT = 10.0  # seconds between two heartbeats
_PATIENCE = 2.0  # seconds to wait for a process that is about to end: a rank ends within 1 s of its launcher
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class Writer:
    """Process that writes.

    Attributes:
      host: The name of its machine.
      machine: Identifies the numbering of processes: equal values mean that process numbers are comparable.
      pid: The process number.
      began: When it started, in kernel ticks; distinguishes processes that reuse a number.
      job: The elastic job to which the rank belongs; empty outside an elastic job.
      since: When it started to write, in local time.
    """

    host: str
    machine: str
    pid: int
    began: int
    job: str
    since: str

    @classmethod
    def here(cls) -> Writer:
        """Describe this process."""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(platform.node(), _machine(), os.getpid(), _began(os.getpid()) or 0, job(), since)

    def is_same(self, other: Writer) -> bool:
        """Return whether both are the same process, no matter when each started to write."""
        return (self.machine, self.pid, self.began) == (other.machine, other.pid, other.began)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, which has written since {self.since}"


class FolderLock:
    """Exclusive right of one process to write in a folder.

    Args:
      file: The lock file; its folder is made when the lock is taken.
      what: What is written in the folder, for the error message.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> lock = FolderLock(folder / FILE_NAME, f"{folder} is trained")
      >>> lock.take()
      >>> json.loads((folder / FILE_NAME).read_text())["pid"] == os.getpid()
      True
      >>> lock.release()
      >>> (folder / FILE_NAME).exists()
      False
    """

    def __init__(self, file: Path, what: str) -> None:
        self._file, self._what, self._taken = file.resolve(), what, False

    def take(self) -> None:
        """Take the lock, or check that this process still has it.

        Raises:
          ConfigError: Another process writes there; the message names it.
          GmetaError: The file can't be written.
        """
        try:
            self._take()
        except OSError as error:
            raise GmetaError(
                f"{self._file}: can't be locked: {error.strerror or error}; make room or mend the folder"
            ) from error

    def _take(self) -> None:
        with _guard:
            held = _held.get(self._file)
            if held is not None and not held.is_ours():  # lost, or held by the process that forked this one
                held.drop()
                held = None
            if held is None:
                held = _held[self._file] = self._acquire()
                self._taken = False
            if not self._taken:
                held.users += 1
                self._taken = True

    def release(self) -> None:
        """Release the lock, unless another store of this process still uses it."""
        with _guard:
            held = _held.get(self._file)
            if not self._taken or held is None or held.writer.pid != os.getpid():
                return
            self._taken = False
            held.users -= 1
            if held.users == 0:
                held.end()
                del _held[self._file]

    def __enter__(self) -> FolderLock:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _acquire(self) -> _Held:
        began = time.monotonic()
        while True:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                other = _lock(descriptor, self._file)
                if other is None:
                    held = _Held(self._file, descriptor)
                    if held.begin():
                        return held
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            patience = STALE if other is not None and other.job and other.job == job() else _PATIENCE
            if other is not None and time.monotonic() - began > patience:
                raise ConfigError(f"{self._what} by {other}: {self._advice(other)}")
            time.sleep(0.05)

    def _advice(self, other: Writer) -> str:
        if other.machine == _machine():
            return "wait for it or end it, or name another folder"
        return (
            "wait for it or end it, or name another folder; if it was lost with its machine, try again "
            f"{STALE:.0f} s after that"
        )


class _Held:
    """Lock that this process holds."""

    def __init__(self, file: Path, descriptor: int) -> None:
        self.writer, self.users = Writer.here(), 0
        self._file, self._descriptor, self._over = file, descriptor, threading.Event()

    def begin(self) -> bool:
        """Write the owner into the file; return whether the file then names this process."""
        content = json.dumps(asdict(self.writer)).encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, content, 0)
        if not self.is_ours():
            return False
        threading.Thread(target=self._beat, name="gmeta-lock", daemon=True).start()
        return True

    def is_ours(self) -> bool:
        """Return whether the file still names this process as the writer."""
        try:
            same = os.path.samestat(self._file.stat(), os.fstat(self._descriptor))
        except OSError:
            return False
        written = _read_owner(self._descriptor)
        return same and self.writer.pid == os.getpid() and written is not None and self.writer == written

    def end(self) -> None:
        """Remove the file if it still belongs to this process, then close it."""
        if self.is_ours():
            self._file.unlink(missing_ok=True)  # under the kernel's lock, it can't be another process' file
        self.drop()

    def drop(self) -> None:
        """Close the file and leave it unchanged."""
        self._over.set()
        with suppress(OSError):
            os.close(self._descriptor)

    def _beat(self) -> None:
        while not self._over.wait(_BEAT):
            with suppress(OSError):
                os.utime(self._descriptor)


_guard = threading.Lock()
_held: dict[Path, _Held] = {}


def _lock(descriptor: int, file: Path) -> Writer | None:
    """Try to lock the file; return the process that holds the lock, or None if this process now holds it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = True
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            taken = True  # the file's content alone decides
        elif error.errno in (errno.EACCES, errno.EAGAIN):
            taken = False
        else:
            raise
    try:
        current = os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        current = False
    written = _read_owner(descriptor)
    if not taken or not current:  # held, or just removed by its holder
        return written or Writer("this or another machine", "", 0, 0, "", "just now")
    return written if written is not None and _is_alive(written, descriptor, file.parent) else None


def _is_alive(writer: Writer, descriptor: int, folder: Path) -> bool:
    if writer.is_same(Writer.here()) or (writer.job and writer.job == job()):
        return False  # this process before it restarted itself, or the job's previous start
    if writer.machine == _machine():
        return _began(writer.pid) == writer.began
    with tempfile.TemporaryFile(dir=folder) as probe:  # the file system's current time
        now = os.fstat(probe.fileno()).st_mtime
    return now - os.fstat(descriptor).st_mtime < STALE


def _read_owner(descriptor: int) -> Writer | None:
    try:
        writer = Writer(**parse_json(os.pread(descriptor, 1 << 16, 0)))
    except (ValueError, TypeError):  # still empty, or not written by gmeta
        return None
    return writer


def _began(pid: int) -> int | None:
    """Read the start time of a process of this machine; None if it doesn't exist."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(rest[18])


def _machine() -> str:
    """Identify the running kernel and its numbering of processes; a container has its own numbering."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return platform.node()


# A checkpoint's folder. It appears under its name only when it is whole and on the disk.


def staging_of(folder: Path) -> Path:
    """Return the hidden folder beside the final one where all ranks write a checkpoint until it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def lock_of(folder: Path) -> FolderLock:
    """Return the lock of a checkpoint's staging folder, in which only one process may write."""
    return FolderLock(folder.with_name(f".{folder.name}.lock"), f"{folder} is written")


def begin(folder: Path) -> None:
    """Make an empty staging folder; remove one that a killed process left."""
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
    """Remove what killed processes left in a folder of checkpoints. No save may be running there."""
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

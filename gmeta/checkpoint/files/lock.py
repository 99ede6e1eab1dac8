"""One writer of a folder at a time: a file in it says who that is, and whoever comes second is told.

The file is locked in the kernel (POSIX record locks, which NFS and Lustre carry to other machines too), and
holds the writer's machine, process and job. A lock of a dead process is taken over:

* on this machine at once: the process isn't there any more, or its number is another process' now;
* of a process on another machine when the file hasn't been touched for `STALE` seconds; a living writer does
  so every few. The time is the file system's own, so clocks need not agree;
* of an elastic job by the job's next start at once, whatever machine its first rank was on.

On a file system without kernel locks the same holds by the file's content, but two writers that begin within
a fraction of a second may then both be told that they are the second.

Stores of one process are one writer. Ranks of a job are one too: rank 0 takes the lock for all. Readers look
at no lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gmeta.core.collectives.driver.elastic import job
from gmeta.core.errors import ConfigError, GmetaError

FILE_NAME = ".lock"

STALE = 60.0
"""Seconds without a sign after which a writer on another machine counts as dead."""

_BEAT = 10.0  # seconds between two signs
_PATIENCE = 2.0  # seconds for a process to leave that is about to: a rank follows its launcher within one
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class Writer:
    """A process that writes.

    Attributes:
      host: The name of its machine.
      machine: What tells whether process numbers here and there mean the same.
      pid: Its number.
      began: When it was started, in the kernel's ticks; a number that is used again has another.
      job: The elastic job that it is a rank of; empty outside of one.
      since: When it began to write, local time.
    """

    host: str
    machine: str
    pid: int
    began: int
    job: str
    since: str

    @classmethod
    def here(cls) -> Writer:
        """This process."""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(platform.node(), _machine(), os.getpid(), _began(os.getpid()) or 0, job(), since)

    def is_same(self, other: Writer) -> bool:
        """Whether both are one process, whenever each began to write."""
        return (self.machine, self.pid, self.began) == (other.machine, other.pid, other.began)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, which has written since {self.since}"


class FolderLock:
    """The right to write in a folder, held by one process.

    Args:
      file: The lock file; its folder is made when the lock is taken.
      what: What is written there, for the refusal.

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
        """Take the lock, or see that it is still this process' own.

        Raises:
          ConfigError: Another process writes there; it is named.
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
            if held is not None and not held.is_ours():  # lost, or that of the process which has forked this
                held.drop()
                held = None
            if held is None:
                held = _held[self._file] = self._acquire()
                self._taken = False
            if not self._taken:
                held.users += 1
                self._taken = True

    def release(self) -> None:
        """Give the lock back; it stays while another store of this process has it."""
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
    """A lock that this process has."""

    def __init__(self, file: Path, descriptor: int) -> None:
        self.writer, self.users = Writer.here(), 0
        self._file, self._descriptor, self._over = file, descriptor, threading.Event()

    def begin(self) -> bool:
        """Write down who has it; whether that is what stands there then."""
        content = json.dumps(asdict(self.writer)).encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, content, 0)
        if not self.is_ours():
            return False
        threading.Thread(target=self._beat, name="gmeta-lock", daemon=True).start()
        return True

    def is_ours(self) -> bool:
        """Whether the file still says that this process writes."""
        try:
            same = os.path.samestat(self._file.stat(), os.fstat(self._descriptor))
        except OSError:
            return False
        written = _read_owner(self._descriptor)
        return same and self.writer.pid == os.getpid() and written is not None and self.writer == written

    def end(self) -> None:
        """Remove the file, if it still is this process' own, and let go of it."""
        if self.is_ours():
            self._file.unlink(missing_ok=True)  # before the kernel's lock goes: nobody else's is removed
        self.drop()

    def drop(self) -> None:
        """Let go of the file as it is."""
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
    """Who has the file, or None once this process has it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = True
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            taken = True  # what is written has to do
        elif error.errno in (errno.EACCES, errno.EAGAIN):
            taken = False
        else:
            raise
    try:
        current = os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        current = False
    written = _read_owner(descriptor)
    if not taken or not current:  # held, or removed just now by who had it
        return written or Writer("this or another machine", "", 0, 0, "", "just now")
    return written if written is not None and _is_alive(written, descriptor, file.parent) else None


def _is_alive(writer: Writer, descriptor: int, folder: Path) -> bool:
    if writer.is_same(Writer.here()) or (writer.job and writer.job == job()):
        return False  # this process before it started itself anew, or the job's start before this one
    if writer.machine == _machine():
        return _began(writer.pid) == writer.began
    with tempfile.TemporaryFile(dir=folder) as probe:  # what time it is there
        now = os.fstat(probe.fileno()).st_mtime
    return now - os.fstat(descriptor).st_mtime < STALE


def _read_owner(descriptor: int) -> Writer | None:
    try:
        writer = Writer(**json.loads(os.pread(descriptor, 1 << 16, 0)))
    except (ValueError, TypeError):  # empty yet, or not of ours
        return None
    return writer


def _began(pid: int) -> int | None:
    """When a process of this machine was started; None if it isn't there."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(rest[18])


def _machine() -> str:
    """Name the running kernel and its numbering of processes; a container has a numbering of its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return platform.node()

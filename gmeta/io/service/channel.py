"""Messages between a worker and the process that trains: small values and arrays, over TCP.

Both sides prove that they know the same key, and sign each message
(`gmeta.core.collectives.wire`). A message is one of `gmeta.core.collectives.wire`, so
reading it runs no code. The kernel notices a machine that vanished: within 20 s a read fails. A process that
was killed closes its connections at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from gmeta.core.collectives.wire import SignedLink, name_loopback, pack_parts, unpack
from gmeta.core.errors import CollectiveError, ConfigError

_PURPOSE = b"gmeta workers"
_GREETING_SECONDS = 10.0
# Linux' names; other systems have keepalive with times of their own.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_NODELAY": 1}


class Channel:
    """One connection, of which the other side knows the key.

    Args:
      link: A connected socket; the channel closes it.
      key: The key.
      server: Whether this side was called.
      identity: Who this side is, 16 bytes, if it was called.
      expected: Who may be called, if this side calls; empty: any worker that knows the key.

    Raises:
      OSError: The other side can't be reached, doesn't answer, doesn't know the key, or is another worker.
    """

    def __init__(
        self,
        link: socket.socket,
        key: bytes,
        *,
        server: bool,
        identity: bytes = b"",
        expected: Collection[bytes] = (),
    ) -> None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._link = SignedLink(
            link,
            key,
            _PURPOSE,
            called=server,
            name=identity,
            expected=expected,
            seconds=_GREETING_SECONDS,
        )

    @classmethod
    def to(cls, address: str, key: bytes, expected: Collection[bytes] = (), timeout: float = 5.0) -> Channel:
        """Connect to a worker at ``"host:port"``."""
        link = socket.create_connection(split_address(address), timeout)
        return cls(link, key, server=False, expected=expected)

    def send(self, message: Any) -> None:
        """Send a message, of the kinds that `wire.pack` takes; waits while the other side doesn't read."""
        self._link.send(pack_parts(message))

    def receive(self, timeout: float | None = None) -> Any:
        """Return the next message.

        Raises:
          TimeoutError: Nothing came for ``timeout`` seconds.
          EOFError, OSError: The other side is gone, or the bytes received aren't its next message.
        """
        try:
            return unpack(self._link.receive(timeout))
        except TimeoutError as error:
            raise TimeoutError(f"it sent nothing for {timeout:.0f} s") from error
        except CollectiveError as error:
            raise ConnectionError(str(error)) from error

    def hang_up(self) -> None:
        """End the connection, from any thread: the threads that wait for it get an error."""
        self._link.hang_up()

    def close(self) -> None:
        """Close it, from the thread that uses it."""
        self._link.close()


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``"host:port"``.

    Raises:
      ConfigError: It is no such text.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is no worker's address: give HOST:PORT, as `gmeta workers` prints it")
    return host.strip("[]"), int(port)


# A folder in which workers announce themselves, and the key that they share with training processes.

KEY = "GMETA_WORKERS_KEY"
"""Environment variable: the key of workers and training processes, if no folder holds it."""

LEAST_KEY = 16
"""The least characters of a key: a shorter one can be guessed from a greeting that was captured."""

_SUFFIX = ".worker"
_KEY_FILE = "key"
_MAKE = 'make one with `python -c "import secrets; print(secrets.token_hex(32))"`'


class Announcement(NamedTuple):
    """Where a worker is.

    Attributes:
      address: ``"host:port"``.
      identity: 16 bytes by which the worker proves that it is this one.
      unusable: Why it can't be reached from here; "" if it may be.
    """

    address: str
    identity: bytes
    unusable: str = ""


def announce(folder: Path, address: str, identity: bytes, *, loopback: bool) -> Path:
    """Write down that a worker is at an address, ``"host:port"``; return the file, to remove at the end."""
    path = folder / f"{address.replace(':', '-')}-{identity.hex()[:8]}{_SUFFIX}"
    beside = path.with_suffix(".new")
    told = {"address": address, "identity": identity.hex(), "loopback": name_loopback() if loopback else []}
    beside.write_text(json.dumps(told))
    beside.replace(path)
    return path


def announced(folder: Path) -> list[Announcement]:
    """Return the workers that were announced and not taken back, in order."""
    found, here = [], list(name_loopback())
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        with contextlib.suppress(FileNotFoundError):  # just taken back
            content = path.read_text(errors="replace")
            try:
                told = json.loads(content)
                address, identity = str(told["address"]), bytes.fromhex(told["identity"])
                machine = [str(name) for name in told["loopback"]]
            except (KeyError, TypeError, ValueError, RecursionError):
                found.append(Announcement(path.name, b"", "another version of gmeta announced it"))
                continue
            far = bool(machine) and machine != here
            why = (
                f"it listens for processes of {machine[0]} alone: start it with --host 0.0.0.0" if far else ""
            )
            found.append(Announcement(address, identity, why))
    return found


def key_of(folder: Path | None) -> bytes:
    """Return the key: `KEY`'s if it is set, or else that of the folder, which is made if it has none.

    Only the folder's owner can read a key that is made. Who knows it can run any program on workers.

    Raises:
      ConfigError: There is no folder, and the variable isn't set; or the key is too short, or others than its
        owner and its group can read or replace it.
    """
    given = os.environ.get(KEY)
    if given:
        return _long_enough(os.fsencode(given), KEY, _MAKE)
    if folder is None:
        raise ConfigError(
            f"{KEY} isn't set: workers run programs for anyone who knows their key, so give the same long "
            "random text to workers and training, or let them share a folder (`gmeta workers FOLDER`), which "
            "keeps one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _KEY_FILE
    if not path.exists():
        beside = folder / f".{secrets.token_hex(8)}"
        beside.touch(mode=0o600)
        beside.write_text(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):  # another one was first
            os.link(beside, path)
        beside.unlink()
    with path.open("rb") as file:
        _refuse_open_to_others(folder, path, os.fstat(file.fileno()))
        return _long_enough(file.read(), str(path), "remove it, and a worker makes a new one")


def _refuse_open_to_others(folder: Path, path: Path, key: os.stat_result) -> None:
    around = folder.stat()
    if around.st_mode & stat.S_IWOTH and not around.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"{folder} can be written by everybody, who could put another key there and run programs on "
            f"workers: chmod o-w {folder}, or set {KEY}"
        )
    if key.st_uid not in (os.geteuid(), around.st_uid, 0):
        raise ConfigError(
            f"{path} belongs to user {key.st_uid}, and {folder} to user {around.st_uid}: workers run "
            f"programs for anyone who knows the key, so remove it, or set {KEY}"
        )
    if key.st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(
            f"{path} can be read or written by everybody, who could run programs on workers: remove it, and "
            f"a worker makes a new one; or set {KEY}"
        )


def _long_enough(key: bytes, where: str, advice: str) -> bytes:
    key = key.strip()
    if len(key) < LEAST_KEY:
        raise ConfigError(f"{where}: a key needs {LEAST_KEY} characters, and has {len(key)}: {advice}")
    return key

"""A worker, which reads pieces of epochs on request, and its messages with the training process.

The training process sends its function from a piece to a dataset, and names a piece. The worker builds the
dataset and sends its elements while the connection accepts them, so a slow reader blocks it. It keeps no
state: if its connection breaks, another worker continues from the first element that didn't arrive.

Messages are small values and arrays, over TCP. Both sides prove that they know the same key, and sign each
message (`gmeta.core.collectives.wire.SignedLink`). Reading a message runs no code
(`gmeta.core.collectives.wire.pack`), with one exception: the function is a pickle, the only one that is sent.
It is read only from a connection whose other side has proved that it knows the key, and signs what it sends.
If a machine vanishes, the kernel makes a read fail within 20 s. A killed process closes its connections
immediately.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import pickle
import secrets
import socket
import stat
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from gmeta.core.collectives.wire import Callers, SignedLink, name_loopback, pack_parts, unpack
from gmeta.core.errors import CollectiveError, ConfigError
from gmeta.core.native import load_op_library
from gmeta.core.settings import from_mapping
from gmeta.core.version import __version__
from gmeta.io.readers.read_options import OneEpoch

_PURPOSE = b"gmeta workers"
_GREETING_SECONDS = 10.0
# Linux' names; other systems have their own keepalive times.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_NODELAY": 1}


class Channel:
    """A connection whose other side knows the key.

    Args:
      link: A connected socket; the channel closes it.
      key: The key.
      server: Whether this side accepted the connection.
      identity: The identity of this side, 16 bytes, if it is the server.
      expected: The allowed identities of the server, if this side is the client; empty: any worker that knows
        the key.

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
        """Send a message of values that `wire.pack` supports; wait while the other side doesn't read."""
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
        """End the connection, from any thread: threads that wait for it raise an error."""
        self._link.hang_up()

    def close(self) -> None:
        """Close the connection, from the thread that uses it."""
        self._link.close()


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``"host:port"``.

    Raises:
      ConfigError: The text has another form.
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
    """The announcement of a worker.

    Attributes:
      address: ``"host:port"``.
      identity: 16 bytes by which the worker proves that it is this one.
      unusable: Why it can't be reached from here; "" if it may be reachable.
    """

    address: str
    identity: bytes
    unusable: str = ""


def announce(folder: Path, address: str, identity: bytes, *, loopback: bool) -> Path:
    """Announce a worker at an address, ``"host:port"``; return the file, to be removed at the end."""
    path = folder / f"{address.replace(':', '-')}-{identity.hex()[:8]}{_SUFFIX}"
    beside = path.with_suffix(".new")
    told = {"address": address, "identity": identity.hex(), "loopback": name_loopback() if loopback else []}
    beside.write_text(json.dumps(told))
    beside.replace(path)
    return path


def announced(folder: Path) -> list[Announcement]:
    """Return the announced workers, in order, without withdrawn announcements."""
    found, here = [], list(name_loopback())
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        with contextlib.suppress(FileNotFoundError):  # just withdrawn
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
    """Return the key: that of `KEY` if it is set, otherwise that of the folder, created if missing.

    Only the folder's owner can read a created key. Anyone who knows it can run any program on workers.

    Raises:
      ConfigError: There is no folder, and the variable isn't set; or the key is too short, or users other
        than its owner and its group can read or replace it.
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
        with contextlib.suppress(FileExistsError):  # another process was first
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


_ASKING_SECONDS = 60.0
_MOST_CALLERS = 64  # that haven't yet proved that they know the key


class WorkerServer:
    """A listening worker.

    Args:
      host: The address to listen on; ``"0.0.0.0"`` or ``"::"`` for all addresses of this machine.
      port: The port; 0 for any free port.
      key: The key that callers must know (`key_of`).
      folder: Where the worker announces itself while it listens; None: it doesn't.

    Attributes:
      address: ``"host:port"``, for callers.
      pieces: Number of pieces that were read or started.
      elements: Number of elements that were sent.

    Raises:
      OSError: The port is taken, or the host isn't this machine's.
    """

    def __init__(self, host: str, port: int, key: bytes, folder: Path | None = None) -> None:
        load_op_library("io")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self._listener.settimeout(0.2)
        bound, port = self._listener.getsockname()[:2]
        where = ipaddress.ip_address(bound)
        name = socket.gethostname() if where.is_unspecified else f"[{host}]" if ":" in host else host
        self.address = f"{name}:{port}"
        self.pieces = self.elements = 0
        self._closed = False
        self._key, self._identity = key, secrets.token_bytes(16)
        self._functions: dict[str, Any] = {}
        self._callers = Callers(_MOST_CALLERS)
        self._channels: set[Channel] = set()
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._leaves = threading.Event()
        self._announcement = (
            None
            if folder is None
            else announce(folder, self.address, self._identity, loopback=where.is_loopback)
        )

    def serve(self, idle: float | None = None) -> None:
        """Serve until a training process dismisses this worker, or none has read for ``idle`` seconds."""
        used = time.monotonic()
        while True:
            if self._channels:
                used = time.monotonic()
            elif self._leaves.is_set() or (idle is not None and time.monotonic() - used > idle):
                return
            try:
                link, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._closed:
                    return
                raise
            self._callers.admit(link)
            thread = threading.Thread(target=self._answer, args=(link,), daemon=True)
            with self._lock:  # `close` joins the threads in the set, which must have started
                thread.start()
                self._threads.add(thread)

    def close(self) -> None:
        """Stop listening, and end running transfers; wait at most 5 s for datasets that are slow to end."""
        self._withdraw()
        self._closed = True
        self._listener.close()
        with self._lock:
            channels, threads = list(self._channels), list(self._threads)
        for channel in channels:
            channel.hang_up()
        until = time.monotonic() + 5
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _withdraw(self) -> None:
        if self._announcement is not None:
            self._announcement.unlink(missing_ok=True)

    def _answer(self, link: socket.socket) -> None:
        try:
            try:
                channel = Channel(link, self._key, server=True, identity=self._identity)
            finally:
                self._callers.leave(link)
            with self._lock:
                self._channels.add(channel)
            try:
                self._hear(channel)
            finally:
                with self._lock:
                    self._channels.discard(channel)
                channel.close()
        except (OSError, EOFError):
            pass  # the caller is gone or lacks the key; missing elements are requested again
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _hear(self, channel: Channel) -> None:
        """Serve requests, one after another."""
        asked = channel.receive(_ASKING_SECONDS)
        while True:
            version, what, *given = asked
            if version != __version__:
                channel.send(("error", f"the worker {self.address} runs gmeta {__version__}, not {version}"))
            elif what == "read":
                start = from_mapping(OneEpoch, given[1])
                for message in self._messages(self._function(channel, given[0]), start):
                    channel.send(message)
            elif what == "leave":
                self._withdraw()
                self._leaves.set()
            else:
                channel.send(("hello",))
            asked = channel.receive()

    def _function(self, channel: Channel, digest: str) -> Any:
        """Return the function with this digest, or the error that it raised; request it the first time."""
        if digest not in self._functions:
            channel.send(("function",))
            sent = channel.receive(_ASKING_SECONDS)
            try:
                if digest_of(sent) != digest:
                    raise ValueError("another function came than the one that was named")
                self._functions[digest] = pickle.loads(sent)
            except Exception as error:  # such as a missing module
                return error
        return self._functions[digest]

    def _messages(self, function: Any, start: Any) -> Iterator[tuple[Any, ...]]:
        with self._lock:
            self.pieces += 1
        began = time.monotonic()
        try:
            if isinstance(function, Exception):
                raise function
            for element in function(start):
                parts = [encode(tensor) for tensor in tf.nest.flatten(element, expand_composites=True)]
                yield "element", time.monotonic() - began, parts
                began = time.monotonic()
                with self._lock:
                    self.elements += 1
        except Exception as error:  # any error of a user's function goes to the training process
            yield "error", f"{type(error).__name__}: {getattr(error, 'message', error)}"
        else:
            yield ("end",)


def encode(tensor: tf.Tensor) -> Any:
    """Encode a tensor for a message: an array of numbers, or (type, TensorProto) for other types."""
    if np.dtype(tensor.dtype.as_numpy_dtype).kind in "biufc":
        return np.asarray(tensor.numpy())
    return tensor.dtype.name, tf.io.serialize_tensor(tensor).numpy()


def decode(part: Any) -> Any:
    """Return the array of a tensor that `encode` encoded."""
    return part if isinstance(part, np.ndarray) else tf.io.parse_tensor(part[1], part[0]).numpy()


def digest_of(function: bytes) -> str:
    """Return the name by which a worker identifies a function that it received."""
    return hashlib.sha256(function).hexdigest()

"""Messages between processes: values encoded as bytes, and links between processes that know the same secret.

`pack` encodes a value as JSON followed by the bytes of arrays. Reading a message runs no code. A message is
eight bytes with the length of the JSON, the JSON, and the arrays' bytes, each starting at a multiple of
eight. A value that JSON can't represent is an object with the key ``!``: a tuple, a mapping whose keys aren't
strings, bytes, an array, or a class of `gmeta.core.errors`.

A `SignedLink` begins with a greeting, in which two processes prove to each other that they know a secret::

    caller -> called    hello: the protocol's name and version, a nonce, and who it is
    called -> caller    its own hello
    caller -> called    HMAC-SHA256 of "caller", the purpose and both hellos under the secret
    called -> caller    HMAC-SHA256 of "called", the purpose and both hellos

The secret isn't sent. The nonces are new in each greeting, so a captured greeting can't be replayed. Proofs
contain the role, so none can be sent back to its sender. They also contain the purpose, so a secret may serve
several purposes. The called side proves nothing before the caller does.

Both sides derive a key for each direction from the secret and the whole greeting. A message is

    its size, and a signature of its number and its size; its bytes; a signature of its number and its bytes

so a process that forwards the connection can't insert, change, repeat, omit or reorder messages, and a
forged size reserves no memory. Messages aren't encrypted. A link interprets nothing that it receives.

Lanes use the same greeting (``ops/lane/mesh.h``), but don't sign their messages. Requests to the launcher's
store are signed individually (`gmeta.core.collectives.rendezvous`).
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import platform
import secrets
import socket
import struct
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.core import errors
from gmeta.core.errors import CollectiveError, ConfigError, GmetaError

_TAG = "!"
_ALIGNED = 8
_FEW = 1 << 12  # bytes of an array up to which it is copied


def pack(value: Any) -> bytes:
    """Encode a value as bytes.

    Args:
      value: None, booleans, numbers, texts, bytes, NumPy arrays and numbers, classes of gmeta's errors, and
        lists, tuples and dicts of them.

    Raises:
      ConfigError: The value holds something else.

    Example:
      >>> unpack(pack({"rank": 1, "rows": (2, b"x")}))
      {'rank': 1, 'rows': (2, b'x')}
    """
    return b"".join(pack_parts(value))


def pack_parts(value: Any) -> list[bytes | memoryview]:
    """Encode a value like `pack`, but without copying large arrays: return the parts of the bytes."""
    blobs = _Blobs()
    text = json.dumps(_plain(value, blobs)).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return [len(text).to_bytes(8, "little") + text, *blobs.parts]


def unpack(data: bytes | memoryview) -> Any:
    """Decode the result of `pack`. Arrays share the given memory if it is writable.

    Raises:
      CollectiveError: The bytes aren't such a message.
    """
    try:
        end = 8 + int.from_bytes(data[:8], "little")
        if end > len(data):
            raise ValueError("they are cut")
        return _value(json.loads(bytes(data[8:end])), memoryview(data)[end:])
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CollectiveError(
            f"{len(data)} bytes from another process aren't gmeta's message: {error}; see that all of them "
            "run the same gmeta"
        ) from error


class _Blobs:
    """The concatenated bytes of arrays."""

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []
        self._size = 0

    def add(self, data: bytes | memoryview) -> dict[str, int]:
        begin, padding = self._size, -len(data) % _ALIGNED
        self.parts += [data, bytes(padding)] if padding else [data]
        self._size += len(data) + padding
        return {"begin": begin, "size": len(data)}


def _plain(value: Any, blobs: _Blobs) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_plain(each, blobs) for each in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "of": [_plain(each, blobs) for each in value]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: _plain(each, blobs) for key, each in value.items()}
        return {_TAG: "dict", "of": [[_plain(k, blobs), _plain(v, blobs)] for k, v in value.items()]}
    if isinstance(value, bytes):
        return {_TAG: "bytes", **blobs.add(value)}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject and value.dtype.names is None:
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {_TAG: kind, "dtype": value.dtype.str, "shape": value.shape, **blobs.add(_bytes_of(value))}
    if isinstance(value, type) and issubclass(value, GmetaError):
        known = next(each for each in value.__mro__ if getattr(errors, each.__name__, None) is each)
        return {_TAG: "error", "of": known.__name__}
    raise ConfigError(
        f"a {type(value).__name__} can't be sent to another process: send numbers, texts, bytes, arrays, and "
        "lists, tuples and dicts of them"
    )


def _bytes_of(value: Any) -> bytes | memoryview:
    if value.nbytes < _FEW:
        return bytes(value.tobytes())
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def _value(plain: Any, data: memoryview) -> Any:
    if isinstance(plain, list):
        return [_value(each, data) for each in plain]
    if not isinstance(plain, dict):
        return plain
    match plain.get(_TAG):
        case None:
            return {key: _value(each, data) for key, each in plain.items()}
        case "tuple":
            return tuple(_value(each, data) for each in plain["of"])
        case "dict":
            return {_value(key, data): _value(each, data) for key, each in plain["of"]}
        case "bytes":
            return bytes(_part(plain, data))
        case "array" | "number" as kind:
            array = np.frombuffer(_part(plain, data), np.dtype(str(plain["dtype"]))).reshape(plain["shape"])
            return array[()] if kind == "number" else array if array.flags.writeable else array.copy()
        case "error":
            found = getattr(errors, plain["of"])
            if isinstance(found, type) and issubclass(found, GmetaError):
                return found
    raise ValueError(f"an object of the kind {plain[_TAG]!r}")


def _part(plain: dict[str, Any], data: memoryview) -> memoryview:
    part = data[plain["begin"] : plain["begin"] + plain["size"]]
    if plain["begin"] < 0 or len(part) != plain["size"]:
        raise ValueError("an array's bytes are cut")
    return part


# The address on which a rank listens for the others, and the address at which they reach it.

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_IPV6 = Path("/proc/net/if_inet6")
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


def name_machine() -> tuple[str, str]:
    """Return a name of this machine: two processes with equal names share it."""
    return platform.node(), _BOOT.read_text().strip() if _BOOT.exists() else ""


def name_loopback() -> tuple[str, ...]:
    """Return a name of the owner of this process's loopback address: a machine, or a container on it."""
    return (*name_machine(), str(_NETWORK.readlink()) if _NETWORK.exists() else "")


def choose_addresses(local: bool) -> tuple[str, str]:
    """Choose the address to listen on, and the one to announce.

    Args:
      local: Whether all ranks have the same loopback address.

    Raises:
      ConfigError: ``HOROVOD_GLOO_IFACE`` names an interface without an address.
    """
    if local:
        return "127.0.0.1", "127.0.0.1"
    interface = os.environ.get("HOROVOD_GLOO_IFACE")
    if not interface:
        return "::" if socket.has_dualstack_ipv6() else "0.0.0.0", platform.node()
    address = _ipv4(interface) or _ipv6(interface)
    if address is None:
        raise ConfigError(
            f"HOROVOD_GLOO_IFACE={interface!r} on {platform.node()} has no address: name an interface that "
            "has one, or set GMETA_LANE=horovod"
        )
    return address, address


def _ipv4(interface: str) -> str | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF_INTERFACE, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6(interface: str) -> str | None:
    """Return an address of an interface that other machines can use without naming their own interface."""
    for line in _IPV6.read_text().splitlines() if _IPV6.exists() else []:
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope != "20":  # 20: link-local
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return None


_MAGIC = b"gmeta greeting 1"
_NONCE, _NAME, _SIGNATURE = 32, 16, 32  # bytes
_HEAD = struct.Struct(f"<Q{_SIGNATURE}s")
_HELLO = len(_MAGIC) + _NONCE + _NAME


def sign(key: bytes, *parts: bytes) -> bytes:
    """Sign a message of parts, HMAC-SHA256, so that no bytes can move from one part into the next.

    Example:
      >>> sign(b"key", b"ab", b"c") == sign(b"key", b"a", b"bc")
      False
    """
    message = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(key, message, "sha256")


class SignedLink:
    """A connection whose other side has proved that it knows the secret.

    Args:
      link: A connected socket. It is closed if the greeting fails.
      secret: The secret.
      purpose: The purpose of the connection, equal on both sides.
      called: Whether this side accepted the connection.
      name: This side's name, 16 bytes, if it accepted the connection.
      expected: The expected name of the called side, if this side is the caller; empty: any that knows the
        secret.
      seconds: The time limit of the whole greeting.

    Raises:
      ConnectionError: The other side doesn't greet, doesn't know the secret, or isn't the expected one.
      OSError: The connection failed.
    """

    def __init__(
        self,
        link: socket.socket,
        secret: bytes,
        purpose: bytes,
        *,
        called: bool,
        name: bytes = b"",
        expected: Collection[bytes] = (),
        seconds: float = 10.0,
    ) -> None:
        self._link, self._sent, self._received = link, 0, 0
        try:
            greeting = self._greet(secret, purpose, called, name, expected, time.monotonic() + seconds)
            link.settimeout(None)
        except BaseException:
            link.close()
            raise
        keys = [sign(secret, side, purpose, greeting) for side in (b"from caller", b"from called")]
        self._own, self._other = keys[::-1] if called else keys

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send a message made of parts; wait while the other side doesn't read.

        Raises:
          OSError: The other side is gone.
        """
        number, size = self._sent.to_bytes(8, "little"), sum(map(len, parts))
        self._sent += 1
        signed = hmac.new(self._own, b"body" + number, hashlib.sha256)
        for part in parts:
            signed.update(part)
        head = _HEAD.pack(size, _head_signature(self._own, number, size))
        self._link.settimeout(None)
        every = [head, *parts, signed.digest()]
        for part in [b"".join(every)] if size < _SMALL else every:
            self._link.sendall(part)

    def receive(self, timeout: float | None = None) -> memoryview:
        """Return the next message, in newly allocated memory.

        Args:
          timeout: The longest silence, in seconds; None: no limit.

        Raises:
          TimeoutError: Nothing arrived within ``timeout``.
          EOFError: The other side has ended the connection.
          ConnectionError: The received bytes aren't the other side's next message.
          OSError: The connection failed.
        """
        self._link.settimeout(timeout)
        number = self._received.to_bytes(8, "little")
        head = bytearray(_HEAD.size)
        self._fill(memoryview(head), may_end=True)
        size, signature = _HEAD.unpack(head)
        if not hmac.compare_digest(signature, _head_signature(self._other, number, size)):
            raise ConnectionError(_FORGED)
        message = np.empty(size + _SIGNATURE, np.uint8).data
        self._fill(message)
        signed = hmac.new(self._other, b"body" + number, hashlib.sha256)
        signed.update(message[:size])
        if not hmac.compare_digest(bytes(message[size:]), signed.digest()):
            raise ConnectionError(_FORGED)
        self._received += 1
        return message[:size]

    def hang_up(self) -> None:
        """End the connection, from any thread: threads that wait for it raise an error."""
        with suppress(OSError):  # it has already ended
            self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, from the thread that uses it."""
        self.hang_up()
        self._link.close()

    def _greet(
        self,
        secret: bytes,
        purpose: bytes,
        called: bool,
        name: bytes,
        expected: Collection[bytes],
        deadline: float,
    ) -> bytes:
        """Exchange hellos and proofs; return the hellos, the caller's first."""
        own, other = _MAGIC + secrets.token_bytes(_NONCE), bytearray(_HELLO)
        own += name.ljust(_NAME, b"\0")
        proof = bytearray(_SIGNATURE)

        def prove(side: bytes) -> bytes:
            return sign(secret, side, purpose, hellos)

        def take(into: bytearray) -> None:
            self._fill(memoryview(into), deadline=deadline)

        def say(what: bytes) -> None:
            self._link.settimeout(max(deadline - time.monotonic(), 0.001))
            self._link.sendall(what)

        try:
            if called:
                take(other)
                if not other.startswith(_MAGIC):
                    raise ConnectionError(_STRANGER)
                say(own)
                hellos = bytes(other) + own
                take(proof)
                if not hmac.compare_digest(proof, prove(b"caller")):
                    raise ConnectionError(_OTHER_SECRET)
                say(prove(b"called"))
                return hellos
            say(own)
            take(other)
            if not other.startswith(_MAGIC):
                raise ConnectionError(_STRANGER)
            if expected and bytes(other[-_NAME:]) not in expected:
                raise ConnectionError("it isn't the one that was announced here, which has ended")
            hellos = own + bytes(other)
            say(prove(b"caller"))
            try:
                take(proof)
            except (EOFError, ConnectionResetError, BrokenPipeError) as error:
                raise ConnectionError(_OTHER_SECRET) from error
            if not hmac.compare_digest(proof, prove(b"called")):
                raise ConnectionError(_OTHER_SECRET)
            return hellos
        except TimeoutError as error:
            raise ConnectionError(_SILENT) from error
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            raise ConnectionError(_STRANGER) from error

    def _fill(self, into: memoryview, *, deadline: float | None = None, may_end: bool = False) -> None:
        """Fill the buffer with received bytes, until the deadline if there is one."""
        done = 0
        while done < len(into):
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self._link.settimeout(left)
            got = self._link.recv_into(into[done:])
            if not got:
                said = "" if may_end and not done else "it ended the connection in the middle of a message"
                raise EOFError(said)
            done += got


class Callers:
    """The connections that haven't yet proved anything, up to a maximum; another one ends the oldest.

    A process that knows the secret proves it quickly, so connections that remain belong to strangers.

    Args:
      most: The maximum number of connections.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._links: dict[socket.socket, None] = {}

    def admit(self, link: socket.socket) -> None:
        """Count a new connection, and end the oldest if there are too many."""
        with self._lock:
            oldest = next(iter(self._links)) if len(self._links) >= self._most else None
            if oldest is not None:
                del self._links[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._links[link] = None

    def leave(self, link: socket.socket) -> None:
        """Stop counting a connection."""
        with self._lock:
            self._links.pop(link, None)


_SMALL = 1 << 16  # bytes up to which a message is copied into one buffer and sent at once
_STRANGER = "it doesn't greet like a process of this gmeta"
_SILENT = "it doesn't greet: something else listens there, or it hangs"
_OTHER_SECRET = "it has another key"
_FORGED = "what it sent isn't signed by it: someone changes the connection"


def _head_signature(key: bytes, number: bytes, size: int) -> bytes:
    return hmac.digest(key, b"head" + number + size.to_bytes(8, "little"), "sha256")

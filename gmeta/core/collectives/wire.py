"""Encodes messages between processes as JSON followed by the bytes of arrays. Reading a message runs no code.

A message is eight bytes with the length of the JSON, the JSON, and the arrays' bytes one after another, each
at a multiple of eight. A value that JSON can't express is an object with the key ``!``: a tuple, a mapping
whose keys aren't texts, bytes, an array, and a class of `gmeta.core.errors`.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.core import errors
from gmeta.core.errors import CollectiveError, ConfigError, GmetaError

_TAG = "!"
_ALIGNED = 8
_FEW = 1 << 12  # bytes of an array that are rather copied


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
    """Encode a value as `pack` does, but don't copy large arrays: return the parts of the bytes."""
    blobs = _Blobs()
    text = json.dumps(_plain(value, blobs)).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return [len(text).to_bytes(8, "little") + text, *blobs.parts]


def unpack(data: bytes | memoryview) -> Any:
    """Decode what `pack` has encoded. Arrays lie in the given memory if it can be written to.

    Raises:
      CollectiveError: The bytes are no such message.
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
    """The bytes of arrays, one after another."""

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


# The address at which a rank listens for the others, and that at which they reach it.

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_IPV6 = Path("/proc/net/if_inet6")
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


def name_machine() -> tuple[str, str]:
    """Name this machine: two processes with equal names share it."""
    return platform.node(), _BOOT.read_text().strip() if _BOOT.exists() else ""


def name_loopback() -> tuple[str, ...]:
    """Name the owner of this process's loopback address: a machine, or one of the containers on it."""
    return (*name_machine(), str(_NETWORK.readlink()) if _NETWORK.exists() else "")


def choose_addresses(local: bool) -> tuple[str, str]:
    """Choose the address to listen at, and the one to announce.

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
        if name == interface and scope != "20":  # 20: of the link alone
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return None

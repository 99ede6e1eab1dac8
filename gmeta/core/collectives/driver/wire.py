"""Encodes messages between processes as JSON followed by the bytes of arrays. Reading a message runs no code.

A message is eight bytes with the length of the JSON, the JSON, and the arrays' bytes one after another, each
at a multiple of eight. A value that JSON can't express is an object with the key ``!``: a tuple, a mapping
whose keys aren't texts, bytes, an array, and a class of `gmeta.core.errors`.
"""

from __future__ import annotations

import json
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
            f"{len(data)} bytes from another process aren't what gmeta sends: {error}; see that all of them "
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

"""The native part of histories (``io/history``), behind ctypes."""

from __future__ import annotations

import ctypes
import functools

from gmeta.core.native import FunctionTypes, load_functions

_POINTER, _NUMBER, _FAULT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_SIGNATURES: FunctionTypes = {
    "buffer_new": (_POINTER, []),
    "buffer_free": (None, [_POINTER]),
    "encode": (_POINTER, [_POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER, _POINTER]),
    "open": (_FAULT, [ctypes.c_char_p, _NUMBER, _POINTER, _POINTER, _POINTER]),
    "read": (_FAULT, [ctypes.c_char_p, _NUMBER, _NUMBER, _POINTER, _POINTER, _POINTER]),
    "reader_new": (_POINTER, []),
    "reader_free": (None, [_POINTER]),
    "reader_file": (_FAULT, [_POINTER, _NUMBER, ctypes.c_char_p]),
    "index_decode": (_FAULT, [_POINTER, ctypes.c_char_p, _NUMBER]),
    "index_encode": (_POINTER, [_POINTER, _NUMBER, *([_POINTER] * 5)]),
    "index_users": (_NUMBER, [_POINTER]),
    "index_stripes": (_NUMBER, [_POINTER]),
    "index_copy": (None, [_POINTER] * 5),
    "scan": (
        _FAULT,
        [_POINTER, *(_NUMBER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER), *([_POINTER] * 4)],
    ),
    "crc": (None, [_NUMBER, _POINTER, _FAULT, _POINTER, _POINTER]),
    "describe_stripe": (ctypes.c_char_p, [_FAULT]),
    "describe_index": (ctypes.c_char_p, [_FAULT]),
}


@functools.cache
def history_library() -> ctypes.CDLL:
    """Load the library, and state the types of its functions, ``gmeta_history_*``.

    Raises:
      NativeLibraryError: It was never built, or is of another version.
    """
    return load_functions("records", "gmeta_history_", _SIGNATURES)


def describe_fault(of: str, fault: int) -> str:
    """Return words for the native fault of a ``"stripe"`` or an ``"index"``."""
    words: bytes = getattr(history_library(), f"gmeta_history_describe_{of}")(fault)
    return words.decode()

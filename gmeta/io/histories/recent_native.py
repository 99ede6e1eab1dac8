"""The native part of recent histories (``io/history/recent_c_api.cc``), called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from pathlib import Path
from typing import Any

from gmeta.core.errors import DataError, GmetaError
from gmeta.core.history_manifest import HistoryManifest, generation_folder, read_index, shard_files
from gmeta.core.native import FunctionTypes, load_functions

_FULL, _NOT_FINITE, _TOO_LATE = -2, -3, -4  # results beside -1, and the numbers of system errors

SIZES = ctypes.c_int64 * 12
"""The result of a snapshot: the events of histories and of tails, and the reader; or the request of a fault,
the generation, 0, and the stripe: its group, file, offset, bytes, and more."""

_POINTER, _NUMBER, _FAULT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_RECENT: FunctionTypes = {
    "new": (_POINTER, [_NUMBER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER, _NUMBER, _NUMBER]),
    "free": (None, [_POINTER]),
    "append": (_FAULT, [_POINTER, _NUMBER, _POINTER]),
    "seal": (_FAULT, [_POINTER, ctypes.c_char_p, _FAULT, _POINTER, _POINTER]),
    "sync": (_FAULT, [_POINTER]),
    "replay": (_FAULT, [_POINTER, ctypes.c_char_p, _NUMBER, _POINTER]),
    "export": (_NUMBER, [_POINTER, _NUMBER, _NUMBER, _POINTER]),
    "events": (_NUMBER, [_POINTER]),
    "bytes": (_NUMBER, [_POINTER]),
    "generation_new": (_POINTER, [_NUMBER]),
    "generation_free": (None, [_POINTER]),
    "generation_shard": (_FAULT, [_POINTER, ctypes.c_char_p, _NUMBER]),
    "generation_file": (_FAULT, [_POINTER, _NUMBER, ctypes.c_char_p]),
    "switch": (_FAULT, [_POINTER, _POINTER, _NUMBER, _POINTER]),
    "snapshot": (_FAULT, [_POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER]),
    "take": (None, [_POINTER, _NUMBER, _POINTER]),
}
_DESCRIBE: FunctionTypes = {
    "describe_stripe": (ctypes.c_char_p, [_FAULT]),
    "describe_index": (ctypes.c_char_p, [_FAULT]),
}


@functools.cache
def recent_library() -> ctypes.CDLL:
    """Load the library, and declare the types of its functions, ``gmeta_recent_*``.

    Raises:
      NativeLibraryError: It was never built, or is of another version.
    """
    load_functions("records", "gmeta_history_", _DESCRIBE)
    return load_functions("records", "gmeta_recent_", _RECENT)


def describe_fault(of: str, fault: int) -> str:
    """Describe the native fault of a ``"stripe"`` or an ``"index"``."""
    library = load_functions("records", "gmeta_history_", _DESCRIBE)
    words: bytes = getattr(library, f"gmeta_history_describe_{of}")(fault)
    return words.decode()


def need(given: object) -> None:
    """Refuse a result that stands for exhausted memory.

    Raises:
      MemoryError: The result is 0, False or None.
    """
    if not given:
        raise MemoryError("no memory for recent events")


def refuse(failure: int, handle: int) -> None:
    """Raise the error of the result of a native function of some recent events, unless it is 0.

    Raises:
      DataError: An event has a value that no store takes.
      GmetaError: The events take all their memory, or the journal can't be written.
      MemoryError: Memory is exhausted.
    """
    if failure > 0:
        raise GmetaError(f"can't write the journal of recent events: {os.strerror(failure)}")
    if failure == _FULL:
        library = recent_library()
        events, taken = library.gmeta_recent_events(handle), library.gmeta_recent_bytes(handle)
        raise GmetaError(
            f"{events:,} recent events take {taken:,} bytes, the memory_limit: drain them, append the files "
            "to the store, and refresh, or raise the limit"
        )
    if failure == _NOT_FINITE:
        raise DataError("a number of an event is NaN or infinite in float32: leave the event out")
    if failure == _TOO_LATE:
        raise DataError(f"the time of an event must be below {2**63 - 1}: leave the event out")
    need(not failure)


def open_generation(store: Path, manifest: HistoryManifest) -> int:
    """Load all indexes of a generation.

    Returns:
      The native handle, which ``gmeta_recent_switch`` takes.

    Raises:
      DataError: An index is damaged.
    """
    library = recent_library()
    opened: int = library.gmeta_recent_generation_new(manifest.generation)
    need(opened)
    try:
        for shard in range(len(manifest.shards)):
            index = read_index(store, manifest, shard)
            fault = library.gmeta_recent_generation_shard(opened, index, len(index))
            need(fault >= 0)
            if fault:
                path = shard_files(generation_folder(store, manifest.generation), shard)[1]
                raise DataError(
                    describe_fault("index", fault),
                    path=path,
                    advice="restore the file, or drop this generation",
                )
            for number in manifest.reads:
                path = shard_files(generation_folder(store, number), shard)[0]
                need(library.gmeta_recent_generation_file(opened, number, os.fsencode(path)) >= 0)
    except BaseException:
        library.gmeta_recent_generation_free(opened)
        raise
    return opened


class Flusher:
    """Frees a native handle when its owner is gone, and until then flushes its log now and then.

    Args:
      owner: The Python object that uses the handle.
      handle: The handle.
    """

    def __init__(self, owner: Any, handle: int) -> None:
        self._handle, self._stop = handle, threading.Event()
        self._thread: threading.Thread | None = None
        weakref.finalize(owner, self._end)

    def start(self, seconds: float) -> None:
        """Flush the log each so many seconds; a failure is the error of the next append."""

        def flush() -> None:
            while not self._stop.wait(seconds):
                recent_library().gmeta_recent_sync(self._handle)

        self._thread = threading.Thread(target=flush, name="gmeta-recent-flush", daemon=True)
        self._thread.start()

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        recent_library().gmeta_recent_free(self._handle)

"""The segments of recent events, and the generation of the store that is read together with them.

Their native part (``io/history/recent_c_api.cc``) is called through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import warnings
import weakref
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.core.event_file import EventForm, read_events
from gmeta.core.history_manifest import (
    HistoryManifest,
    dropped_inputs,
    dropping,
    folder_numbers,
    generation_folder,
    newest_generation,
    read_index,
    shard_files,
)
from gmeta.core.native import FunctionTypes, load_functions
from gmeta.io.histories.recent_journal import Journal, Segment, digest_of

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


class Segments:
    """Recent events in segments, each of which is in memory until the store contains it.

    Args:
      store: The store's folder.
      manifest: The manifest of its newest generation.
      read: The columns that are read.
      handle: The native recent events, which are empty.
      journal: The journal, from which they are restored; it is closed if this fails.
      always: Whether each append is flushed to the drive.

    Attributes:
      generation: The number of the generation that snapshots read.
      shards: The number of its shards.

    Raises:
      DataError: The store or the journal is damaged.
      GmetaError: The journal can't be written, or has more events than fit.
    """

    def __init__(
        self,
        store: Path,
        manifest: HistoryManifest,
        read: Sequence[str],
        handle: int,
        journal: Journal,
        *,
        always: bool,
    ) -> None:
        self._store, self._handle, self._journal, self._always = store, handle, journal, always
        self._form, self._read, self._found = EventForm.of(manifest), read, manifest.find(read)
        self._library, self._changes, self._closed = recent_library(), threading.Lock(), False
        self._segments: list[Segment] = []
        self._contained: list[tuple[int, int]] = []  # sequence numbers of events that the generation has
        self._inputs: dict[int, Collection[str]] = {}  # generation -> the digests of its files
        self.generation = self.shards = 0
        try:
            self._restore(self._open_newest())
        except BaseException:
            journal.close()
            raise

    def drain(self, folder: Path) -> list[Path]:
        """Write the segments that the store lacks into files, as `RecentHistories.drain` describes."""
        with self._changes:
            if self._closed:
                raise GmetaError("drain: these recent histories are closed")
            self._refresh()
            self._seal()
            files = []
            for segment in self._segments:
                words = None if self._journal.has_file(segment.number) else self._export(segment)
                files.append(self._journal.copy(segment, words, folder))
            return files

    def refresh(self) -> int:
        """Read the newest generation, and remove the segments that it contains; return its number."""
        with self._changes:
            self._refresh()
            return self.generation

    def close(self) -> None:
        """Release the journal; the segments stay."""
        with self._changes:
            self._closed = True
            self._journal.close()

    def _restore(self, digests: Collection[str]) -> None:
        """Restore the journal's segments that the store lacks, and begin another one."""
        numbers = self._journal.numbers()
        for number in numbers:
            if self._journal.file(number).exists():
                self._restore_file(number, digests)
            else:
                self._restore_log(number, is_last=number == numbers[-1])
        log = self._journal.new_log(self._next_number(numbers))
        self._refuse(self._seal_into(log)[0])
        self._number = self._next_number(numbers)

    def _restore_file(self, number: int, digests: Collection[str]) -> None:
        path = self._journal.file(number)
        self._journal.log(number).unlink(missing_ok=True)
        if (digest := digest_of(path)) in digests:
            self._journal.remove(number)
            return
        rows = read_events(path)
        self._refuse(self._library.gmeta_recent_append(self._handle, len(rows), rows.ctypes.data))
        self._segments.append(Segment(number, *self._seal_into(None)[1], digest))

    def _restore_log(self, number: int, *, is_last: bool) -> None:
        path, end = self._journal.log(number), ctypes.c_int64()
        replay = self._library.gmeta_recent_replay
        self._refuse(replay(self._handle, os.fsencode(path), 0, ctypes.byref(end)))
        if torn := path.stat().st_size - end.value:
            if not is_last:
                raise DataError(
                    "a record doesn't match its checksum, and a later segment exists",
                    path=path,
                    offset=end.value,
                    advice="restore the file, or truncate it there, which loses the events after it",
                )
            warnings.warn(
                f"{path}: the last {torn:,} bytes are incomplete and were cut off: the machine stopped "
                "before they were flushed",
                stacklevel=5,
            )
            os.truncate(path, end.value)
        begin, after = self._seal_into(None)[1]
        if begin < after:
            self._segments.append(Segment(number, begin, after))
        else:
            self._journal.remove(number)

    @staticmethod
    def _next_number(numbers: Sequence[int]) -> int:
        return max(numbers, default=0) + 1

    def _seal(self) -> None:
        """End the segment, unless it is empty, and begin the next one."""
        log = self._journal.new_log(self._number + 1)
        failure, (begin, end) = self._seal_into(log)
        if begin < end:
            self._segments.append(Segment(self._number, begin, end))
        else:
            self._journal.remove(self._number)
        self._number += 1
        self._refuse(failure)

    def _seal_into(self, log: Path | None) -> tuple[int, tuple[int, int]]:
        """End the segment; return the failure of its flush, and its sequence numbers."""
        found, is_sealed = (ctypes.c_int64 * 2)(), ctypes.c_int32()
        path = None if log is None else os.fsencode(log)
        failure = self._library.gmeta_recent_seal(
            self._handle, path, self._always, found, ctypes.byref(is_sealed)
        )
        if not is_sealed.value:
            self._refuse(failure)
        return failure, (found[0], found[1])

    def _export(self, segment: Segment) -> NDArray[np.int64]:
        """Return the events of a segment, as `write_events` takes them."""
        words = np.empty((segment.end - segment.begin, len(self._form.words)), np.int64)
        ends = (segment.begin, segment.end)
        found = self._library.gmeta_recent_export(self._handle, *ends, words.ctypes.data)
        need(found >= 0)
        return words[:found]  # fewer if the journal couldn't be flushed for an append

    def _refuse(self, failure: int) -> None:
        refuse(failure, self._handle)

    def _refresh(self) -> None:
        if newest_generation(self._store) != self.generation:
            self._open_newest()

    def _open_newest(self) -> Collection[str]:
        """Make snapshots read the newest generation; return the digests of the files that it contains."""
        while True:
            newest = newest_generation(self._store)
            manifest, digests = HistoryManifest.load(self._store, newest), self._digests(newest)
            if newest_generation(self._store) == newest:
                break
        if (form := EventForm.of(manifest)) != self._form or manifest.find(self._read) != self._found:
            raise ConfigError(
                f"the columns of {self._store} have changed with generation {newest}: "
                f"{', '.join(column.name for column in form.words)}; make these recent histories anew, with "
                "another journal"
            )
        done = [each for each in self._segments if each.digest in digests]
        contained = _join([*self._contained, *((each.begin, each.end) for each in done)])
        ranges = np.array(contained, np.int64).reshape(-1, 2)
        opened = open_generation(self._store, manifest)
        self._refuse(self._library.gmeta_recent_switch(self._handle, opened, len(ranges), ranges.ctypes.data))
        self.generation, self._contained, self.shards = newest, contained, len(manifest.shards)
        self._segments = [each for each in self._segments if each not in done]
        for each in done:
            if not self._closed:
                self._journal.remove(each.number)
        return digests

    def _digests(self, newest: int) -> Collection[str]:
        """Return the digests of all files whose events a generation contains."""
        gone = dropping(self._store)
        for number in folder_numbers(self._store):
            if number <= newest and number not in self._inputs and number not in gone:
                try:
                    manifest = HistoryManifest.load(self._store, number)
                except DataError:
                    if number == newest or generation_folder(self._store, number).exists():
                        raise
                    continue  # it was dropped just now
                self._inputs[number] = frozenset(manifest.inputs.values())
        return frozenset().union(*self._inputs.values(), dropped_inputs(self._store))


def _join(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges in ascending order, with adjacent ones joined."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined

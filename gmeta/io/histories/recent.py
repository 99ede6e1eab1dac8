"""Histories as a ranker knows them now: those of a store, and the events that the store doesn't have yet.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from gmeta.core.data_manifest import hash_text
from gmeta.core.errors import ConfigError, DataError, GmetaError, finite_number, whole_number
from gmeta.core.event_file import EventForm
from gmeta.core.history_manifest import (
    BIRTH,
    HistoryManifest,
    generation_folder,
    newest_generation,
    shard_files,
    user_shards,
)
from gmeta.core.schema import Column
from gmeta.io.histories.recent_journal import Journal
from gmeta.io.histories.recent_segments import (
    SIZES,
    Flusher,
    Segments,
    describe_fault,
    need,
    recent_library,
    refuse,
)

Values = NDArray[Any]
_LEAST, _MOST = -(2**63), 2**63 - 1
_MOMENT = struct.Struct("<qqq").pack


class HistorySnapshot(NamedTuple):
    """A user's history, and what an exposure logs to rebuild it (`gmeta.io.late`).

    Attributes:
      columns: Name -> (E,) int64 or float32, the history's events in the order of time.
      generation: The store's generation that the history was read from.
      tail: Name -> (T,): those of the events that this generation lacks; also the time.
      length: E, the number of events, including the tail.
      crc: The checksum of `columns`, in their order.
    """

    columns: dict[str, Values]
    generation: int
    tail: dict[str, Values]
    length: int
    crc: int


class HistorySnapshots(NamedTuple):
    """Histories of some users, one after another, and what their exposures log.

    Attributes:
      row_splits: (R + 1,) int64: history ``i`` has the events ``row_splits[i]`` to ``row_splits[i + 1] - 1``.
      columns: Name -> (E,) int64 or float32.
      generations: (R,) int64: the generation that each history was read from.
      tail_splits: (R + 1,) int64, the same for the tails.
      tail: Name -> (T,).
      crcs: (R,) int64: the checksum of each history.
    """

    row_splits: NDArray[np.int64]
    columns: dict[str, Values]
    generations: NDArray[np.int64]
    tail_splits: NDArray[np.int64]
    tail: dict[str, Values]
    crcs: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(R,) int64: the number of events of each history."""
        return np.diff(self.row_splits)


class RecentHistories:
    """The newest generation of a store of histories, with events that are appended as they happen.

    A ranker appends events and reads histories in any number of threads: the native code runs without
    Python's lock. An append writes its event and reads nothing. A snapshot is the history as it is known now:
    the newest generation's events before a time, and the recent ones that this generation lacks, ordered by
    time, the store's first at equal times. If an exposure logs the snapshot's generation, tail and checksum,
    `gmeta.io.late` rebuilds the same history from any later generation, whatever was appended since.

    Recent events reach the store in segments::

        files = recent.drain("outbox/2024-05-17")        # also the files that weren't appended yet
        append_history("histories", files)               # or `gmeta history append`, on any machine
        recent.refresh()                                 # reads the new generation from now on

    A generation contains a segment if an append has read the segment's file. `refresh` recognises it by the
    file's digest, and removes exactly its events from memory and from the journal, in any order of appends.
    Killed at any point, and started again, this neither loses nor repeats an event that the journal has.

    Every event must be appended to one such object only, as two would drain it twice: where several processes
    rank, each has the events of its own users. Events take about 8 bytes for each column, the time and one
    more, and up to half of it again, and 96 bytes for each user; the store's indexes take 72 bytes for each
    stripe. To delete a user, drain, append and refresh first, then run `gmeta history scrub`.

    Args:
      store: The store's folder, on a local file system.
      history: The columns of histories, of one group of the store, or its time; checksums are computed in
        this order, as in `late`.
      journal: A folder for a journal of the recent events, from which they are restored. None: they are lost
        when the process ends.
      sync: When the journal is flushed to the drive: ``"always"``, before `append` returns; a number, each so
        many seconds; None, by `sync`, `drain` and `close` only. A process that is killed loses nothing in any
        case; a machine that stops loses what wasn't flushed.
      memory_limit: Bytes of recent events; `append` raises an error while they take as many.

    Attributes:
      store: The store's folder.
      history: The columns of histories.

    Raises:
      ConfigError: A column is missing, columns are of several groups, or an argument is out of range.
      DataError: There is no store, or it or the journal is damaged.
      GmetaError: Another process has the journal open, or it can't be written.

    Example:
      >>> recent = RecentHistories("histories", ["item", "timestamp"], journal="recent")
      >>> recent.append(17, {"item": 5, "price": 2.5, "timestamp": 1_700_000_000})
      >>> seen = recent.snapshot(17, 1_700_000_060, longest=1000)
      >>> seen.generation, seen.crc, seen.tail["item"]
      (4, 2137206943, array([5]))

    References:
      Versioned Late Materialization, section 4.1.1.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        history: Sequence[str],
        *,
        journal: str | os.PathLike[str] | None = None,
        sync: float | Literal["always"] | None = 1.0,
        memory_limit: int = 1 << 30,
    ) -> None:
        if "://" in os.fspath(store):
            raise ConfigError(f"RecentHistories reads stores of this machine, got {os.fspath(store)}")
        if isinstance(history, str) or not history:
            raise ConfigError(f"RecentHistories: history must be a list of columns, got {history!r}")
        if sync is not None and sync != "always" and finite_number("RecentHistories: sync", sync) <= 0:
            raise ConfigError(
                f"RecentHistories: sync must be 'always', None or above 0 seconds, got {sync!r}"
            )
        self.store, self.history = Path(store), list(history)
        manifest = HistoryManifest.load(self.store, newest_generation(self.store))
        self._form, self._library = EventForm.of(manifest), recent_library()
        self._places = {column.name: place for place, column in enumerate(self._form.words)}
        columns = manifest.spec["columns"]
        self._hashed = {name for name in self._places if columns.get(name, {}).get("hash")}
        if BIRTH in self.history:
            raise ConfigError(
                f"RecentHistories: recent events have no {BIRTH!r}: leave it out of the history"
            )
        if twice := {name for name in self.history if self.history.count(name) > 1}:
            raise ConfigError(f"RecentHistories: history names {min(twice)!r} twice")
        self._read = [*dict.fromkeys([*self.history, self._form.time])]
        group, chosen = manifest.find(self._read)
        self._floats = [column.dtype == "float32" for column in chosen]
        self._float_columns = sum(self._floats[: len(self.history)]), sum(self._floats)
        self._no_tail = {
            each.name: np.empty(0, np.float32 if each.dtype == "float32" else np.int64) for each in chosen
        }
        described = np.array([[each.number, self._places[each.name]] for each in chosen], np.int64)
        is_float = np.array([column.dtype == "float32" for column in self._form.words], np.int64)
        self._handle = self._library.gmeta_recent_new(
            *(len(is_float) - 1, is_float.ctypes.data, whole_number("memory_limit", memory_limit, least=1)),
            *(group, len(chosen), described.ctypes.data),
            *(len(self.history), self._read.index(self._form.time)),
        )
        need(self._handle)
        flusher = Flusher(self, self._handle)
        self._pack = struct.Struct("<" + "".join("f4x" if each else "q" for each in is_float)).pack
        names = [column.name for column in self._form.words[1:]]
        self._get = itemgetter(*names) if len(names) > 1 else lambda event: (event[names[0]],)
        self._closed = False
        files = Journal(None if journal is None else Path(journal), self._form)
        self._segments = Segments(
            self.store, manifest, self._read, self._handle, files, always=sync == "always"
        )
        if journal is not None and isinstance(sync, int | float):
            flusher.start(sync)

    @property
    def generation(self) -> int:
        """The number of the generation that is read since the last `refresh`."""
        return self._segments.generation

    @property
    def events(self) -> int:
        """The number of recent events in memory."""
        return int(self._library.gmeta_recent_events(self._handle))

    @property
    def bytes(self) -> int:
        """The bytes that recent events and their users take in memory."""
        return int(self._library.gmeta_recent_bytes(self._handle))

    def append(self, user: int | str, event: Mapping[str, Any]) -> None:
        """Append an event.

        Args:
          user: The user, as in the store: a number, or a text where the store hashes users.
          event: Name -> value, for the time and every column of the store, of all its groups. A text stands
            for its hash in a column that the store hashes. Floats must be finite.

        Raises:
          ConfigError: A column is missing or unknown.
          DataError: A value isn't one of the column.
          GmetaError: The events take `memory_limit`, or the journal can't be written; the event isn't added.
            If the journal can't be flushed, the event isn't in memory, but may be in the journal.
        """
        try:
            row = self._pack(user, *self._get(event))
        except (KeyError, TypeError, struct.error, OverflowError):
            self.append_many([user], {name: [value] for name, value in event.items()})
            return
        if len(event) != len(self._places) - 1:
            self._refuse_columns(event)
        self._add(1, row)

    def append_many(self, users: npt.ArrayLike, columns: Mapping[str, npt.ArrayLike]) -> None:
        """Append events, of any users.

        Up to 1,048,576 events are added or refused together; more are divided.

        Args:
          users: (N,) int64, or texts where the store hashes users.
          columns: Name -> (N,), for the time and every column of the store, as for `append`.

        Raises:
          ConfigError: A column is missing or unknown.
          DataError: A value isn't one of the column, or columns have different lengths.
          GmetaError: As for `append`.
        """
        if columns.keys() != self._places.keys() - {self._form.user}:
            self._refuse_columns(columns)
        given = {self._form.user: users, **columns}
        count = len(np.atleast_1d(np.asarray(users)))
        rows = np.empty((count, len(self._places)), np.int64)
        for place, column in enumerate(self._form.words):
            rows[:, place] = self._words(column, given[column.name], count)
        if count:
            self._add(count, rows.ctypes.data)

    def snapshot(
        self, user: int | str, time: int, *, longest: int | None = None, window: int | None = None
    ) -> HistorySnapshot:
        """Return a user's history before a time, as it is known now.

        Args:
          user: The user.
          time: The time before which all its events lie: that of the exposure.
          longest: Maximum number of events, including the tail; the newest are kept. None: all.
          window: Maximum age of events, in the unit of time: ``time - window <= e < time``. None: no limit.

        Returns:
          The history. Its arrays share memory that nothing else uses.

        Raises:
          ConfigError: An argument is out of range.
          DataError: A stripe is damaged.
        """
        number = hash_text(user) if isinstance(user, str) else user
        start = _LEAST if window is None else max(time - whole_number("window", window, least=1), _LEAST)
        try:
            moment = _MOMENT(number, start, time)
        except struct.error as error:
            raise ConfigError(f"snapshot: user and time must be int64, got {user!r} and {time!r}") from error
        sizes = self._take(moment, [number], longest)
        block = self._fill(sizes, 6)
        history, tail = self._columns(block, 6, *sizes[:2])
        return HistorySnapshot(history, int(block[4]), tail, sizes[0], int(block[5]))

    def snapshot_many(
        self,
        users: npt.ArrayLike,
        times: npt.ArrayLike,
        *,
        longest: int | None = None,
        window: int | None = None,
    ) -> HistorySnapshots:
        """Return the histories of users before a time each.

        Args:
          users: (R,) int64, in any order.
          times: (R,) int64, or one for all.
          longest: As for `snapshot`.
          window: As for `snapshot`.

        Raises:
          ConfigError: An argument is out of range.
          DataError: A stripe is damaged.
        """
        count, given = len(np.atleast_1d(np.asarray(users))), np.asarray(times)
        moments = np.empty((3, count), np.int64)
        moments[0] = self._words(Column(self._form.user), users, count)
        moments[2] = self._words(
            Column(self._form.time), given if given.ndim else np.full(count, given), count
        )
        if window is None:
            moments[1] = _LEAST
        else:
            age = whole_number("window", window, least=1)
            moments[1] = np.maximum(moments[2], min(_LEAST + age, _MOST)) - min(age, _MOST)
        sizes = self._take(moments.ctypes.data, moments[0], longest)
        block = self._fill(sizes, 4 * count + 2)
        ends = np.cumsum([count + 1, count + 1, count, count])
        splits, tail_splits, generations, crcs = np.split(block[: ends[3]], ends[:3])
        history, tail = self._columns(block, int(ends[3]), *sizes[:2])
        return HistorySnapshots(splits, history, generations, tail_splits, tail, crcs)

    def drain(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write the recent events into files, which `gmeta history append` adds to the store.

        The events since the last `drain` become a segment; other segments that the store lacks are written
        again, with the same bytes. An append refuses a file whose events the store has, so each event is
        appended once. Append the returned files; older ones in the folder may be in the store already.
        Appends and snapshots go on meanwhile.

        Args:
          folder: The folder for the files, made if it is missing; a file that is there is kept.

        Returns:
          The files whose events the store lacks, by segment; empty if it has all.

        Raises:
          DataError: The store is damaged.
          GmetaError: A file can't be written.
        """
        return self._segments.drain(Path(folder))

    def refresh(self) -> int:
        """Read the store's newest generation from now on, and remove the recent events that it contains.

        Snapshots go on meanwhile: each has the earlier generation and the events that it lacks, or the newest
        one without them.

        Returns:
          The generation.

        Raises:
          ConfigError: The store's columns have changed since this object was made.
          DataError: The store is damaged.
        """
        return self._segments.refresh()

    def sync(self) -> None:
        """Flush the journal to the drive.

        Raises:
          GmetaError: It can't be flushed.
        """
        self._refuse(self._library.gmeta_recent_sync(self._handle))

    def close(self) -> None:
        """Flush the journal and release it; snapshots still work, appends don't. A second call does nothing.

        Raises:
          GmetaError: The journal can't be flushed.
        """
        if not self._closed:
            self._closed = True
            try:
                self.sync()
            finally:
                self._segments.close()

    # Reading snapshots.

    def _take(self, moments: Any, users: Sequence[int] | NDArray[np.int64], longest: int | None) -> Any:
        """Take snapshots; return the events of histories and of tails, and the address of the reader."""
        most = _MOST if longest is None else whole_number("longest", longest, least=1)
        for trial in range(2):
            out = SIZES()
            fault = self._library.gmeta_recent_snapshot(self._handle, len(users), moments, most, out)
            if not fault:
                return out
            need(fault > 0)
            # The generation may have been dropped since, after a newer one was committed.
            if trial or self.refresh() == out[1]:
                break
        raise self._damage(fault, out, int(users[out[0]]))

    def _fill(self, sizes: Any, heads: int) -> NDArray[np.int64]:
        history, tail, floats = sizes[0], sizes[1], self._float_columns
        words = heads + history * (len(self.history) - floats[0]) + tail * (len(self._read) - floats[1])
        words += (history + 1) // 2 * floats[0] + (tail + 1) // 2 * floats[1]
        block = np.empty(words, np.int64)
        self._library.gmeta_recent_take(self._handle, sizes[2], block.__array_interface__["data"][0])
        return block

    def _columns(
        self, block: NDArray[np.int64], at: int, events: int, tail: int
    ) -> tuple[dict[str, Values], dict[str, Values]]:
        """Return the history's columns and the tail's, which the block has from a place on."""
        history: dict[str, Values] = {}
        at = self._cut(block, at, self.history, events, history)
        if not tail:
            return history, dict(self._no_tail)
        own: dict[str, Values] = {}
        self._cut(block, at, self._read, tail, own)
        return history, own

    def _cut(
        self, block: NDArray[np.int64], at: int, names: Sequence[str], size: int, out: dict[str, Values]
    ) -> int:
        """Add columns of `size` values to `out`, which the block has from a place on; return their end."""
        for name, is_float in zip(names, self._floats, strict=False):
            if is_float:
                end = at + (size + 1) // 2
                out[name] = block[at:end].view(np.float32)[:size]
            else:
                end = at + size
                out[name] = block[at:end]
            at = end
        return at

    def _damage(self, fault: int, out: Any, user: int) -> DataError:
        shard = int(user_shards(np.array([user]), self._segments.shards)[0])
        return DataError(
            f"user {user}, stripe of {out[6]:,} bytes, in generation {out[1]}: "
            f"{describe_fault('stripe', fault)}",
            path=shard_files(generation_folder(self.store, out[4]), shard)[0],
            offset=out[5],
            advice="`gmeta history verify` finds all damage",
        )

    # Appending.

    def _add(self, count: int, rows: Any) -> None:
        if self._closed:
            raise GmetaError("append: these recent histories are closed")
        failure = self._library.gmeta_recent_append(self._handle, count, rows)
        if failure:
            self._refuse(failure)

    def _refuse(self, failure: int) -> None:
        refuse(failure, self._handle)

    def _refuse_columns(self, given: Mapping[str, Any]) -> None:
        names = [name for name in self._places if name != self._form.user]
        raise ConfigError(
            f"an event has the store's columns {', '.join(names)}; got {', '.join(given) or 'none'}"
        )

    def _words(self, column: Column, given: npt.ArrayLike, count: int) -> NDArray[np.int64]:
        """Return a column's words, (count,): a float32 is its bits."""
        values = np.asarray(given)
        if column.name in self._hashed and values.dtype.kind in "UO":
            words = [hash_text(one) if isinstance(one, str) else one for one in values.tolist()]
            values = np.array(words, np.int64 if all(isinstance(one, int) for one in words) else object)
        kinds = "fiub" if column.dtype == "float32" else "iub"
        fits = values.size == 0 or values.dtype.kind in kinds
        if column.name == self._form.time and values.dtype == np.uint64 and values.size:
            fits = int(values.max()) <= _MOST
        if values.shape != (count,) or not fits:
            raise DataError(
                f"column {column.name!r} takes {count} values of {column.dtype}, got {values.dtype} of shape "
                f"{values.shape}: {np.array2string(values, threshold=3, edgeitems=1)}"
            )
        if column.dtype == "float32":
            with np.errstate(over="ignore"):  # infinity is refused
                return np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.int64)
        return values.astype(np.int64)

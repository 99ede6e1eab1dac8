"""Rewrites all events of a store as its next generation."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data_manifest import hash_text
from gmeta.core.errors import ConfigError
from gmeta.core.history_manifest import HistoryManifest, user_shards
from gmeta.preprocess.config import Progress, no_progress
from gmeta.preprocess.history.generation import Generation, generations, new_generation, settle_or_warn
from gmeta.preprocess.history.shard_reader import PLACE, REQUEST, ShardReader, as_words
from gmeta.preprocess.history.shard_writer import Deletions, Kept, write_stripes
from gmeta.preprocess.history.spec import EVENTS, HistorySpec
from gmeta.preprocess.table_spec import ColumnSpec

# Another form for the events of a store: added or removed columns, other groups, shards and stripes.


def change_spec(old: HistorySpec, new: HistorySpec) -> HistorySpec:
    """Return a spec that names every column and group, and to which the events of a store can be rewritten.

    Args:
      old: The store's spec.
      new: The requested spec. A column that the store has keeps its type. A new column requires a type, or
        ``hash``, and a default, which is the value for existing events.

    Raises:
      ConfigError: The user or the time is another column, a column changes its type, or a new column has no
        type or no default.
    """
    for role in ("user", "time"):
        if getattr(old, role) != getattr(new, role):
            raise ConfigError(
                f"{role} is {getattr(old, role)!r} in the store and {getattr(new, role)!r} in the spec: the "
                f"{role} can't change; make a store of its own"
            )
    both = (old.user, old.time)
    own = [name for name in new.columns if name not in both]
    every = own or [name for name in old.columns if name not in both]
    groups = dict(new.groups) or {EVENTS: tuple(every)}
    names = [name for each in groups.values() for name in each]
    if absent := sorted(set(own) - set(names)):
        raise ConfigError(f"groups: no group has column {', '.join(absent)}")
    columns = {name: _column(name, old, new.columns.get(name)) for name in (*both, *names)}
    return replace(new, columns=columns, groups=groups)


def default_word(column: ColumnSpec) -> int:
    """Return the default of a column as a stripe holds it."""
    if isinstance(column.default, str):
        return hash_text(column.default)
    value = np.array([column.default], np.float32 if column.dtype == "float32" else np.int64)
    return int(as_words(value)[0])


def _column(name: str, old: HistorySpec, new: ColumnSpec | None) -> ColumnSpec:
    known = old.columns.get(name)
    if known is None:
        if new is None or new.default is None:
            raise ConfigError(
                f"column {name!r} isn't in the store: its events need a value, so give it a default"
            )
        dtype = "int64" if new.hash or isinstance(new.default, str) else new.dtype
        if dtype is None or new.is_list:
            raise ConfigError(f"column {name!r} isn't in the store: give it the dtype int64 or float32")
        return replace(new, dtype=dtype, hash=new.hash or isinstance(new.default, str), is_list=False)
    if new is None:
        return known
    if new.dtype not in (None, known.dtype) or (new.hash and not known.hash) or new.is_list:
        raise ConfigError(
            f"column {name!r} is of {known.dtype}{', a hash' if known.hash else ''} in the store, and a "
            "column can't change its type: give the new one another name"
        )
    return replace(new, dtype=known.dtype, hash=known.hash, is_list=known.is_list)


# Reads a store's events for a shard of its next generation.

Ints = NDArray[np.int64]
_ALL = np.iinfo(np.int64)


class OldShard:
    """The events of the users of a shard of another spec.

    A shard is a range of hashes. If the number of shards changes, its users are in one or more shards of the
    previous generation, which are read one after another.

    Args:
      before: The previous generation.
      shard: The number of the new shard.
      spec: The new spec; the shard is one of its ``shards``.
      start: Leave out events before this time; None: none.
      deleted: (U,) int64, ascending: users whose events are left out.
      generation: The number of the next generation, which deletes them.

    Attributes:
      deletions: The users whose events were ever deleted.
      deleted: The number of users of `deleted` in this shard.
    """

    def __init__(
        self,
        before: Generation,
        shard: int,
        spec: HistorySpec,
        *,
        start: int | None,
        deleted: Ints,
        generation: int,
    ) -> None:
        self._before, self._spec, self._start = before, spec, _ALL.min if start is None else start
        self._parts: list[tuple[ShardReader, Ints]] = []
        self._open, self.deleted, deletions = ExitStack(), 0, []
        there = len(before.manifest.shards)
        for number in range(shard * there // spec.shards, -(-(shard + 1) * there // spec.shards)):
            reader = self._open.enter_context(closing(before.open(number)))
            index = reader.index()
            own = user_shards(index.users, spec.shards) == shard
            has_events = np.diff(index.ends, prepend=0) > 0
            named = own & has_events & np.isin(index.users, deleted)
            by = np.where(named, generation, index.deletions)
            deletions.append(Deletions(index.users[own & (by > 0)], by[own & (by > 0)]))
            self._parts.append((reader, index.users[own & ~named]))
            self.deleted += int(named.sum())
        self.deletions = Deletions(*(np.concatenate(parts) for parts in zip(*deletions, strict=True)))

    def __enter__(self) -> OldShard:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def tables(self) -> Iterator[list[Ints]]:
        """Yield the columns of each new group: user, time, birth and its own, ordered by the first three.

        Raises:
          DataError: A stripe is damaged.
        """
        for names in self._spec.groups.values():
            parts = [self._read(reader, users, names) for reader, users in self._parts]
            columns = [np.concatenate(each) for each in zip(*parts, strict=True)]
            if len(parts) > 1:
                order = np.argsort(columns[0], kind="stable")
                columns = [column[order] for column in columns]
            yield columns

    def _read(self, reader: ShardReader, users: Ints, names: Sequence[str]) -> list[Ints]:
        requests = np.zeros(len(users), REQUEST)
        requests["user"], requests["start"] = users, self._start
        requests["until"] = requests["generation"] = _ALL.max
        found: dict[str, Ints] = {}
        first: list[Ints] = []
        for group, columns in enumerate(self._before.manifest.groups.values()):
            wanted = [(number, each.name) for number, each in enumerate(columns, 2) if each.name in names]
            if not wanted and (first or group < len(self._before.manifest.groups) - 1):
                continue
            numbers = [number for number, _ in wanted]
            histories = reader.scan(requests, [0, 1, *numbers], group=group, longest=_ALL.max)
            first = [np.repeat(users, np.diff(histories.row_splits)), *histories.columns[:2]]
            found |= {name: own for (_, name), own in zip(wanted, histories.columns[2:], strict=True)}
        added = {name: default_word(self._spec.columns[name]) for name in names if name not in found}
        found |= {name: np.full(len(first[0]), word) for name, word in added.items()}
        return [*first, *(found[name] for name in names)]


@dataclass(frozen=True)
class RebuildSummary:
    """The result of a compaction or a scrub.

    Attributes:
      generation: The number of the generation that it made.
      events: Events of the new generation.
      events_before: Events of the previous generation.
      deleted: Users whose events it deleted.
      stripes_before: Stripes of the previous generation.
      stripes: Stripes of the new generation.
      bytes: Bytes of its stripes.
      seconds: How long it took.
    """

    generation: int
    events: int
    events_before: int
    deleted: int
    stripes_before: int
    stripes: int
    bytes: int
    seconds: float


def compact_history(
    store: str | os.PathLike[str],
    *,
    start: int | None = None,
    spec: HistorySpec | None = None,
    progress: Progress = no_progress,
) -> RebuildSummary:
    """Rewrite all events of a store as its next generation, so that each history is one read.

    Appends leave a user's events in stripes of several files. After a compaction, all of a user's stripes
    except the last are full, and they lie side by side. Events keep their births, so no history changes,
    including those of earlier generations. Earlier generations remain until `drop_generations` removes them.

    Args:
      store: The store's folder. A shard's events must fit in memory.
      start: Leave out events before this time: the look-back ends there. Histories that reach further back
        get shorter. None: all events stay.
      spec: Another form for the events: columns to add, with a default for the existing events, or to remove;
        other groups; more or fewer shards; longer stripes. The user, the time and the types of columns can't
        change. None: the store's.
      progress: Called with the progress of the stage ``"write"``, in events.

    Returns:
      A summary of the new generation.

    Raises:
      ConfigError: The start is after all events, or the events can't be rewritten to the spec.
      DataError: There is no store, or it is damaged.
      GmetaError: The store can't be written, or another process writes to it.

    Example:
      >>> compact_history("histories", start=1_700_000_000).generation  # doctest: +SKIP
      92
    """
    settle_or_warn(Path(store))
    before = Generation(Path(store))
    if start is not None and start >= before.manifest.watermark:
        raise ConfigError(
            f"start {start} leaves no event of {store}: all are before {before.manifest.watermark}"
        )
    return _rebuild(before, start, spec, np.empty(0, np.int64), progress)


def scrub_history(
    store: str | os.PathLike[str], users: Collection[int], *, progress: Progress = no_progress
) -> RebuildSummary:
    """Delete all events of users: write a store's next generation without them.

    The generation is compact, as after `compact_history`. It still records that these users had events, so a
    reader distinguishes them from users who had none (`gmeta.io.HistoryStore.deleted`), and `gmeta.io.late`
    skips their examples. Later appends may add new events for them. **Earlier generations still hold the
    events** until `drop_generations` removes them.

    Args:
      store: The store's folder. A shard's events must fit in memory.
      users: The users; those without events are ignored, and `RebuildSummary.deleted` doesn't count them.
      progress: As for `compact_history`.

    Returns:
      A summary of the new generation.

    Raises:
      ConfigError: No user is named, or none of them has events; nothing is written.
      DataError, GmetaError: As for `compact_history`.
    """
    settle_or_warn(Path(store))
    before, named = Generation(Path(store)), np.unique(np.fromiter(users, np.int64))
    if not _has_any(before, named):
        raise ConfigError(f"none of the {len(named):,} users to delete has events in {store}")
    return _rebuild(before, None, None, named, progress)


def _rebuild(
    before: Generation,
    start: int | None,
    spec: HistorySpec | None,
    deleted: NDArray[np.int64],
    progress: Progress,
) -> RebuildSummary:
    started, old = time.perf_counter(), before.manifest
    own = HistorySpec.from_json(old.spec)
    changed = own if spec is None else change_spec(own, spec)
    if old.start is not None:
        start = old.start if start is None else max(start, old.start)
    shards, gone, done, total = [], 0, 0, sum(shard.events for shard in old.shards)
    with new_generation(before.store, old.generation) as (number, folder):
        for shard in range(changed.shards):
            with OldShard(before, shard, changed, start=start, deleted=deleted, generation=number) as found:
                kept = Kept(np.empty(0, np.int64), np.empty(0, PLACE), found.deletions)
                written = write_stripes(folder, shard, number, found.tables(), changed.stripe_events, kept)
            gone += found.deleted
            shards.append(written.shard)
            done += written.shard.events
            progress("write", done, total)
        HistoryManifest(
            number,
            changed.group_columns(),
            tuple(shards),
            old.watermark,
            start,
            _inputs(before.store),
            (number,),
            changed.to_json(),
        ).save(folder)
    return RebuildSummary(
        number,
        done,
        total,
        gone,
        sum(shard.stripes for shard in old.shards),
        sum(shard.stripes for shard in shards),
        sum(shard.bytes for shard in shards),
        time.perf_counter() - started,
    )


def _has_any(before: Generation, users: NDArray[np.int64]) -> bool:
    """Return whether one of the users has events."""
    shard_of = user_shards(users, len(before.manifest.shards))
    for shard in np.unique(shard_of).tolist():
        with closing(before.open(shard)) as reader:
            index = reader.index()
        has = np.diff(index.ends, prepend=0) > 0
        if np.isin(index.users[has], users).any():
            return True
    return False


def _inputs(store: Path) -> dict[str, str]:
    """Return the digests of all files that were read, so that none is appended again after a drop."""
    inputs: dict[str, str] = {}
    for each in generations(store):
        inputs |= {digest: digest for digest in HistoryManifest.load(store, each).inputs.values()}
    return inputs

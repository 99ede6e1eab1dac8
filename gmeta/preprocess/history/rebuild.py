"""Writes all events of a store anew, as its next generation."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data.history_manifest import HistoryManifest, user_shards
from gmeta.core.errors import ConfigError
from gmeta.preprocess.history.files.generation import (
    Generation,
    generations,
    new_generation,
    settle_or_warn,
)
from gmeta.preprocess.history.files.new_shard import Kept, write_stripes
from gmeta.preprocess.history.files.shard_reader import PLACE
from gmeta.preprocess.history.old_shard import OldShard
from gmeta.preprocess.history.schema_change import change_spec
from gmeta.preprocess.history.spec import HistorySpec
from gmeta.preprocess.progress import Progress, no_progress


@dataclass(frozen=True)
class RebuildSummary:
    """What a compaction or a scrub did.

    Attributes:
      generation: The number of the generation that it made.
      events: Events of the store.
      events_before: Events of the generation before.
      deleted: Users whose events it deleted.
      stripes_before: Stripes of the generation before.
      stripes: Stripes now.
      bytes: Bytes of stripes now.
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
    """Write all events of a store anew, as its next generation, so that each history is one read.

    Appends leave a user's events in stripes of several files. Here all of a user's stripes are full but the
    last, and lie side by side. Events keep their births, so every history stays what it was, also those of
    earlier generations. These stay too, until `drop_generations` removes them.

    Args:
      store: The store's folder. A shard's events must fit in memory.
      start: Leave out events before this time: the look-back ends there. Histories that reach further back
        get shorter. None: all events stay.
      spec: Another form for the events: columns that come, with a default for the events that are there, or
        go, other groups, more or fewer shards, longer stripes. The user, the time and the types of columns
        can't change. None: the store's.
      progress: Called with the progress of the stage ``"write"``, in events.

    Returns:
      What was done.

    Raises:
      ConfigError: The start is behind all events, or the spec can't be reached.
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

    The generation is compact, as one by `compact_history`. It still knows that these users had events, so a
    reader tells them apart from users who had none (`gmeta.io.HistoryStore.deleted`), and `gmeta.io.late`
    leaves out examples of theirs. They may get new events by later appends. **Earlier generations still hold
    the events** until `drop_generations` removes them.

    Args:
      store: The store's folder. A shard's events must fit in memory.
      users: The users; those without events are ignored, and `RebuildSummary.deleted` doesn't count them.
      progress: As for `compact_history`.

    Returns:
      What was done.

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
    """Return the digests of all files that were read, so that none is appended again once all is dropped."""
    inputs: dict[str, str] = {}
    for each in generations(store):
        inputs |= {digest: digest for digest in HistoryManifest.load(store, each).inputs.values()}
    return inputs

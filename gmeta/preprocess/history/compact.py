"""Rebuilds a store of histories into few stripes, and drops generations that nothing needs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gmeta.core.data.history_manifest import GENERATIONS, HistoryManifest, generation_folder
from gmeta.core.errors import ConfigError
from gmeta.core.files import sync
from gmeta.core.staging import explain_write_errors
from gmeta.preprocess.history.example_sets import refuse_needed, registration_lock
from gmeta.preprocess.history.files.generation import Generation, generations, new_generation, write_lock
from gmeta.preprocess.history.files.shard_writer import read_earlier, write_shard
from gmeta.preprocess.history.files.stripe_layout import rewrite_all
from gmeta.preprocess.history.spec import HistorySpec
from gmeta.preprocess.progress import Progress, no_progress


@dataclass(frozen=True)
class CompactSummary:
    """What a compaction did.

    Attributes:
      generation: The number of the generation that it made.
      events: Events of the store.
      stripes_before: Stripes of the generation before.
      stripes: Stripes now.
      bytes: Bytes of stripes now.
      seconds: How long it took.
    """

    generation: int
    events: int
    stripes_before: int
    stripes: int
    bytes: int
    seconds: float


def compact_history(store: str | os.PathLike[str], *, progress: Progress = no_progress) -> CompactSummary:
    """Write all events of a store anew, as its next generation, so that each history is one read.

    Appends leave a user's events in stripes of several files. Here all of a user's stripes are full but the
    last, and lie side by side. Events keep their births, so every history stays what it was, also those of
    earlier generations. These stay too, until `drop_generations` removes them.

    Args:
      store: The store's folder. A shard's events must fit in memory.
      progress: Called with the progress of the stage ``"write"``, in events.

    Returns:
      What was done.

    Raises:
      DataError: There is no store, or it is damaged.
      GmetaError: The store can't be written, or another process writes to it.
    """
    started, store = time.perf_counter(), Path(store)
    before = Generation(store)
    old, shards, done = before.manifest, [], 0
    with new_generation(store, old.generation) as (number, folder):
        spec = HistorySpec.from_json(old.spec)
        none = np.empty((0, len(spec.all_columns)), np.int64)
        total = sum(shard.events for shard in old.shards)
        for shard in range(len(old.shards)):
            earlier = read_earlier(before, shard)
            written = write_shard(
                folder,
                shard,
                number,
                none,
                spec.group_numbers,
                spec.stripe_events,
                earlier,
                rewrite_all(earlier.stripes),
            )
            shards.append(written.shard)
            done += shards[-1].events
            progress("write", done, total)
        inputs: dict[str, str] = {}  # so that a file isn't appended again after its generation was dropped
        for each in generations(store):
            inputs |= {digest: digest for digest in HistoryManifest.load(store, each).inputs.values()}
        replace(old, generation=number, shards=tuple(shards), inputs=inputs, reads=(number,)).save(folder)
    return CompactSummary(
        number,
        total,
        sum(shard.stripes for shard in old.shards),
        sum(shard.stripes for shard in shards),
        sum(shard.bytes for shard in shards),
        time.perf_counter() - started,
    )


def drop_generations(store: str | os.PathLike[str], numbers: Collection[int]) -> None:
    """Remove generations of a store that no other generation needs.

    Args:
      store: The store's folder.
      numbers: Which; the newest can't be one of them.

    Raises:
      ConfigError: A generation isn't there, or another one that stays reads its stripes, or a registered set
        of examples names it; nothing is removed.
      GmetaError: The store can't be written, or another process writes to it.
    """
    store, doomed = Path(store), set(numbers)
    with explain_write_errors(store), write_lock(store), registration_lock(store):
        there = generations(store)
        if absent := sorted(doomed - set(there)):
            raise ConfigError(f"{store} has no generation {absent[0]}; it has {', '.join(map(str, there))}")
        if there[-1] in doomed:
            raise ConfigError(f"generation {there[-1]} is the newest of {store}: readers open it")
        refuse_needed(store, doomed)
        for number in sorted(set(there) - doomed):
            if needed := sorted(doomed & set(HistoryManifest.load(store, number).reads)):
                raise ConfigError(
                    f"generation {number} of {store} reads stripes of generation {needed[0]}: run `gmeta "
                    "history compact`, and drop all generations before the one that it makes"
                )
        for number in sorted(doomed):
            folder = generation_folder(store, number)
            folder.rename(folder.with_name(f".{folder.name}.removed"))
            sync(folder.parent)
        for removed in (store / GENERATIONS).glob(".*.removed"):  # also those of a process that was killed
            shutil.rmtree(removed)

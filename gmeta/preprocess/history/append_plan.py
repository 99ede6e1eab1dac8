"""An append in three steps that every engine takes: plan it, write its shards, finish its generation.

::

    plan_append      the store, the columns and the watermark fit, and no file was read before
    event_words      rows of a table ──> rows of 64-bit words, in any order, for `user_shards`
    append_shard     all new events of a shard ──> its stripes and its index    (each shard by itself)
    finish_append    what is known of all shards ──> the manifest

An engine does the rest: it brings the events of each shard together. So all engines write the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data.history_manifest import HistoryManifest, HistoryShard, current_generation
from gmeta.core.errors import ConfigError, DataError
from gmeta.preprocess.columns import Columns, single
from gmeta.preprocess.history.drop import dropped_inputs
from gmeta.preprocess.history.files.event_spill import sort_events
from gmeta.preprocess.history.files.generation import Generation, generations
from gmeta.preprocess.history.files.shard_writer import read_earlier, write_shard
from gmeta.preprocess.history.files.stripe import as_words
from gmeta.preprocess.history.files.stripe_layout import find_joined
from gmeta.preprocess.history.spec import HistorySpec
from gmeta.preprocess.table_spec import CsvForm, TableSpec
from gmeta.preprocess.tables.table_files import holds_records

MAX_TIME = 2**63 - 1
"""Times of events are below it."""


@dataclass(frozen=True)
class AppendPlan:
    """What an append does.

    Attributes:
      store: The store's folder.
      before: The store's generation; 0 if it has none. The append makes the next one.
      spec: The columns, as `HistorySpec.resolve` returned them.
      watermark: The watermark that was asked for; None: behind the latest event.
    """

    store: str
    before: int
    spec: HistorySpec
    watermark: int | None = None

    @property
    def generation(self) -> int:
        """The generation that the append makes."""
        return self.before + 1

    def open_before(self) -> Generation | None:
        """Open the store's generation, if it has one."""
        return Generation(Path(self.store), self.before) if self.before else None

    def load(self) -> HistoryManifest:
        """Return the manifest of the generation that the append has made."""
        return HistoryManifest.load(Path(self.store), self.generation)


@dataclass(frozen=True)
class NewShard:
    """What an append has written of a shard.

    Attributes:
      shard: The manifest's entry.
      reads: The generations whose files the index names.
      events: New events.
      latest: The latest time of a new event; None if there is none.
    """

    shard: HistoryShard
    reads: tuple[int, ...]
    events: int
    latest: int | None


def choose_spec(store: Path, given: HistorySpec | None) -> HistorySpec:
    """Return the spec to read events by: the given one, or that of the first append.

    Raises:
      ConfigError: There is none.
    """
    if given is not None:
        return given
    newest = current_generation(store)
    if not newest:
        raise ConfigError(
            f"{store} has no events yet: name the columns of users and times, with --user and --time, or "
            "a --spec"
        )
    return HistorySpec.from_json(HistoryManifest.load(store, newest).spec)


def plan_append(store: Path, spec: HistorySpec, table: TableSpec, watermark: int | None) -> AppendPlan:
    """Plan an append.

    Args:
      store: The store's folder.
      spec: What `choose_spec` returned.
      table: What `TableSpec.resolve` returned for the spec's table.
      watermark: The watermark that is asked for; None: behind the latest event.

    Raises:
      ConfigError: The store was made with another spec, or the watermark would go back.
    """
    own, before = spec.resolve(table), current_generation(store)
    if before:
        manifest = HistoryManifest.load(store, before)
        here, there = own.to_json(), manifest.spec
        if other := [name for name in there if here[name] != there[name]]:
            raise ConfigError(
                f"{store} was made with other {' and '.join(other)}: {other[0]} is {there[other[0]]} there, "
                f"and not {here[other[0]]}; without a spec, an append reads columns as the first one did"
            )
        if watermark is not None and watermark < manifest.watermark:
            raise ConfigError(
                f"watermark {watermark} is earlier than {manifest.watermark}, that of the store"
            )
    return AppendPlan(str(store), before, own, watermark)


def refuse_known(store: Path, inputs: Mapping[str, str], paths: Sequence[Path], form: CsvForm) -> None:
    """Refuse files that an earlier append has read: their events would be there twice.

    Files without records, of which an engine may write the same every day, hold no events.

    Args:
      store: The store's folder.
      inputs: The file's name -> its digest.
      paths: The files, in the order of `inputs`; () if this machine can't open them as a table's.
      form: The format of CSV files.

    Raises:
      DataError: There is such a file.
    """
    numbers = generations(store)
    known = {digest: f"generation {n}" for n in numbers for digest in _inputs(store, n)}
    known |= dict.fromkeys(dropped_inputs(store) - known.keys(), "a generation that was dropped")
    for place, (name, digest) in enumerate(inputs.items()):
        if digest in known and (not paths or holds_records(paths[place], form)):
            raise DataError(
                f"{known[digest]} holds the events of {name} already",
                path=store,
                advice="leave the file out",
            )


def _inputs(store: Path, generation: int) -> Collection[str]:
    return HistoryManifest.load(store, generation).inputs.values()


def event_words(spec: HistorySpec, rows: Columns) -> NDArray[np.int64]:
    """Return the words of events, (N, columns) int64, in the order of `HistorySpec.all_columns`.

    Raises:
      DataError: A time is `MAX_TIME` or later: no history could end behind it.
    """
    words = np.stack([as_words(single(rows, name)) for name in spec.all_columns], axis=1)
    if len(words) and (last := int(words[:, 1].max())) >= MAX_TIME:
        user = words[int(words[:, 1].argmax()), 0]
        raise DataError(
            f"user {user} has an event at time {last}; times must be below {MAX_TIME}",
            advice="leave the event out, or state max for this column in a spec",
        )
    return words


def append_shard(
    plan: AppendPlan, before: Generation | None, folder: Path, number: int, words: NDArray[np.int64]
) -> NewShard:
    """Write the stripes and the index of a shard.

    Args:
      plan: The plan.
      before: What `AppendPlan.open_before` returned.
      folder: The folder to write to.
      number: The shard's number.
      words: (N, columns) int64: all its new events, in any order.

    Raises:
      DataError: The earlier index of the shard is damaged, or a stripe that is written anew.
      OSError: The disk is full.
    """
    rows, earlier = sort_events(words), read_earlier(before, number)
    written = write_shard(
        folder,
        number,
        plan.generation,
        rows,
        plan.spec.group_numbers,
        plan.spec.stripe_events,
        earlier,
        find_joined(earlier.stripes, rows[:, 0], plan.spec.stripe_events),
    )
    latest = int(rows[:, 1].max()) if len(rows) else None
    return NewShard(written.shard, tuple(sorted(written.reads)), len(rows), latest)


def finish_append(
    plan: AppendPlan, folder: Path, shards: Sequence[NewShard], inputs: Mapping[str, str]
) -> HistoryManifest:
    """Write the manifest of a generation whose shards are all there.

    Args:
      plan: The plan.
      folder: The generation's folder.
      shards: What was written of each shard, in order.
      inputs: The files that were read -> their digests.
    """
    before = plan.open_before()
    manifest = HistoryManifest(
        plan.generation,
        plan.spec.group_columns(),
        tuple(each.shard for each in shards),
        _watermark(plan, before, [each.latest for each in shards if each.latest is not None]),
        before.manifest.start if before else None,
        inputs,
        tuple(sorted({number for each in shards for number in each.reads})),
        plan.spec.to_json(),
    )
    manifest.save(folder)
    return manifest


def _watermark(plan: AppendPlan, before: Generation | None, latest: Sequence[int]) -> int:
    """Return the new watermark: the given one, or behind the latest event; it never goes back."""
    if plan.watermark is not None:
        return plan.watermark
    return max([*(time + 1 for time in latest), *([before.manifest.watermark] if before else [])])

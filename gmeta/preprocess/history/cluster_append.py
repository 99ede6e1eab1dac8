"""An append by many workers: the description that each worker reads, and the shards that they write.

Workers may be killed, repeated, or run twice at once: each writes into a separate folder and renames complete
files (`gmeta.preprocess.cluster.table_job`). They all write the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.event_file import is_event_file
from gmeta.core.history_manifest import HistoryManifest, shard_files, user_shards
from gmeta.core.schema import check_on_bad
from gmeta.preprocess.cluster.table_input import FoundTable, TableInput, Tally
from gmeta.preprocess.cluster.table_job import own_folder
from gmeta.preprocess.history.append import (
    AppendPlan,
    NewShard,
    append_shard,
    event_words,
    finish_append,
    plan_append,
    refuse_known,
)
from gmeta.preprocess.history.generation import Generation
from gmeta.preprocess.history.spec import HistorySpec
from gmeta.preprocess.source import Columns, Ints, join_rows, single
from gmeta.preprocess.tables.prepared_source import is_prepared
from gmeta.preprocess.tables.table_files import holds_records, refuse_equal


@dataclass(frozen=True)
class AppendJob(TableInput):
    """The description of an append: its input, and its effects on the store.

    Attributes:
      plan: The plan of the append.
      inputs: The files that are read -> their digests.
    """

    plan: AppendPlan
    inputs: Mapping[str, str]

    @classmethod
    def of_table(
        cls, table: FoundTable, store: Path, spec: HistorySpec, watermark: int | None, on_bad: str
    ) -> AppendJob:
        """Make the job that appends a table's events.

        Args:
          table: The table.
          store: The store's folder.
          spec: What `choose_spec` returned.
          watermark: The requested watermark; None: after the latest event.
          on_bad: The rule for bad records.

        Raises:
          ConfigError: The spec isn't the store's, or the watermark would decrease.
          DataError: An earlier append has read a file, or two files with records are equal.
        """
        rule = check_on_bad(on_bad)
        plan = plan_append(store, spec, table.spec, watermark)
        paths = [Path(file.path) for file in table.files] if table.bytes else []
        refuse_equal(paths, lambda path: holds_records(path, spec.csv))
        refuse_known(store, table.inputs, paths, spec.csv)
        return cls(table.name, table.spec, rule, table.files, plan, table.inputs)

    def shards_of(self, rows: Columns) -> Ints:
        """Return the shard of each event, (N,).

        Raises:
          DataError: An event's time is too late for any history.
        """
        words = event_words(self.plan.spec, rows)
        return user_shards(words[:, 0], self.plan.spec.shards)


def refuse_prepared(data: Sequence[str | os.PathLike[str]]) -> None:
    """Refuse prepared data sets and files of events, which workers of a cluster don't read.

    Raises:
      ConfigError: One of the inputs is one of them.
    """
    for path in data:
        if is_event_file(path):
            raise ConfigError(f"{path} has events of a store: append it with --engine duckdb")
        if is_prepared(path):
            raise ConfigError(f"{path} is a prepared data set: append it with --engine duckdb")


class ShardAppender:
    """A worker that writes shards of an append.

    Args:
      job: The append.
      folder: The folder of all shards, the same for every worker.
      attempt: A name of the attempt for people who look into the folder; it needn't be unique.
    """

    def __init__(self, job: AppendJob, folder: Path, attempt: str) -> None:
        self._job, self._folder, self._attempt = job, folder, attempt
        self._before: Generation | None = job.plan.open_before()

    def write(self, number: int, parts: Iterable[Columns]) -> NewShard:
        """Write a shard and its index, safely while other attempts write the same shard.

        Args:
          number: The shard's number.
          parts: All its events, in any order and cut anywhere.

        Raises:
          DataError: The store's shard is damaged.
          OSError: The file can't be written.
        """
        plan = self._job.plan
        held = [part for part in parts if len(single(part, plan.spec.user))]
        empty = np.empty((0, len(plan.spec.all_columns)), np.int64)
        words = event_words(plan.spec, join_rows(held)) if held else empty
        with own_folder(self._folder, self._attempt) as own:
            shard = append_shard(plan, self._before, own, number, words)
            for path, final in zip(shard_files(own, number), shard_files(self._folder, number), strict=True):
                path.replace(final)
        return shard


def finish_generation(
    job: AppendJob, folder: Path, written: Mapping[int, NewShard], tally: Tally
) -> HistoryManifest:
    """Check that no event is missing, and write the shards without new events and the manifest.

    Args:
      job: The append.
      folder: The generation's folder, with the shards that workers wrote.
      written: Shard -> its entry.
      tally: The tally of all records.

    Raises:
      DataError: A record is bad, and the rule is ``"raise"``; or all records are bad.
      GmetaError: Events were lost.
    """
    events = sum(shard.events for shard in written.values())
    job.check_rows(events, tally)
    if not events:
        raise DataError("every record in it is bad", path=job.path_of(0))
    appender = ShardAppender(job, folder, "empty")
    numbers = range(job.plan.spec.shards)
    shards = [written[n] if n in written else appender.write(n, ()) for n in numbers]
    return finish_append(job.plan, folder, shards, job.inputs)

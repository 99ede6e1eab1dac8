"""An append by many workers: the description that each worker reads, and the shards that they write.

Workers may be killed, repeated, or run twice at once: each writes in a folder of its own and renames what is
whole (`gmeta.preprocess.cluster.attempts`). They all write the same bytes.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.core.files import sync
from gmeta.core.history_manifest import HistoryManifest, current_generation, shard_files, user_shards
from gmeta.core.schema import check_on_bad
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.preprocess.cluster import row_text
from gmeta.preprocess.cluster.attempts import ATTEMPTS, own_folder, write_note
from gmeta.preprocess.cluster.streaming import SHARDS, TALLY_FILE, Task, count, count_bad, load_tally, run
from gmeta.preprocess.cluster.streaming_map import good_rows_of
from gmeta.preprocess.cluster.streaming_reduce import rows_of
from gmeta.preprocess.cluster.table_input import FoundTable, TableInput, Tally, find_table
from gmeta.preprocess.columns import Columns, Ints, join_rows, single
from gmeta.preprocess.history.append import (
    AppendPlan,
    NewShard,
    append_shard,
    choose_spec,
    event_words,
    finish_append,
    plan_append,
    refuse_known,
)
from gmeta.preprocess.history.generation import Generation, new_generation, settle_or_warn
from gmeta.preprocess.history.spec import HistorySpec
from gmeta.preprocess.tables.prepared_source import is_prepared
from gmeta.preprocess.tables.table_files import holds_records, refuse_equal


@dataclass(frozen=True)
class AppendJob(TableInput):
    """The description of an append: its input, and what it does to the store.

    Attributes:
      plan: What it does.
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
          watermark: The watermark that is asked for; None: behind the latest event.
          on_bad: The rule for bad records.

        Raises:
          ConfigError: The spec isn't the store's, or the watermark would go back.
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
    """Refuse prepared data sets, which workers of a cluster don't read.

    Raises:
      ConfigError: One of the data is such.
    """
    for path in data:
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
        """Write a shard and its index, safely beside other attempts at the same shard.

        Args:
          number: The shard's number.
          parts: All its events, in any order and cut anywhere.

        Raises:
          DataError: What the store has is damaged.
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
    """Check that all events are there, write the shards that got none, and the manifest.

    Args:
      job: The append.
      folder: The generation's folder, with the shards that workers wrote.
      written: Shard -> what was written of it.
      tally: The tally of all records.

    Raises:
      DataError: A record is bad, and the rule is ``"raise"``; or all are.
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


# ``gmeta-append``: an append to a store of histories as Hadoop Streaming runs it.
#
# ==========  ==================================  ==========================================================
# stage       reads                               writes
# ==========  ==================================  ==========================================================
# ``map``     lines of the table                  events, by shard and user
# ``reduce``  what ``gmeta-append map`` wrote     shards, and what the manifest says of each, in the job's
#                                                 folder
# ``finish``  nothing                             the manifest, and the store's new generation
# ==========  ==================================  ==========================================================
#
# A line between them is a key, a tab, and an event (`gmeta.preprocess.cluster.row_text`). Partition by the
# key's first field, up to the ``.``, and sort by the bytes of the whole key.

_NOTE = ".json"


def plan_jobs(
    folder: Path,
    store: Path,
    data: Sequence[str],
    spec: HistorySpec | None,
    *,
    watermark: int | None = None,
    on_bad: str = "raise",
) -> AppendJob:
    """Describe an append in a job's folder, which all machines see.

    Args:
      folder: The job's folder; what an earlier job has left in it is removed.
      store: The store's folder, on a file system that all machines see.
      data: Files, folders and patterns of CSV or JSON lines on this machine, the same as on the cluster.
      spec: The description of the columns. None: what the first append was given.
      watermark: The watermark; None: behind the latest event.
      on_bad: The rule for bad records.

    Raises:
      ConfigError: There is no spec, or it isn't the store's, or the watermark would go back.
      DataError: A file can't be read, or an earlier append has read it.
    """
    refuse_prepared(data)
    store = store.absolute()
    settle_or_warn(store)
    chosen = choose_spec(store, spec)
    job = AppendJob.of_table(find_table(data, chosen.table()), store, chosen, watermark, on_bad)
    shutil.rmtree(folder / SHARDS, ignore_errors=True)
    (folder / SHARDS).mkdir(parents=True)
    (folder / TALLY_FILE).unlink(missing_ok=True)
    job.save(folder)
    return job


def map_events(task: Task[AppendJob]) -> None:
    """Write all good rows, and the tally of the bad records as a line among them, so that it is counted once.

    Raises:
      DataError: A record is bad, and the rule is ``"raise"``.
    """
    job, tally = task.job, Tally()
    for part in good_rows_of(task, tally):
        key = row_text.keys(job.shards_of(part), [single(part, job.spec.task)])
        row_text.write_rows(task.sink, key, part, job.columns())
    task.refuse_bad(tally)
    row_text.write_tally(task.sink, tally.to_json())
    count("rows read", tally.rows_read)
    count_bad(tally)


def reduce_events(task: Task[AppendJob]) -> None:
    """Write shards, and beside each a note of what the manifest says of it.

    Raises:
      DataError: What the store has is damaged.
      OSError: The disk is full.
    """
    folder = task.folder / SHARDS
    appender = ShardAppender(task.job, folder, task.attempt)
    for number, found in itertools.groupby(rows_of(task, ()), key=lambda one: one[0]):
        if number < 0:
            tally = Tally()
            for _, (text, _) in found:
                tally.merge(Tally.from_json(text))
            write_note(task.folder / TALLY_FILE, tally.to_json(), task.attempt)
            continue
        shard = appender.write(number, (part for _, (_, part) in found))
        # The note goes last: `finish` treats a shard as written once its note exists.
        write_note(folder / f"{number:06d}{_NOTE}", json.dumps(to_mapping(shard)), task.attempt)
        count("events written", shard.events)
        count("shards written", 1)


def finish(task: Task[AppendJob]) -> None:
    """Check that all events are there, and move the store to its new generation; repeated, do nothing.

    Raises:
      DataError: The tally is missing.
      GmetaError: Events were lost, or another process has written to the store meanwhile.
    """
    job, folder = task.job, task.folder / SHARDS
    store, plan = Path(job.plan.store), job.plan
    if current_generation(store) < plan.generation or plan.load().inputs != job.inputs:
        tally = load_tally(task.folder, advice="run the job first")
        notes = {int(note.stem): note for note in folder.glob(f"*{_NOTE}")}
        written = {n: from_mapping(NewShard, json.loads(note.read_text())) for n, note in notes.items()}
        with new_generation(store, plan.before) as (_, partial):
            for number in written:
                for source, final in zip(
                    shard_files(folder, number), shard_files(partial, number), strict=True
                ):
                    _put(source, final)
            finish_generation(job, partial, written, tally)
    for each in (folder, task.folder / ATTEMPTS):
        shutil.rmtree(each, ignore_errors=True)
    task.sink.write(f"generation {plan.generation} of {store}\n".encode())


def _put(source: Path, final: Path) -> None:
    """Put a file into another folder and leave it where it is: whoever is killed may begin anew."""
    try:
        os.link(source, final)
    except OSError:  # another file system, or one without links
        try:
            shutil.copyfile(source, final)
            sync(final)
        except OSError as error:
            raise GmetaError(f"can't copy {source} to {final}: {error.strerror}") from error


STAGES = {"map": map_events, "reduce": reduce_events, "finish": finish}
"""Name -> the function that runs the stage."""


def main() -> None:
    """Run the console script."""
    run("gmeta-append", AppendJob, STAGES, "An append to a store of histories as Hadoop Streaming runs it.")


if __name__ == "__main__":
    main()

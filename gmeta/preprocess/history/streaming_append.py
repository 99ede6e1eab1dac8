"""``gmeta-append``: an append to a store of histories as Hadoop Streaming runs it.

==========  ==================================  ==========================================================
stage       reads                               writes
==========  ==================================  ==========================================================
``map``     lines of the table                  events, by shard and user
``reduce``  what ``gmeta-append map`` wrote     shards, and the manifest's entry of each, in the job's
                                                folder
``finish``  nothing                             the manifest, and the store's new generation
==========  ==================================  ==========================================================

A line between the stages is a key, a tab, and an event (`gmeta.preprocess.cluster.row_text`). Partition by
the key's first field, up to the ``.``, and sort by the bytes of the whole key.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from gmeta.core.errors import GmetaError
from gmeta.core.files import sync
from gmeta.core.history_manifest import current_generation, shard_files
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.preprocess.cluster import row_text
from gmeta.preprocess.cluster.streaming_jobs import (
    SHARDS,
    TALLY_FILE,
    Task,
    count,
    count_bad,
    good_rows_of,
    load_tally,
    rows_of,
    run,
)
from gmeta.preprocess.cluster.table_input import Tally, find_table
from gmeta.preprocess.cluster.table_job import ATTEMPTS, write_note
from gmeta.preprocess.history.append import NewShard, choose_spec
from gmeta.preprocess.history.cluster_append import (
    AppendJob,
    ShardAppender,
    finish_generation,
    refuse_prepared,
)
from gmeta.preprocess.history.generation import new_generation, settle_or_warn
from gmeta.preprocess.history.spec import HistorySpec
from gmeta.preprocess.source import single

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
      folder: The job's folder; the files of an earlier job in it are removed.
      store: The store's folder, on a file system that all machines see.
      data: Files, folders and patterns of CSV or JSON lines on this machine, the same as on the cluster.
      spec: The description of the columns. None: that of the first append.
      watermark: The watermark; None: after the latest event.
      on_bad: The rule for bad records.

    Raises:
      ConfigError: There is no spec, it isn't the store's, or the watermark would decrease.
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
    """Write shards, and beside each its entry for the manifest.

    Raises:
      DataError: The store's shard is damaged.
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
    """Check that no event is missing, and move the store to its new generation; do nothing if repeated.

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
    """Link a file into another folder and keep it in place, so that a killed process can start again."""
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

"""``gmeta-reduce``: the reducers of the preparation for Hadoop Streaming, and its last stage.

=============  ==========================================  ==================================================
stage          reads                                       writes
=============  ==========================================  ==================================================
``bounds``     ``gmeta-map sample``, one reducer           the bounds of the ranges
``tasks``      ``gmeta-map rows``                          rows in order, numbered in their tasks
``shards``     ``gmeta-map batches``                       shards, and the manifest's entry of each
``finish``     nothing                                     the manifest
=============  ==========================================  ==================================================

Shards, bounds and counts go to the job's folder; each gets its final name only when it is whole. Attempts may
be killed, repeated, or run twice at once: they write the same bytes.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.core.files import put_in_place
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.preprocess.cluster import row_text
from gmeta.preprocess.cluster.streaming_map import (
    BOUNDS,
    COLLECTED,
    COUNTS,
    SHARDS,
    TALLY_FILE,
    Task,
    count,
    count_bad,
    load_tally,
    range_order,
    run,
)
from gmeta.preprocess.cluster.table_input import Tally
from gmeta.preprocess.cluster.table_job import TableJob, collect, write_attempt, write_note
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.plan.outcome import Census
from gmeta.preprocess.plan.ranges import COUNT, POSITION, RangeCount, bounds_of, number_rows, runs
from gmeta.preprocess.source import NUMBER, Columns, join_rows, row_count, single, take

_SPLIT = 1 << 20  # bytes parsed at once: a reducer holds a range in memory, and little else


def bounds(task: Task[TableJob]) -> None:
    """Choose the ranges, and delete the counts and texts of an earlier run, whose input may differ."""
    samples = []
    for block in row_text.blocks(task.source):
        samples += [*runs(*row_text.read_rows(block, task.job.columns()))]
    found = bounds_of(samples, range_order(task), task.job.ranges)
    (task.folder / COUNTS).mkdir(exist_ok=True)
    collected = (task.folder / COLLECTED).glob("*")
    for path in [task.folder / TALLY_FILE, *(task.folder / COUNTS).glob("*.json"), *collected]:
        path.unlink(missing_ok=True)
    if found is not None:
        number = np.arange(1, row_count(found) + 1)
        row_text.write_rows(task.sink, row_text.keys(number, ()), found, task.job.columns())
        with (task.folder / BOUNDS).open("wb") as file:
            row_text.write_rows(file, row_text.keys(number, ()), found, task.job.columns())
    else:
        (task.folder / BOUNDS).write_bytes(b"")


def tasks(task: Task[TableJob]) -> None:
    """Sort each range, number its rows, and count them.

    Raises:
      DataError: A key is repeated in a task, and the rule is ``"raise"``.
    """
    job, columns = task.job, task.job.columns(POSITION, COUNT)
    tally: Tally | None = None
    added = (NUMBER,) if job.spec.unique else ()
    for number, found in itertools.groupby(rows_of(task, added), key=lambda one: one[0]):
        if number < 0:
            tally = Tally()
            for _, (text, _) in found:
                tally.merge(Tally.from_json(text))
            write_note(task.folder / TALLY_FILE, tally.to_json(), task.attempt)
            continue
        whole = join_rows([part for _, (_, part) in found])
        repeated = Tally()
        if added:
            whole = take(whole, plan.row_order(whole, (*job.spec.order, NUMBER)))
            again = plan.find_repeated(whole, job.spec.task, job.spec.unique)
            repeated.add_repeated(take(whole, np.flatnonzero(again)), job.spec)
            task.refuse_bad(repeated)
            count_bad(repeated)
            whole = take(whole, np.flatnonzero(~again))
        numbered = number_rows(whole, job.spec)
        row_text.write_rows(
            task.sink, row_text.keys(np.full(row_count(numbered), number), ()), numbered, columns
        )
        counted = RangeCount.of(number, single(numbered, job.spec.task), job.config)
        note = {"count": to_mapping(counted), "tally": repeated.to_json()}
        write_note(task.folder / COUNTS / f"{number:06d}.json", json.dumps(note), task.attempt)
        count("rows sorted", row_count(numbered))


def rows_of(task: Task[Any], added: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, Columns]]]:
    """Yield (-1, (tally, no rows)) for each tally, then (range, ("", rows)) in the order of the ranges."""
    columns = task.job.columns(*added)
    for block in row_text.blocks(task.source, _SPLIT):
        tallies, lines = row_text.without_tallies(block)
        for tally in tallies:
            yield -1, (tally, {})
        if lines:
            for number, part in runs(*row_text.read_rows(lines, columns)):
                yield number, ("", part)


def shards(task: Task[TableJob]) -> None:
    """Write shards, and print each shard's manifest entry.

    Raises:
      DataError: A batch is too large for a record.
      OSError: The disk is full.
    """
    job = task.job
    folder = task.folder / SHARDS
    folder.mkdir(exist_ok=True)
    parts = (
        one
        for block in row_text.blocks(task.source, _SPLIT)
        for one in runs(*row_text.read_rows(block, job.columns(job.spec.batch)))
    )
    for place, found in itertools.groupby(parts, key=lambda one: one[0]):
        shard = write_attempt(
            folder, place, job.spec.schema, job.config, (part for _, part in found), task.attempt
        )
        task.sink.write(f"{shard.name}\t{json.dumps(asdict(shard))}\n".encode())
        count("rows written", shard.rows)
        count("shards written", 1)


def finish(task: Task[TableJob]) -> None:
    """Check that the data set is complete, and move it to its final place.

    Raises:
      DataError: A shard is missing or isn't whole, rows were lost, or a split would be empty.
    """
    job = task.job
    if job.is_done():
        return
    tally = load_tally(task.folder, advice="run the job of the tasks")
    notes = [json.loads(path.read_text()) for path in sorted((task.folder / COUNTS).glob("*.json"))]
    for note in notes:
        tally.merge(Tally.from_json(note["tally"]))
    census = Census((from_mapping(RangeCount, note["count"]) for note in notes), job.config)
    job.check(census, tally)
    folder = task.folder / SHARDS
    folder.mkdir(exist_ok=True)
    found = collect(folder, job.spec.schema, job.config, census.of_splits())
    summary = job.finish(folder, found, census, tally, task.folder / COLLECTED)
    put_in_place(folder, Path(os.path.realpath(job.out)))
    task.sink.write(f"{summary.rows} rows of {summary.tasks} tasks: {job.out}\n".encode())


STAGES = {"bounds": bounds, "tasks": tasks, "shards": shards, "finish": finish}
"""Name -> the function that runs the stage."""


def main() -> None:
    """Run the console script."""
    run("gmeta-reduce", TableJob, STAGES, "A reducer of `gmeta prepare` as Hadoop Streaming runs it.")


if __name__ == "__main__":
    main()

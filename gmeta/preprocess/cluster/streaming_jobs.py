"""``gmeta-map`` and ``gmeta-reduce``: the preparation for Hadoop Streaming, whose jobs read and write lines.

==================  ===========================================  ============================================
stage               reads                                        writes
==================  ===========================================  ============================================
``map sample``      lines of the table                           some rows
``reduce bounds``   what ``map sample`` wrote, one reducer       the bounds of the ranges
``map rows``        lines of the table                           rows, by range, task and time
``reduce tasks``    what ``map rows`` wrote                      rows in order, numbered in their tasks
``map batches``     what ``reduce tasks`` wrote                  rows, by shard and the order in it
``reduce shards``   what ``map batches`` wrote                   shards, and the manifest's entry of each
``reduce finish``   nothing                                      the manifest
==================  ===========================================  ============================================

A line of a mapper's output is a key, a tab, and a row (`gmeta.preprocess.cluster.row_text`). Partition by the
key's first field, up to the ``.``, and sort by the bytes of the whole key.

Shards, bounds and counts go to the job's folder; each gets its final name only when it is whole. Attempts may
be killed, repeated, or run twice at once: they write the same bytes.

`run` and `Task` are the common parts of the Hadoop Streaming programs: their options, errors and counters.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import click
import numpy as np

from gmeta.core.errors import DataError, GmetaError
from gmeta.core.files import put_in_place
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.preprocess.cluster import row_text
from gmeta.preprocess.cluster.row_text import parse_lines
from gmeta.preprocess.cluster.table_input import TableInput, Tally, good_rows
from gmeta.preprocess.cluster.table_job import TableJob, collect, write_attempt, write_note
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.plan.outcome import Census
from gmeta.preprocess.plan.placement import comparable
from gmeta.preprocess.plan.ranges import (
    COUNT,
    KEY,
    PLACE,
    POSITION,
    RangeCount,
    Sampler,
    bounds_of,
    edges,
    number_rows,
    place_rows,
    range_of,
    runs,
)
from gmeta.preprocess.plan.texts import TextCollector
from gmeta.preprocess.source import NUMBER, BadRecords, Columns, Values, join_rows, row_count, single, take

COUNTS, SHARDS, COLLECTED = "counts", "shards", "collected"
TALLY_FILE, BOUNDS = "tally.json", "bounds.tsv"
"""File and folder names in the job's folder (`gmeta.preprocess.cluster.table_job`)."""

J = TypeVar("J", bound=TableInput)
Stage = Callable[["Task[J]"], None]


class Task(Generic[J]):
    """One mapper or reducer.

    Args:
      job: The job that the task belongs to.
      folder: The job's folder.
      source: Standard input.
      sink: Standard output.

    Attributes:
      attempt: The name that Hadoop gives to this attempt.
    """

    def __init__(self, job: J, folder: Path, source: IO[bytes], sink: IO[bytes]) -> None:
        self.job, self.folder, self.source, self.sink = job, folder, source, sink
        self.attempt = os.environ.get("mapreduce_task_attempt_id", "attempt")  # noqa: SIM112 - Hadoop's

    def refuse_bad(self, tally: Tally) -> None:
        """Raise an error if the rule is ``"raise"`` and the tally has a bad record.

        Raises:
          DataError: There is a bad record.
        """
        if self.job.on_bad == "raise":
            tally.report(BadRecords("raise"), self.job.path_of)


def count(name: str, number: int) -> None:
    """Add to one of Hadoop's counters."""
    if number:
        sys.stderr.write(f"reporter:counter:gmeta,{name},{number}\n")


def count_bad(tally: Tally) -> None:
    """Add the bad records of each reason to that reason's Hadoop counter."""
    for (_, reason), number in tally.counts.items():
        count(f"bad: {reason.value}", number)


def load_tally(folder: Path, *, advice: str) -> Tally:
    """Read the tally that a reducer has written into the job's folder.

    Raises:
      DataError: The file doesn't exist.
    """
    path = folder / TALLY_FILE
    try:
        return Tally.from_json(path.read_text())
    except OSError as error:
        raise DataError(f"no tally of the records: {error.strerror}", path=path, advice=advice) from error


def run(program: str, jobs: type[J], stages: Mapping[str, Stage[J]], about: str) -> None:
    """Run the stage that the command line names, and print an error as one line.

    Args:
      program: The program's name.
      jobs: The class of its jobs.
      stages: Name -> the function that runs the stage.
      about: The description of the program in its help.
    """

    @click.command(program, help=about, context_settings={"help_option_names": ["-h", "--help"]})
    @click.argument("stage", type=click.Choice(list(stages)))
    @click.option(
        "--job",
        type=click.Path(path_type=Path),
        envvar="GMETA_JOB",
        required=True,
        help="The job's folder, which all machines see; `--engine streaming` makes it.",
    )
    def command(stage: str, job: Path) -> None:
        try:
            task = Task(jobs.load(job), job, sys.stdin.buffer, sys.stdout.buffer)
            stages[stage](task)
            sys.stdout.buffer.flush()
        except (GmetaError, OSError) as error:
            text = str(error)
            if isinstance(error, OSError):
                text = f"{error.filename or job}: {error.strerror or error}"
            click.echo(f"{program} {stage}: error: {text}", err=True)
            sys.exit(GmetaError.exit_code)

    command()


def sample(task: Task[TableJob]) -> None:
    """Write a sample of the good rows; the next job counts the bad records."""
    sampler = Sampler()
    for rows in good_rows_of(task, Tally()):
        sampler.add(rows)
    if (kept := sampler.rows()) is not None:
        key = row_text.keys(np.full(row_count(kept), sampler.stride), ())
        row_text.write_rows(task.sink, key, kept, task.job.columns())


def rows(task: Task[TableJob]) -> None:
    """Write all good rows, and the tally of the bad records as a line among them, so that it is counted once.

    The texts go to a file of the job's folder.

    Raises:
      DataError: A record is bad, and the rule is ``"raise"``.
    """
    job, tally = task.job, Tally()
    bounds = read_bounds(task)
    order = range_order(task)
    added = (NUMBER,) if job.spec.unique else ()
    texts = job.texts()
    for part in good_rows_of(task, tally, texts):
        task.refuse_bad(tally)
        number = range_of(part, bounds, order)
        found: dict[str, Values] = {**part}
        if added:
            found[NUMBER] = np.full(row_count(part), job.file_of(_input_file()))
        key = row_text.keys(number, [comparable(single(part, name)) for name in job.spec.presort])
        row_text.write_rows(task.sink, key, found, job.columns(*added))
    task.refuse_bad(tally)
    texts.save(task.folder / COLLECTED)
    row_text.write_tally(task.sink, tally.to_json())
    count("rows read", tally.rows_read)
    count_bad(tally)


def batches(task: Task[TableJob]) -> None:
    """Send every kept row, with its batch, to its shard.

    Raises:
      DataError: The previous job hasn't ended.
    """
    job = task.job
    notes = [json.loads(path.read_text()) for path in (task.folder / COUNTS).glob("*.json")]
    counts = [from_mapping(RangeCount, note["count"]) for note in notes]
    known = edges(counts)
    columns = job.columns(job.spec.batch)
    for block in row_text.blocks(task.source):
        number, numbered = row_text.read_rows(block, job.columns(POSITION, COUNT))
        for found, part in runs(number, numbered):
            if found not in known:
                advice = "run the job before again"
                raise DataError(f"range {found} wasn't counted", path=task.folder / COUNTS, advice=advice)
            placed = place_rows(part, known[found], job.spec, job.config)
            sort = [single(placed, name) for name in (KEY, job.spec.task, POSITION)]
            row_text.write_rows(task.sink, row_text.keys(single(placed, PLACE), sort), placed, columns)


def range_order(task: Task[TableJob]) -> tuple[str, ...]:
    """Return the columns that decide a row's range.

    If keys may not repeat in a task, this is the task's column alone, so that a task stays whole.
    """
    return (task.job.spec.task,) if task.job.spec.unique else task.job.spec.order


def read_bounds(task: Task[TableJob]) -> Columns | None:
    """Read the bounds of the ranges.

    Raises:
      DataError: The file of bounds doesn't exist.
    """
    path = task.folder / BOUNDS
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"no bounds of ranges: {error.strerror}", path=path, advice="run the job of the sample first"
        ) from error
    return row_text.read_rows(text, task.job.columns())[1] if text else None


def good_rows_of(task: Task[Any], tally: Tally, texts: TextCollector | None = None) -> Iterator[Columns]:
    """Yield the good rows of a mapper's lines, and count its bad records.

    Raises:
      DataError: The file isn't text; or a record is bad, and the rule is ``"raise"``.
    """
    job, file = task.job, task.job.file_of(_input_file())
    form = job.files[file].form
    if form is None:
        raise DataError(
            "only lines of text can be streamed", path=job.path_of(file), advice="use --engine spark"
        )
    for block in row_text.blocks(task.source):
        for batch, refused in parse_lines(block, form, job.spec):
            tally.add_refused(file, refused)
            if (found := good_rows(batch, job.spec, file, tally, texts)) is not None:
                yield found
            task.refuse_bad(tally)


def _input_file() -> str | None:
    return os.environ.get("mapreduce_map_input_file")  # noqa: SIM112 - Hadoop's name


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


MAPPERS = {"sample": sample, "rows": rows, "batches": batches}
REDUCERS = {"bounds": bounds, "tasks": tasks, "shards": shards, "finish": finish}
"""Name -> the function that runs the stage."""


def main_of_mappers() -> None:
    """Run the console script ``gmeta-map``."""
    run("gmeta-map", TableJob, MAPPERS, "A mapper of `gmeta prepare` as Hadoop Streaming runs it.")


def main_of_reducers() -> None:
    """Run the console script ``gmeta-reduce``."""
    run("gmeta-reduce", TableJob, REDUCERS, "A reducer of `gmeta prepare` as Hadoop Streaming runs it.")

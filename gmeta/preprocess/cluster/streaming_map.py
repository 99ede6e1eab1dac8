"""``gmeta-map``: the mappers of the preparation for Hadoop Streaming; they read and write lines.

=============  ===========================================  =================================================
stage          reads                                        writes
=============  ===========================================  =================================================
``sample``     lines of the table                           some rows, for ``gmeta-reduce bounds``
``rows``       lines of the table                           rows, by range, task and time
``batches``    what ``gmeta-reduce tasks`` wrote            rows, by shard and the order in it
=============  ===========================================  =================================================

A line of output is a key, a tab, and a row (`gmeta.preprocess.cluster.row_text`). Partition by the key's
first field, up to the ``.``, and sort by the bytes of the whole key.

`run` and `Task` are the common parts of the Hadoop Streaming programs: their options, errors and counters.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import click
import numpy as np

from gmeta.core.errors import DataError, GmetaError
from gmeta.core.settings import from_mapping
from gmeta.preprocess.cluster import row_text
from gmeta.preprocess.cluster.row_text import parse_lines
from gmeta.preprocess.cluster.table_input import TableInput, Tally, good_rows
from gmeta.preprocess.cluster.table_job import TableJob
from gmeta.preprocess.plan.placement import comparable
from gmeta.preprocess.plan.ranges import (
    COUNT,
    KEY,
    PLACE,
    POSITION,
    RangeCount,
    Sampler,
    edges,
    place_rows,
    range_of,
    runs,
)
from gmeta.preprocess.plan.texts import TextCollector
from gmeta.preprocess.source import NUMBER, BadRecords, Columns, Values, row_count, single

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


STAGES = {"sample": sample, "rows": rows, "batches": batches}
"""Name -> the function that runs the stage."""


def main() -> None:
    """Run the console script."""
    run("gmeta-map", TableJob, STAGES, "A mapper of `gmeta prepare` as Hadoop Streaming runs it.")


if __name__ == "__main__":
    main()

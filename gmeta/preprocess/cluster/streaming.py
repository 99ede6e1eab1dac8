"""The common parts of the Hadoop Streaming programs: their options, errors and counters."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Generic, TypeVar

import click

from gmeta.core.errors import DataError, GmetaError
from gmeta.preprocess.cluster.table_input import TableInput, Tally
from gmeta.preprocess.source import BadRecords

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
      attempt: The name of this attempt, as Hadoop gives it.
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
      DataError: It isn't there.
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
      jobs: The kind of its jobs.
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

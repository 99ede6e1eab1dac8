"""Options that several subcommands take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import click
from click.core import ParameterSource

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.json_values import FILE_NAME as MANIFEST
from gmeta.core.schema import ON_BAD
from gmeta.preprocess.config import ENGINES

F = TypeVar("F", bound=Callable[..., object])

DATA = Path("data")
"""The default folder that `gmeta prepare` makes and `gmeta train` reads."""

RUN = Path("runs/default")
"""The default folder of a run."""

FAMILY = click.Choice(["cold-start", "ranking", "next-item", "retrieval"])
"""The values of ``--for``."""

run_option = click.option(
    "--run",
    "run_path",
    default=RUN,
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder of the run.",
)

on_bad_option = click.option(
    "--on-bad",
    type=click.Choice(ON_BAD),
    default="raise",
    show_default=True,
    help="What a bad record or a task too small to split does: end the run, or be counted and left out.",
)

seen_option = click.option(
    "--seen/--no-seen",
    default=None,
    help="For next-item and retrieval, whether items of a history may be shown again.  [default: as the run "
    "was measured]",
)


def find_data(own: Path) -> Path:
    """Find the data set of a run: its own folder, or else the default one of `gmeta prepare`.

    Raises:
      DataError: Neither exists.
    """
    for folder in (own, DATA):
        if (folder / MANIFEST).exists():
            return folder
    raise DataError(
        f"no prepared data set, neither here nor in {DATA}",
        path=own,
        advice="run `gmeta prepare` first, or name one with --data",
    )


def refuse_options(context: click.Context, of_family: Mapping[str, Sequence[str]], family: str) -> None:
    """Refuse options that only runs of other families take.

    Args:
      context: The command's context.
      of_family: Family of runs -> the parameters that only some families take, this one among them.
      family: The family of the run.

    Raises:
      ConfigError: Such an option is given.
    """
    own = of_family.get(family, ())
    for name in dict.fromkeys(name for names in of_family.values() for name in names if name not in own):
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            flag = next(each.opts[-1] for each in context.command.params if each.name == name)
            others = " and ".join(other for other, names in of_family.items() if name in names)
            raise ConfigError(f"{flag} is for runs of {others}, and this is one of {family}: leave it out")


def engine_options(command: F) -> F:
    """Add the options of the engine: --engine, --job, --spark-master and --spark-conf."""
    for option in (
        click.option(
            "--spark-conf", multiple=True, metavar="NAME=VALUE", help="A setting of Spark; may be repeated."
        ),
        click.option(
            "--spark-master", help="With --engine spark: such as local[4].  [default: spark-submit's]"
        ),
        click.option(
            "--job",
            type=click.Path(path_type=Path),
            help="With --engine streaming: the folder to make for the jobs, on a file system that all "
            "machines see.",
        ),
        click.option(
            "--engine",
            type=click.Choice(ENGINES),
            default=ENGINES[0],
            show_default=True,
            help="What does the work: this process, Spark, or jobs of Hadoop Streaming; to the same bytes.",
        ),
    ):
        command = option(command)
    return command

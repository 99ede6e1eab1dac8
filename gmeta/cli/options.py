"""Options that several subcommands take."""

from __future__ import annotations

from pathlib import Path

import click

from gmeta.core.data.on_bad import ON_BAD

DATA = Path("data")
"""The default folder that `gmeta prepare` makes and `gmeta train` reads."""

RUN = Path("runs/default")
"""The default folder of a run."""

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

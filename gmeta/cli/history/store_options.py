"""The arguments that the subcommands of ``gmeta history`` share."""

from __future__ import annotations

from pathlib import Path

import click

store_argument = click.argument("store", type=click.Path(path_type=Path))
generation_option = click.option(
    "--generation", type=int, help="Number of the generation.  [default: the newest]"
)

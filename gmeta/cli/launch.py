"""``gmeta launch``: runs a user's program on several ranks of this machine."""

from __future__ import annotations

import click

from gmeta.cli.rank_options import elastic_of, elastic_options, run_ranks
from gmeta.core.collectives.place import launched_size, under_launcher
from gmeta.core.errors import ConfigError


@click.command("launch", context_settings={"allow_interspersed_args": False})
@click.option("--np", "size", type=click.IntRange(min=1), required=True, help="How many ranks.")
@elastic_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    size: int, elastic: bool, min_np: int | None, script: str | None, command: tuple[str, ...]
) -> None:
    """Run COMMAND, such as `python train.py`, as the ranks of a job on this machine.

    The program must call gmeta.init(). An elastic program trains with
    gmeta.checkpoint.ShardedCheckpoint(...).fit, which continues from the last checkpoint.
    """
    if under_launcher():
        raise ConfigError(
            f"this is one of {launched_size()} ranks already; call gmeta launch outside of them"
        )
    run_ranks(command, size, elastic=elastic_of(size, elastic, min_np, script))

"""Subcommands of ``gmeta history`` that read a store."""

from __future__ import annotations

from pathlib import Path

import click

from gmeta.cli.history.store_options import generation_option, store_argument
from gmeta.core.errors import ConfigError


@click.command()
@store_argument
@generation_option
def verify(store: Path, generation: int | None) -> None:
    """Read all of a generation and compare it with its checksums; exit with 1 if it is damaged."""
    from gmeta.preprocess.history.verify import verify_history

    found = verify_history(store, generation)
    for fault in found.faults:
        click.echo(f"damaged: {fault}")
    click.echo(
        f"generation {found.generation}: {found.stripes:,} stripes with {found.events:,} events, "
        f"{len(found.faults):,} of them damaged"
    )
    click.get_current_context().exit(1 if found.faults else 0)


@click.command()
@store_argument
@click.option("--user", required=True, help="The user.")
@click.option("--until", type=int, help="Show only events before this time.")
@click.option("--longest", default=20, show_default=True, help="Most events, the newest.")
@generation_option
def show(store: Path, user: str, until: int | None, longest: int, generation: int | None) -> None:
    """Print a user's history, oldest event first, as a store or one of its generations has it."""
    from gmeta.core.data.history_manifest import BIRTH
    from gmeta.preprocess import HistorySpec
    from gmeta.preprocess.history.files.generation import Generation
    from gmeta.preprocess.history.named_histories import read_histories

    opened = Generation(store)
    if longest < 0:
        raise ConfigError(f"--longest must be 0 or more, got {longest}")
    number = HistorySpec.from_json(opened.manifest.spec).user_number(user)
    if opened.is_deleted(number, generation):
        click.echo(f"events of user {user} were deleted")
    for group, columns in opened.manifest.groups.items():
        names = [opened.manifest.spec["time"], BIRTH, *(column.name for column in columns)]
        found = read_histories(
            opened, [number], names, until=until, generation=generation, longest=longest
        ).columns
        rows = zip(*(found[name] for name in names), strict=True)
        click.echo(f"{group}: {len(found[BIRTH]):,} events")
        for row in [names, *rows]:
            click.echo("  ".join(f"{value!s:>12}" for value in row))

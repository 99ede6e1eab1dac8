"""Subcommands of ``gmeta history`` that read a store."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

import click

from gmeta.cli.history.store_options import (
    find_users,
    generation_option,
    store_argument,
    user_option,
    users_option,
)
from gmeta.core.errors import ConfigError


@click.command()
@store_argument
@generation_option
def verify(store: Path, generation: int | None) -> None:
    """Read all of a generation and compare it with its checksums; exit with 1 if it is damaged.

    A deletion that a killed process has begun is finished first. What can't be removed is named, as is what
    isn't of the store; it exits with 1 then too. The registered sets of examples are looked at too: whether
    they are there, as they were registered, and the generations that they read.
    """
    from gmeta.preprocess.history.example_sets import find_faults
    from gmeta.preprocess.history.verify import verify_history

    found = verify_history(store, generation)
    examples = list(find_faults(store))
    for fault in found.faults:
        click.echo(f"damaged: {fault}")
    click.echo(
        f"generation {found.generation}: {found.stripes:,} stripes with {found.events:,} events, "
        f"{len(found.faults):,} of them damaged"
    )
    for line in (*found.left, *found.uncommitted):
        click.echo(f"left: {line}")
    for fault in examples:
        click.echo(f"not as registered: {fault}")
    click.get_current_context().exit(1 if found.faults or found.left or examples else 0)


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
    from gmeta.preprocess.history.files.generation import Generation, settle_or_warn
    from gmeta.preprocess.history.named_histories import read_histories

    settle_or_warn(store)
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


@click.command("export")
@store_argument
@click.argument("out", type=click.Path(path_type=Path))
@generation_option
@click.option("--until", type=int, help="Write only events before this time.")
@user_option
@users_option
def export_events(
    store: Path,
    out: Path,
    generation: int | None,
    until: int | None,
    users: tuple[str, ...],
    users_file: TextIO | None,
) -> None:
    """Write events as Parquet into the folder OUT, which appears whole or not at all.

    There is a file for each shard that has events, and a spec with which `append` reads the files. --user and
    --users write only the events of these users.
    """
    from gmeta.cli.prepare_output import PrepareProgress
    from gmeta.preprocess import export_history

    named = find_users(store, users, users_file) if users or users_file else None
    with PrepareProgress() as progress:
        done = export_history(store, out, generation=generation, until=until, users=named, progress=progress)
    absent = f"; {done.absent:,} of the users asked for have none" if done.absent else ""
    click.echo(
        f"generation {done.generation}: {done.events:,} events of {done.users:,} users in {done.files:,} "
        f"files, {done.bytes:,} bytes, in {done.seconds:.1f} s{absent}"
    )

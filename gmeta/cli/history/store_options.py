"""The arguments that the subcommands of ``gmeta history`` share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import click

from gmeta.preprocess.history.files.generation import Generation
from gmeta.preprocess.history.spec import HistorySpec

store_argument = click.argument("store", type=click.Path(path_type=Path))
generation_option = click.option(
    "--generation", type=int, help="Number of the generation.  [default: the newest]"
)
user_option = click.option("--user", "users", multiple=True, help="A user; may be repeated.")
users_option = click.option(
    "--users", "users_file", type=click.File(), help="A file with a user in each line; `-` is the input."
)


def find_users(store: Path, users: Sequence[str], users_file: TextIO | None) -> list[int]:
    """Return the numbers by which a store knows the users that the two options name.

    Raises:
      ConfigError: Users are numbers, and one isn't.
      DataError: There is no store.
    """
    spec = HistorySpec.from_json(Generation(store).manifest.spec)
    lines = [] if users_file is None else users_file.read().splitlines()
    return [spec.user_number(each.strip()) for each in (*users, *lines) if each.strip()]

"""``gmeta history``: makes, grows, checks and shows a store of users' histories."""

from __future__ import annotations

import click

from gmeta.cli.history import changes, example_sets, views

__all__ = ["command"]


@click.group("history")
def command() -> None:
    """Keep users' histories in a store, and see what is in it.

    A store is a folder of generations. Each append makes one, and changes nothing of those before it, so a
    history can be rebuilt as it was at any time.
    """


for each in (
    *(changes.append, changes.compact, changes.scrub, changes.drop),
    example_sets.examples,
    *(views.verify, views.show, views.export_events),
):
    command.add_command(each)

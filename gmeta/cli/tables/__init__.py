"""``gmeta tables``: exports tables of checkpoints."""

from __future__ import annotations

import click

from gmeta.cli.tables import columns

__all__ = ["command"]


@click.group("tables")
def command() -> None:
    """Export tables of a checkpoint, so that NumPy, pandas and other stores can read them."""


command.add_command(columns.export_columns)

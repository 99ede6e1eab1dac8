"""``gmeta tables``: exports tables of checkpoints."""

from __future__ import annotations

from pathlib import Path

import click

from gmeta.checkpoint.table_description import Format

# The subcommand of ``gmeta tables`` that exports.


@click.command("export")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--table", help="The table, by the name in its TableConfig.  [default: the only one]")
@click.option(
    "--format",
    "form",
    type=click.Choice(["arrow", "npy"]),
    default="arrow",
    show_default=True,
    help="One Arrow file, or a .npy file for each column.",
)
@click.option("--state", is_flag=True, help="Write the optimizer's slots and last steps too.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is an exported table.")
@click.option(
    "--finite/--no-finite", default=True, show_default=True, help="Refuse rows that hold NaN or infinity."
)
def export_columns(
    checkpoint: Path, out: Path, table: str | None, form: Format, state: bool, overwrite: bool, finite: bool
) -> None:
    """Write the ids, rows and frequencies of a table into the folder OUT, which appears whole or not at all.

    CHECKPOINT is a checkpoint, or a folder of checkpoints, of which the latest is read. This needs no model.
    `gmeta.checkpoint.import_table` reads OUT into a model.
    """
    from gmeta.checkpoint.contents import export_saved_table

    done = export_saved_table(
        checkpoint, table, out, format=form, state=state, overwrite=overwrite, finite=finite
    )
    noted = done.description
    rows = f"{noted.rows:,} rows of {noted.dim}"
    click.echo(f"table {noted.table}: {rows}, {done.bytes:,} bytes, in {done.seconds:.1f} s")
    click.echo(f"columns: {', '.join(noted.columns)}")


__all__ = ["command"]


@click.group("tables")
def command() -> None:
    """Export tables of a checkpoint, so that NumPy, pandas and other stores can read them."""


command.add_command(export_columns)

"""``gmeta inspect`` lists the contents of checkpoints and data sets, and ``gmeta tables`` exports tables."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gmeta.checkpoint.contents import CheckpointSummary, TableSummary, find_checkpoint, format_size, summarize
from gmeta.checkpoint.table_description import Format
from gmeta.core.data_manifest import FORMAT
from gmeta.core.json_values import FILE_NAME, parse_json

if TYPE_CHECKING:
    from gmeta.preprocess.shards.data_set import DataSummary


@click.command("inspect")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--top",
    default=5,
    show_default=True,
    type=click.IntRange(min=0),
    help="Largest norms, or texts, to list; 0: none.",
)
@click.option("--verify", is_flag=True, help="Read everything and compare the checksums.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(folder: Path, top: int, verify: bool, as_json: bool) -> None:
    """List the contents of a checkpoint or a prepared data set.

    For a checkpoint, or the latest one in a folder of checkpoints, it lists the tables: rows, sizes, steps,
    optimizers, increments, admission, largest norms. For a data set, it lists the splits, and the columns
    with their roles, ranges, texts and titles. With --top 0 and without --verify, the command reads neither
    rows nor admission filters.
    """
    if _is_data(folder):
        from gmeta.preprocess.shards.data_set import summarize_data

        data = summarize_data(folder, top, verify=verify)
        if as_json:
            click.echo(json.dumps(asdict(data), indent=1, default=str, ensure_ascii=False))
            return
        click.echo("\n".join(_data_lines(data)))
        if verify:
            click.echo("every checksum agrees")
        return
    summary = summarize(find_checkpoint(folder), top, verify=verify)
    if as_json:
        click.echo(json.dumps(asdict(summary), indent=1, default=str))
        return
    click.echo("\n".join(_lines(summary)))
    if verify:
        click.echo("every checksum agrees")


def _is_data(folder: Path) -> bool:
    """Return whether a folder has the manifest of a prepared data set."""
    try:
        value = parse_json((folder / FILE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(value, dict) and value.get("format") == FORMAT


_SHOWN = 50  # characters of a text


def _data_lines(data: DataSummary) -> list[str]:
    lines = [f"{data.folder}: a data set{f' of {data.source}' if data.source else ''}, layout {data.layout}"]
    lines += [
        f"split {name}: {_count(split['rows'], 'row')} in {_count(split['groups'], 'group')}, "
        f"{_count(split['shards'], 'shard')}, {format_size(split['bytes'])}"
        for name, split in data.splits.items()
    ]
    for column in data.columns:
        kind = f"lists of {column.dtype}" if column.is_list else column.dtype
        words = [kind, *column.roles]
        if column.least is not None and "hashed text" not in column.roles:
            words.append(
                f"{column.least:,} to {column.most:,}"
                if isinstance(column.least, int)
                else f"{column.least:.6g} to {column.most:.6g}"
            )
        lines.append(f"column {column.name}: {', '.join(words)}")
        if column.examples:
            lines.append(f"  texts of {_count(column.texts, 'value')}:")
        lines += [
            f"    {value}  " + ", ".join(_shown(text) for text in texts if text is not None)
            for value, *texts in column.examples
        ]
    return lines


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def _lines(summary: CheckpointSummary) -> list[str]:
    lines = [f"{summary.folder}: {format_size(summary.bytes)}, saved by {_count(summary.world_size, 'rank')}"]
    if len(summary.chain) > 1:
        bases = " < ".join(reversed(summary.chain[:-1]))
        lines.append(f"  continues {bases}; {format_size(summary.chain_bytes)} in all")
    lines += [f"  {name} = {json.dumps(value)}" for name, value in summary.metadata.items()]
    for name, table in summary.tables.items():
        slots = f" ({', '.join(table.slots)})" if table.slots else ""
        changes = f"{table.kind}: {_count(table.changed, 'row')}"
        changes += f", {_count(table.removed, 'removed key')}" if table.removed else ""
        lines += [
            f"table {name}",
            f"  {_count(table.rows, 'row')} of {table.dim}, step {table.step}, {table.optimizer}{slots}, "
            f"{format_size(table.bytes)}",
            f"  {changes}",
            *_admission(table),
            *(f"  full although a base was given: {reason}" for reason in table.reasons),
            *(f"  {setting}: {_setting(value)}" for setting, value in table.settings.items()),
        ]
        if table.mean_norm is not None:
            lines.append(f"  mean norm {table.mean_norm:.6g}; the largest:")
        lines += [
            f"    {row.norm:<12.6g} key {row.key}, frequency {row.frequency}, last step {row.last_step}"
            for row in table.largest
        ]
    lines += [f"file {name}: {format_size(size)}" for name, size in summary.files.items()]
    return lines


def _setting(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _admission(table: TableSummary) -> list[str]:
    """Describe a table's counts of keys without a row."""
    if table.filter is not None:
        counters = table.filter.shards * table.filter.counters
        used = "" if table.filter_used is None else f", {table.filter_used:.1%} of them above zero"
        return [f"  admission filter: {_count(counters, 'counter')}, {table.filter.hashes} a key{used}"]
    return [f"  {_count(table.waiting, 'key')} waiting for admission"] if table.waiting else []


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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


@click.group("tables")
def tables_command() -> None:
    """Export tables of a checkpoint, so that NumPy, pandas and other stores can read them."""


tables_command.add_command(export_columns)

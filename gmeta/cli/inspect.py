"""``gmeta inspect``: lists what a sharded checkpoint holds."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from gmeta.checkpoint.contents import CheckpointSummary, TableSummary, find_checkpoint, format_size, summarize


@click.command("inspect")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--top", default=5, show_default=True, type=click.IntRange(min=0), help="Largest norms to list; 0: none."
)
@click.option("--verify", is_flag=True, help="Read everything and compare the checksums.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(folder: Path, top: int, verify: bool, as_json: bool) -> None:
    """List a checkpoint's tables: rows, sizes, steps, optimizers, increments, admission, largest norms.

    FOLDER is a checkpoint, or a folder of checkpoints, whose latest one is listed. With --top 0 and without
    --verify, the command reads neither rows nor admission filters.
    """
    summary = summarize(find_checkpoint(folder), top, verify=verify)
    if as_json:
        click.echo(json.dumps(asdict(summary), indent=1, default=str))
        return
    click.echo("\n".join(_lines(summary)))
    if verify:
        click.echo("every checksum agrees")


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
    """Describe a table's counts of keys that have no row."""
    if table.filter is not None:
        counters = table.filter.shards * table.filter.counters
        used = "" if table.filter_used is None else f", {table.filter_used:.1%} of them above zero"
        return [f"  admission filter: {_count(counters, 'counter')}, {table.filter.hashes} a key{used}"]
    return [f"  {_count(table.waiting, 'key')} waiting for admission"] if table.waiting else []


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

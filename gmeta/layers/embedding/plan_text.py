"""Prints a merge plan as a readable table."""

from __future__ import annotations

from collections.abc import Sequence

from gmeta.core.data.merged_keys import Fold
from gmeta.layers.embedding.feature_config import FeatureConfig
from gmeta.layers.embedding.merge_plan import MergedTable
from gmeta.ops.table.hash_table import HashTable

_HEADINGS = (
    *("table", "features", "dim", "ids below", "rows start as"),
    *("admission", "eviction", "precision", "optimizer"),
)


def plan_table(plan: Sequence[MergedTable], tables: Sequence[HashTable]) -> str:
    """Format a plan: headings, then one line for each physical table."""
    lines = [_HEADINGS, *(_cells(merged, table) for merged, table in zip(plan, tables, strict=True))]
    return "\n".join(align(lines))


def align(lines: Sequence[Sequence[str]]) -> list[str]:
    """Join each line's cells to text, aligned in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _cells(merged: MergedTable, table: HashTable) -> tuple[str, ...]:
    rate = table.optimizer.learning_rate
    pace = "the Keras optimizer's rate" if rate is None else "a schedule" if callable(rate) else f"{rate:g}"
    return (
        table.name,
        ", ".join(_feature(feature, table.fold) for feature in merged.features),
        str(merged.dim),
        f"2^{merged.id_bits}",
        str(merged.policy.initializer),
        str(merged.policy.admission),
        "none" if merged.policy.eviction is None else str(merged.policy.eviction),
        "float32" if merged.policy.precision is None else str(merged.policy.precision),
        f"{type(table.optimizer).__name__} at {pace}",
    )


def _feature(feature: FeatureConfig, fold: Fold) -> str:
    """Format a feature's name, its pooling, and its table if neither it nor its part has that name."""
    hashed = ["hashed" if fold == "mix" else f"hashed, fold {fold}"] if feature.hash else []
    how = [*([] if feature.combiner is None else [feature.combiner]), *hashed]
    pooled = f"{feature.name} ({', '.join(how)})" if how else feature.name
    (table,) = feature.tables
    return pooled if table.name == feature.name.rpartition("/")[2] else f"{pooled} -> {table.name}"

"""What a prepared data set holds: its splits, and of each column the role, the range and some texts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import DataError
from gmeta.core.texts import TEXT, TITLE, Texts
from gmeta.preprocess.columns import Columns
from gmeta.preprocess.shards.group_reader import read_groups


@dataclass(frozen=True)
class ColumnSummary:
    """A column of a data set.

    Attributes:
      name: Its name.
      dtype: ``"int64"`` or ``"float32"``.
      is_list: Whether a row holds any number of values.
      roles: What it is: the task, the batch, the time, the label, hashed text.
      least: The smallest value of all rows, NaN left out; None: not read, or there is none.
      most: The largest value, likewise.
      texts: How many values have a text or a title; 0: none are kept.
      examples: Some of them: the value, its text and its title.
    """

    name: str
    dtype: str
    is_list: bool
    roles: tuple[str, ...]
    least: float | None
    most: float | None
    texts: int
    examples: tuple[tuple[int, str | None, str | None], ...]


@dataclass(frozen=True)
class DataSummary:
    """A prepared data set.

    Attributes:
      folder: The folder.
      source: What it was prepared from; None: the manifest doesn't record it.
      splits: Split -> its ``"groups"``, ``"rows"``, ``"shards"`` and ``"bytes"``.
      layout: How rows are encoded.
      columns: The columns, in the order of the data set.
    """

    folder: Path
    source: str | None
    splits: Mapping[str, Mapping[str, int]]
    layout: str
    columns: tuple[ColumnSummary, ...]


def summarize_data(folder: Path, top: int = 5, *, verify: bool = False) -> DataSummary:
    """Summarize a prepared data set from its manifest, its texts, and its rows if ranges are requested.

    Args:
      folder: The data set.
      top: How many texts of each column to list; 0: read neither texts nor rows.
      verify: Whether to read everything in any case, and compare the checksums.

    Raises:
      DataError: The manifest doesn't fit the files, or a file is damaged.
    """
    manifest = Manifest.load(folder)
    texts, roles = Texts(folder, manifest.texts), manifest.roles
    ranges = _ranges(folder, manifest) if top or verify else {}
    named = {"task": roles.task, "batch": roles.batch, "time": roles.time, "label": roles.label}
    columns = []
    for column in manifest.schema:
        own = [role for role, name in named.items() if name == column.name]
        own += ["hashed text"] * (column.name in roles.hashed)
        least, most = ranges.get(column.name, (None, None))
        kept = manifest.texts.get(column.name)
        examples: list[tuple[int, str | None, str | None]] = []
        if kept and (top or verify):
            table = texts.table(column.name).slice(0, top).to_pydict()
            nothing = [None] * len(table["value"])
            examples = [
                *zip(table["value"], table.get(TEXT, nothing), table.get(TITLE, nothing), strict=True)
            ]
        columns.append(
            ColumnSummary(
                column.name,
                column.dtype,
                bool(column.is_list),
                tuple(own),
                least,
                most,
                kept.texts if kept else 0,
                tuple(examples),
            )
        )
    splits = {
        name: {
            "groups": split.groups,
            "rows": split.rows,
            "shards": len(split.shards),
            "bytes": sum(shard.bytes for shard in split.shards),
        }
        for name, split in manifest.splits.items()
    }
    source = manifest.config.get("source")
    return DataSummary(
        folder, source if isinstance(source, str) else None, splits, manifest.layout, tuple(columns)
    )


def _ranges(folder: Path, manifest: Manifest) -> dict[str, tuple[Any, Any]]:
    """Read all rows; return the smallest and the largest value of each column with one value in a row."""
    found: dict[str, tuple[Any, Any]] = {}
    for rows in _rows(folder, manifest):
        for name, values in rows.items():
            assert not isinstance(values, tuple)
            values = values[~np.isnan(values)] if values.dtype.kind == "f" else values
            if len(values):
                low, high = found.get(name, (math.inf, -math.inf))
                found[name] = min(low, values.min().item()), max(high, values.max().item())
    return found


def _rows(folder: Path, manifest: Manifest) -> Iterator[Columns]:
    columns = [column for column in manifest.schema if not column.is_list]
    key = manifest.schema.task, manifest.schema.batch
    for split in manifest.splits.values():
        for shard in split.shards:
            if not shard.groups:
                continue
            path = folder / shard.name
            with closing(read_groups(path, shard, manifest.layout, columns, key)) as parts:
                for part in parts:
                    if part.damage:
                        raise DataError(part.damage[0].message)
                    yield part.columns

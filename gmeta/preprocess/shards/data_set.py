"""The files of a prepared data set: writes shards and the manifest, reads groups, and summarizes a data set.

Shards are written with their indexes, and the manifest last. The reader is native (``io/group_batch``) and
needs no TensorFlow. `summarize_data` describes a data set: its splits, and the role, the range and some texts
of each column.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gmeta.core.data_manifest import TEXT, TITLE, Manifest, Shard, Split, Texts
from gmeta.core.errors import DataError
from gmeta.core.group_index import LAYOUTS, Codec, GroupIndex, Layout
from gmeta.core.native import FunctionTypes, load_functions
from gmeta.core.schema import Column, Schema
from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.plan.placement import PLAN_VERSION, splits
from gmeta.preprocess.plan.texts import text_files
from gmeta.preprocess.shards.record_writer import RecordWriter
from gmeta.preprocess.source import Columns
from gmeta.preprocess.summary import PrepareSummary

LAYOUT_VERSION = 1
"""The version of the layouts, increased whenever a layout's bytes change."""


def shard_name(split: str, number: int, shards: int) -> str:
    """Return the name of a shard.

    Example:
      >>> shard_name("warm", 0, 2)
      'warm-00000-of-00002.tfrecord'
    """
    return f"{split}-{number:05d}-of-{shards:05d}.tfrecord"


def write_shard(
    path: Path, schema: Schema, layout: Layout, parts: Iterable[Columns], codec: Codec | None = None
) -> Shard:
    """Write a shard and its index.

    Args:
      path: The file; it and ``<path>.gidx`` appear when they are whole.
      schema: The columns of the rows.
      layout: How rows are encoded.
      parts: Rows of whole batches, in the order of the shard (`plan.Placement`). Without any parts, the file
        is empty and its index has no groups.
      codec: The compression of each record, if any.

    Returns:
      The shard's entry in the manifest.

    Raises:
      DataError: A batch's rows aren't consecutive, or a batch is too large for a record.
      OSError: The file can't be written.
    """
    with RecordWriter(path, schema, layout=layout, codec=codec, index=True) as writer:
        for part in parts:
            writer.write(part)
    return Shard(path.name, writer.groups, writer.rows, writer.bytes, writer.index or 0)


def save_manifest(
    folder: Path,
    schema: Schema,
    shards: Mapping[str, Sequence[Shard]],
    config: PlanConfig,
    plan: Mapping[str, Any],
    summary: PrepareSummary,
) -> Manifest:
    """Write the summary and then the manifest, which completes the data set.

    Args:
      folder: The folder with the shards, their indexes, and the texts (`TextCollector.write`).
      schema: The columns of the rows.
      shards: Split -> its shards in order, for each of `plan.splits`.
      config: The settings.
      plan: The part of the settings that the manifest keeps (`prepare.describe_plan`).
      summary: The summary of the run.
    """
    manifest = Manifest(
        schema=schema,
        splits={name: Split(tuple(shards[name])) for name in splits(config)},
        config=plan,
        dropped=summary.dropped,
        layout=config.layout,
        seed=config.seed,
        versions={"plan": PLAN_VERSION, "layout": LAYOUT_VERSION},
        texts=text_files(folder),
    )
    summary.save(folder)
    manifest.save(folder)
    return manifest


_BYTES = 8 << 20  # groups are read until they have this many
_DTYPES = ("int64", "float32")  # each index is the value in the native enum
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: FunctionTypes = {
    "reader_new": (
        _POINTER,
        [ctypes.c_char_p, *([_NUMBER] * 3), *([_POINTER] * 2), ctypes.c_int32, _NUMBER, _NUMBER],
    ),
    "reader_free": (None, [_POINTER]),
    "read": (_NUMBER, [_POINTER, _NUMBER, _NUMBER, _POINTER]),
    "values": (_POINTER, [_POINTER, _NUMBER]),
    "problem": (ctypes.c_char_p, [_POINTER, _NUMBER, _POINTER, _POINTER]),
}


@functools.cache
def _library() -> ctypes.CDLL:
    return load_functions("records", "gmeta_groups_", _SIGNATURES)


class Damage(NamedTuple):
    """Rows that can't be read.

    Attributes:
      message: What is wrong, with the file and the byte.
      rows: The number of rows.
    """

    message: str
    rows: int


class GroupRows(NamedTuple):
    """The rows of some groups.

    Attributes:
      columns: Name -> (N,) int64 or float32: the sound rows.
      damage: The rows that can't be read.
    """

    columns: Columns
    damage: Sequence[Damage]


def read_groups(
    path: Path, shard: Shard, layout: Layout, columns: Sequence[Column], key: tuple[str, str]
) -> Generator[GroupRows, None, None]:
    """Read a shard from its first group to its last, about 8 MB at a time.

    Args:
      path: The shard; its index lies beside it.
      shard: The manifest's entry.
      layout: How its rows are encoded.
      columns: The columns to read, with one value per row, including the key's two.
      key: The columns of the task and of the batch.

    Raises:
      DataError: The index is damaged, or the file can't be read. Damaged groups are returned as such.
      NativeLibraryError: The native reader was never built, or has another version.
    """
    offsets = GroupIndex.load(path, check_shard=False, checksum=shard.index).groups["offset"]
    names = [column.name for column in columns]
    reader = _library().gmeta_groups_reader_new(
        os.fsencode(path),
        shard.groups,
        shard.index,
        len(columns),
        (ctypes.c_char_p * len(names))(*(name.encode() for name in names)),
        (ctypes.c_int32 * len(names))(*(_DTYPES.index(column.dtype) for column in columns)),
        LAYOUTS.index(layout),
        names.index(key[0]),
        names.index(key[1]),
    )
    if not reader:
        raise MemoryError("no memory for the reader of groups")
    try:
        first = 0
        while first < len(offsets):
            stop = max(int(np.searchsorted(offsets, offsets[first] + _BYTES)), first + 1)
            yield _read(reader, first, stop - first, columns)
            first = stop
    finally:
        _library().gmeta_groups_reader_free(reader)


def _read(reader: int, first: int, count: int, columns: Sequence[Column]) -> GroupRows:
    rows, skipped, fatal = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_int32()
    problems = _library().gmeta_groups_read(reader, first, count, ctypes.byref(rows))
    if problems < 0:
        raise MemoryError("no memory for the groups of a shard")
    damage = []
    for number in range(problems):
        words = _library().gmeta_groups_problem(reader, number, ctypes.byref(skipped), ctypes.byref(fatal))
        if fatal:
            raise DataError(words.decode(errors="replace"))
        damage.append(Damage(words.decode(errors="replace"), skipped.value))
    found = {}
    for number, column in enumerate(columns):
        address = _library().gmeta_groups_values(reader, number)
        bytes_ = ctypes.string_at(address, rows.value * np.dtype(column.dtype).itemsize)
        found[column.name] = np.frombuffer(bytes_, column.dtype)
    return GroupRows(found, damage)


@dataclass(frozen=True)
class ColumnSummary:
    """A column of a data set.

    Attributes:
      name: Its name.
      dtype: ``"int64"`` or ``"float32"``.
      is_list: Whether a row holds any number of values.
      roles: Its roles: the task, the batch, the time, the label, hashed text.
      least: The smallest value of all rows, NaN left out; None: not read, or without values.
      most: The largest value, in the same way.
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
      verify: Whether to always read everything, and compare the checksums.

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

"""The files of a prepared data set: shards with their indexes, and the manifest that is written last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gmeta.core.data.group_index import Codec, Layout
from gmeta.core.data.manifest import Manifest, Shard, Split
from gmeta.core.data.schema import Schema
from gmeta.preprocess.columns import Columns
from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.plan.placement import PLAN_VERSION, splits
from gmeta.preprocess.shards.record_writer import RecordWriter
from gmeta.preprocess.summary import PrepareSummary

LAYOUT_VERSION = 1
"""Raised whenever a layout's bytes change."""


def shard_name(split: str, number: int, shards: int) -> str:
    """The name of a shard.

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
      parts: Rows of whole batches, in the order of the shard (`plan.Placement`). None at all makes an empty
        file with an index of no groups.
      codec: What compresses each record, if anything does.

    Returns:
      What the manifest says of it.

    Raises:
      DataError: A batch's rows don't stand together, or a batch is too large for a record.
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
    """Write the summary and, last of all, the manifest: with it the data set is whole.

    Args:
      folder: Holds the shards and their indexes.
      schema: The columns of the rows.
      shards: Split -> its shards in order, each of `plan.splits`.
      config: The settings.
      plan: What the manifest keeps of the settings (`prepare.describe_plan`).
      summary: The account of the run.
    """
    manifest = Manifest(
        schema=schema,
        splits={name: Split(tuple(shards[name])) for name in splits(config)},
        config=plan,
        dropped=summary.dropped,
        layout=config.layout,
        seed=config.seed,
        versions={"plan": PLAN_VERSION, "layout": LAYOUT_VERSION},
    )
    summary.save(folder)
    manifest.save(folder)
    return manifest

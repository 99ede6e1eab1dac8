"""The files of a prepared data set: shards with their indexes, and the manifest that is written last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gmeta.core.data_manifest import Manifest, Shard, Split
from gmeta.core.group_index import Codec, Layout
from gmeta.core.schema import Schema
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

"""Writes permuted batches as TFRecord shards, joining the attributes of user and item to each rating."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gmeta.core.manifest import Shard, Split
from gmeta.preprocess.attribute_table import IntColumn
from gmeta.preprocess.config import PrepareConfig
from gmeta.preprocess.local_engine import Progress, no_progress
from gmeta.preprocess.movielens import MovieLens
from gmeta.preprocess.plan import SCHEMA, Batch, Ratings, order_key, shard_of, split_of
from gmeta.preprocess.record_writer import RecordWriter

SPLITS = ("warm", "cold")
_CHUNK = 64  # batches a call of the writer


def write_splits(
    folder: Path,
    batches: Sequence[Batch],
    source: MovieLens,
    config: PrepareConfig,
    progress: Progress = no_progress,
) -> dict[str, Split]:
    """Permute the batches and write every split's shards.

    Args:
      folder: Where ``<split>-00000-of-00002.tfrecord`` and so on are written.
      batches: In any order.
      source: Holds the attributes.
      config: Seed, split rule and number of shards.
      progress: Is told of the stage ``"write"``, in rows.

    Returns:
      Split name -> its shards, in order. A shard that no batch falls into is an empty file.

    Raises:
      OSError: A file can't be written.
    """
    tasks = np.array([batch.task for batch in batches], np.int64)
    numbers = np.array([batch.batch_id for batch in batches], np.int64)
    key = order_key(config.seed, tasks, numbers)
    shards = shard_of(key, config.shards)
    parts: dict[tuple[str, int], list[Batch]] = {
        (split, shard): [] for split in SPLITS for shard in range(config.shards)
    }
    for place in np.lexsort((numbers, tasks, key)).tolist():
        batch = batches[place]
        parts[split_of(batch.task, config), int(shards[place])].append(batch)

    done, total = 0, sum(len(batch.ratings) for batch in batches)
    written: dict[str, list[Shard]] = {split: [] for split in SPLITS}
    for (split, number), part in parts.items():
        name = f"{split}-{number:05d}-of-{config.shards:05d}.tfrecord"
        with RecordWriter(folder / name, SCHEMA) as writer:
            for start in range(0, len(part), _CHUNK):
                chunk = part[start : start + _CHUNK]
                writer.write(columns(chunk, source))
                done += sum(len(batch.ratings) for batch in chunk)
                progress("write", done, total)
        written[split].append(Shard(name, groups=len(part), rows=writer.rows, bytes=writer.bytes))
    return {split: Split(tuple(shards)) for split, shards in written.items()}


def columns(batches: Sequence[Batch], source: MovieLens) -> dict[str, IntColumn | NDArray[np.float32]]:
    """The columns of `SCHEMA` for the ratings of some batches, one after another.

    Returns:
      Name -> (N,) int64, (N,) float32 for ``rating``, and ``(values, row_splits)`` for ``genre``.
    """
    ratings: Ratings = np.concatenate([batch.ratings for batch in batches])
    sizes = [len(batch.ratings) for batch in batches]
    stored = {name: np.ascontiguousarray(ratings[name]) for name in ("task", "item", "rating", "timestamp")}
    return {
        **stored,
        "batch_id": np.repeat(np.array([batch.batch_id for batch in batches], np.int64), sizes),
        **source.items.take(stored["item"]),
        **source.users.take(stored["task"]),
    }

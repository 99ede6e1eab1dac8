"""Data of the reader's benchmark: groups of rows of 13 int64 and 8 float32 columns, in both layouts."""

from __future__ import annotations

from pathlib import Path

from gmeta.core.data_manifest import Manifest, Shard, Split
from gmeta.core.group_index import Codec, Layout
from gmeta.core.schema import Column, Schema
from gmeta.preprocess.shards.record_writer import RecordWriter

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

INTS, FLOATS = 13, 8
SCHEMA = Schema(
    (
        Column("task"),
        Column("batch_id"),
        *(Column(f"i{k}") for k in range(INTS)),
        *(Column(f"f{k}", "float32") for k in range(FLOATS)),
    )
)
SHARDS = 2


def write(folder: Path, layout: Layout, groups: int, rows: int, codec: Codec | None = None) -> Path:
    """Write a data set of equal groups, and return its split."""
    folder.mkdir()
    rng, shards = np.random.default_rng(0), []
    for number in range(SHARDS):
        path = folder / f"all-{number:05d}-of-{SHARDS:05d}.tfrecord"
        with RecordWriter(path, SCHEMA, layout=layout, codec=codec, index=True) as writer:
            for first in range(0, groups // SHARDS, 1000):
                count = min(1000, groups // SHARDS - first)
                writer.write(_columns(rng, np.arange(count) + first + number * groups, rows))
        shards.append(Shard(path.name, groups // SHARDS, writer.rows, writer.bytes, writer.index or 0))
    Manifest(SCHEMA, {"all": Split(tuple(shards))}, layout=layout).save(folder)
    return folder / "all"


def write_text(file: Path, groups: int, rows: int) -> int:
    """Write such rows as lines of comma-joined numbers, a TFRecord each, and return the file's bytes."""
    columns = _columns(np.random.default_rng(0), np.arange(groups), rows)
    lists = [columns[column.name].tolist() for column in SCHEMA]
    with tf.io.TFRecordWriter(str(file)) as writer:
        for values in zip(*lists, strict=True):
            line = ",".join(f"{value:.9g}" if isinstance(value, float) else str(value) for value in values)
            writer.write(line.encode())
    return file.stat().st_size


def _columns(rng: np.random.Generator, tasks: NDArray[np.int64], rows: int) -> dict[str, NDArray[np.generic]]:
    """Draw a table with this many rows for each task."""
    each = np.repeat(tasks, rows)
    # Labels and categories, ids, and hashes: they determine a column's width in bytes.
    ints = {f"i{k}": rng.integers(0, (2, 100, 100_000, 1 << 40)[k % 4], len(each)) for k in range(INTS)}
    floats = {f"f{k}": rng.random(len(each), np.float32) for k in range(FLOATS)}
    return {"task": each, "batch_id": np.zeros(len(each), np.int64), **ints, **floats}

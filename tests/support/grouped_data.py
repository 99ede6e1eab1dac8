"""Small prepared data sets with every kind of column, for tests of readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.core.data_manifest import Manifest, Shard, Split
from gmeta.core.group_index import Codec, Layout
from gmeta.core.schema import Column, Schema
from gmeta.io import ReadOptions
from gmeta.io.readers.read_options import AfterSteps, OneEpoch
from gmeta.preprocess.shards.record_writer import RecordWriter

SCHEMA = Schema(
    (
        Column("item"),
        Column("task"),
        Column("genre", is_list=True),
        Column("rating", "float32"),
        Column("weights", "float32", is_list=True),
        Column("batch_id"),
        Column("timestamp"),
    )
)


def grouped_columns(sizes: Sequence[int], *, first_task: int = 0, seed: int = 0) -> dict[str, Any]:
    """Columns of `SCHEMA` for a group of each size; tasks are numbered from ``first_task`` on."""
    rng, rows = np.random.default_rng([seed, first_task]), sum(sizes)
    tasks = np.arange(first_task, first_task + len(sizes))

    def ragged(values: Any) -> tuple[Any, Any]:
        lengths = rng.integers(0, 4, rows)
        return values(lengths.sum()), np.concatenate([[0], np.cumsum(lengths)])

    return {
        "item": rng.integers(-(1 << 40), 1 << 40, rows),
        "task": np.repeat(tasks, sizes),
        "genre": ragged(lambda count: rng.integers(0, 20, count)),
        "rating": rng.integers(1, 6, rows).astype(np.float32),
        "weights": ragged(lambda count: rng.random(count, np.float32)),
        "batch_id": np.repeat(tasks % 3, sizes),
        "timestamp": np.arange(rows),
    }


def write_file(
    path: Path,
    sizes: Sequence[int],
    *,
    first_task: int = 0,
    layout: Layout = "example",
    codec: Codec | None = None,
) -> Shard:
    """Write one TFRecord file of groups of these sizes, and its index."""
    with RecordWriter(path, SCHEMA, layout=layout, codec=codec, index=True) as writer:
        writer.write(grouped_columns(sizes, first_task=first_task))
    return Shard(path.name, len(sizes), writer.rows, writer.bytes, writer.index or 0)


def write_folder(
    folder: Path,
    *shards: Sequence[int],
    split: str = "warm",
    layout: Layout = "columnar",
    codec: Codec | None = None,
) -> Path:
    """Write a prepared folder of one split, a shard for each sequence of sizes; return folder/split."""
    written, first_task = [], 0
    for number, sizes in enumerate(shards):
        name = f"{split}-{number:05d}-of-{len(shards):05d}.tfrecord"
        written.append(write_file(folder / name, sizes, first_task=first_task, layout=layout, codec=codec))
        first_task += len(sizes)
    Manifest(SCHEMA, {split: Split(tuple(written))}, layout=layout).save(folder)
    return folder / split


def record_offsets(path: Path) -> list[int]:
    """Where each record of a sound TFRecord file begins, and where the file ends."""
    data, offsets = path.read_bytes(), [0]
    while offsets[-1] < len(data):
        length = int.from_bytes(data[offsets[-1] : offsets[-1] + 8], "little")
        offsets.append(offsets[-1] + 12 + length + 4)
    return offsets


# A reader's start and options from flat arguments, which tests vary one by one.


def reading(**given: Any) -> dict[str, Any]:
    """Move options of a reader into ``options``, and an epoch, or steps taken, into ``start``.

    Args:
      **given: Arguments of a reader; fields of `ReadOptions`; and of a start, ``epoch``, ``passed`` (steps
        taken) and ``again`` (all iterations are that epoch).

    Example:
      >>> arguments = reading(batch_size=8, epoch=2, seed=1)
      >>> arguments["batch_size"], arguments["start"], arguments["options"].seed
      (8, 2, 1)
    """
    options = {field.name: given.pop(field.name) for field in fields(ReadOptions) if field.name in given}
    epoch, passed, again = given.pop("epoch", 0), given.pop("passed", None), given.pop("again", False)
    start = epoch if passed is None else AfterSteps(passed, epoch)
    start = OneEpoch(epoch) if again else start
    return {"start": start, **given, "options": ReadOptions(**options)}

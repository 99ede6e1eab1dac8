"""Generated tasks in files, as lines of text and as gmeta's records, and the batches read from them.

Both give the batches that `rank.dataset` makes in memory, to the last bit: each rank has a file of its tasks,
in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gmeta import io
from gmeta.core import collectives
from gmeta.core.data_manifest import Manifest, Split
from gmeta.core.schema import Column, Schema
from gmeta.preprocess.shards.data_set import write_shard

import numpy as np
import tensorflow as tf

SKEW = 1.2
VOCABULARY = 1_000_000


def task_rows(settings: dict[str, Any], step: int, task: int) -> tuple[np.ndarray, np.ndarray]:
    """A task of a global step: (features, samples) ids and (samples,) labels, support first."""
    each = settings["support"] + settings["query"]
    rng = np.random.default_rng([step, task])
    ids = np.minimum(rng.zipf(SKEW, (settings["features"], each)) - 1, VOCABULARY - 1)
    return ids, rng.random(each, np.float32)


def write(folder: Path, settings: dict[str, Any], ranks: int) -> None:
    """Write the tasks of all ranks' steps in both forms."""
    text, records = folder / "text", folder / "columnar"
    text.mkdir(parents=True)
    records.mkdir()
    shards, schema = [], _schema(settings)
    for rank in range(ranks):
        tasks = list(_tasks_of(settings, rank))
        with tf.io.TFRecordWriter(str(_text_file(text, rank))) as writer:
            for number, ids, labels in tasks:
                for sample, label in zip(ids.T.tolist(), labels.tolist(), strict=True):
                    writer.write(",".join([str(number), f"{label:.9g}", *map(str, sample)]).encode())
        name = f"train-{rank:05d}-of-{ranks:05d}.tfrecord"
        shards.append(write_shard(records / name, schema, "columnar", map(_columns, tasks)))
    Manifest(schema, {"train": Split(tuple(shards))}, layout="columnar").save(records)


def read(folder: Path, settings: dict[str, Any]) -> tf.data.Dataset:
    """This rank's batches of `settings["distinct_steps"]` steps, read by ``settings["read"]``."""
    if settings["read"] == "text":
        return _from_text(_text_file(folder / "text", collectives.world().rank), settings)
    return io.tasks(
        folder / "columnar" / "train",
        tasks_per_batch=settings["tasks"],
        query=settings["query"],
        label="label",
        features=_names(settings),
        options=io.ReadOptions(shuffle=False),
    )


def _from_text(file: Path, settings: dict[str, Any]) -> tf.data.Dataset:
    """Decode each line and group the samples of a task, by TensorFlow's ops."""
    support, each = settings["support"], settings["support"] + settings["query"]
    defaults = [tf.zeros([], tf.int64), tf.zeros([]), *[tf.zeros([], tf.int64)] * settings["features"]]

    def batch_of(task: tf.Tensor, label: tf.Tensor, *ids: tf.Tensor) -> dict[str, Any]:
        index = tf.reshape(tf.range(tf.size(task, tf.int64)), tf.shape(task))
        parts = {"support": index[:, :support], "query": index[:, support:]}
        flat = {name: tf.reshape(column, [-1]) for name, column in zip(_names(settings), ids, strict=True)}
        masked = {name: {"index": part, "mask": tf.ones(tf.shape(part))} for name, part in parts.items()}
        return {"features": flat, "label": tf.reshape(label, [-1]), "task": task[:, 0], **masked}

    lines = tf.data.TFRecordDataset(str(file))
    rows = lines.map(lambda line: tf.io.decode_csv(line, defaults), num_parallel_calls=tf.data.AUTOTUNE)
    tasks = rows.group_by_window(lambda *row: row[0], lambda _, rows: rows.batch(each), window_size=each)
    return tasks.batch(settings["tasks"]).map(batch_of).prefetch(4)


def _tasks_of(settings: dict[str, Any], rank: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield a unique number and the rows of each task of a rank's steps."""
    own = settings["tasks"]
    for step in range(settings["distinct_steps"]):
        for task in range(rank * own, (rank + 1) * own):
            yield (step << 32) + task, *task_rows(settings, step, task)


def _columns(task: tuple[int, np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    number, ids, labels = task
    zeros = np.zeros(len(labels), np.int64)
    features = {f"f{feature}": column for feature, column in enumerate(ids)}
    return {"task": zeros + number, "batch_id": zeros, "label": labels, **features}


def _schema(settings: dict[str, Any]) -> Schema:
    ids = (Column(name) for name in _names(settings))
    return Schema((Column("task"), Column("batch_id"), Column("label", "float32"), *ids))


def _names(settings: dict[str, Any]) -> list[str]:
    return [f"f{feature}" for feature in range(settings["features"])]


def _text_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.tfrecord"

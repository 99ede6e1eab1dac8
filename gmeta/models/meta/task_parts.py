"""Splits a batch of tasks into micro-batches of whole tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.models.meta.learner.task_view import SUPPORT_AND_QUERY, TaskBatch
from gmeta.models.training.pipeline.clusters import column_keys
from gmeta.models.training.pipeline.units import take_units

_OF_SAMPLES, _OF_TASKS = ("features", "label"), ("task", *SUPPORT_AND_QUERY)


def split_tasks(batch: TaskBatch, units: Sequence[tf.Tensor]) -> list[dict[str, Any]]:
    """Split a batch of tasks.

    A part gets the samples that its tasks' indices name, in the batch's order, and indices among these. A
    sample that no index names is looked up too, so it goes to the first part.

    Args:
      batch: The batch.
      units: For each part (n,) int64, the numbers of its tasks.

    Raises:
      ConfigError: The batch has a part that belongs neither to samples nor to tasks.
    """
    strange = [name for name in batch if name not in (*_OF_SAMPLES, *_OF_TASKS)]
    if strange:
        raise ConfigError(
            f"micro_batches can't divide {', '.join(map(str, strange))} of a batch of tasks: pass the model "
            "batches as its reader gives them, or leave micro_batches out"
        )
    samples = tf.shape(batch["label"], tf.int64)[0]
    of_tasks = [take_units({name: batch[name] for name in _OF_TASKS}, chosen) for chosen in units]
    nowhere = ~_named(batch, samples)
    return [
        _with_samples(batch, tasks, _named(tasks, samples) | (nowhere if number == 0 else False))
        for number, tasks in enumerate(of_tasks)
    ]


def task_keys(batch: TaskBatch) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the keys of tasks' features, and which task has each; see `gmeta.models.Model.unit_keys`.

    A sample that several tasks name counts for the last of them.
    """
    keys, samples = column_keys(batch["features"])
    index = [batch[part]["index"] for part in SUPPORT_AND_QUERY]
    tasks = tf.concat(
        [tf.repeat(tf.range(tf.shape(each, tf.int64)[0]), tf.shape(each)[1]) for each in index], axis=0
    )
    named = tf.concat([tf.reshape(each, [-1]) for each in index], axis=0)
    task_of = tf.math.unsorted_segment_max(tasks, named, tf.shape(batch["label"], tf.int64)[0])
    units = tf.gather(task_of, samples)
    return tf.boolean_mask(keys, units >= 0), tf.boolean_mask(units, units >= 0)


def _named(tasks: TaskBatch, samples: tf.Tensor) -> tf.Tensor:
    """Return for each sample of a batch whether an index of some tasks names it, (samples,) bool."""
    index = tf.concat([tf.reshape(tasks[part]["index"], [-1]) for part in SUPPORT_AND_QUERY], axis=0)
    return tf.math.unsorted_segment_sum(tf.ones_like(index, tf.int32), index, samples) > 0


def _with_samples(batch: TaskBatch, tasks: dict[str, Any], named: tf.Tensor) -> dict[str, Any]:
    numbers = tf.cumsum(tf.cast(named, tf.int32), exclusive=True)
    own = {
        part: {**tasks[part], "index": _number(tasks[part]["index"], numbers)} for part in SUPPORT_AND_QUERY
    }
    of_samples = take_units({name: batch[name] for name in _OF_SAMPLES}, tf.where(named)[:, 0])
    return {**of_samples, "task": tasks["task"], **own}


def _number(index: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.gather(numbers, index), index.dtype)

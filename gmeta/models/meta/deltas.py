"""The two graphs of adaptation at serving: from samples to deltas, and from deltas to predictions.

`MetaModel.adapt` and `MetaModel.predict` run them, and an exported model contains them, so a server and the
trainer compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.meta.adaptation import per_task
from gmeta.models.meta.task_learner import TaskLearner
from gmeta.models.meta.task_losses import without_single_output
from gmeta.models.meta.task_view import TaskBatch, row_names

DIVERGED = (
    "their predictions would be infinite or NaN. Pass labels and numbers in the unit of the training data; "
    "if they are, lower the inner learning rate, or limit gradients by InnerLoop(clip_norm=...)"
)
"""What errors say of samples for which the inner steps diverge."""


class MovedRows(NamedTuple):
    """Rows of one table that tasks have moved.

    Attributes:
      keys: (rows,) int64, ascending.
      deltas: (rows, dim) float32.
      owners: (rows,) int64, the task that has moved each row.
    """

    keys: tf.Tensor
    deltas: tf.Tensor
    owners: tf.Tensor


class TaskDeltas(NamedTuple):
    """The deltas that tasks have learned.

    Attributes:
      weights: Name -> (tasks, ...) float32, the adapted weight minus the shared one.
      rows: Table -> the rows that tasks have moved.
      sound: (tasks,) bool, whether after the steps the squares of a task's deltas and of its outputs for its
        support are finite, and its loss there. If not, the steps have diverged.
    """

    weights: dict[str, tf.Tensor]
    rows: dict[str, MovedRows]
    sound: tf.Tensor


def task_deltas(learner: TaskLearner, batch: TaskBatch, steps: int) -> TaskDeltas:
    """Adapt the tasks of a batch; nothing is stored.

    Args:
      learner: The learner, with a loss.
      batch: A batch; its tasks adapt on their support sets.
      steps: Inner steps; after 0 all deltas are zero.
    """
    none = tf.zeros_like(batch["support"]["index"][:, :0])
    batch = {**batch, "query": {"index": none, "mask": tf.cast(none, tf.float32)}}
    lookup = learner.collection.lookup(batch["features"], insert=False)
    view = learner.view(batch, lookup)
    adapted = learner.adapt(view, steps=steps).parameters
    shared = learner.network.task_weights()
    weights = {}
    for name, value in adapted.items():
        if name in view.owners():
            continue
        if name in shared:
            start = tf.convert_to_tensor(shared[name])
            delta = value - start
            if value.shape.rank == start.shape.rank:  # no task has taken a step of its own
                delta = per_task({name: delta}, view.tasks)[name]
        else:
            delta = value
        weights[name] = tf.cast(delta, tf.float32)
    rows = {}
    if view.copies is not None:
        parts = zip(row_names(learner.collection), lookup.keys, view.copies.sources, strict=True)
        for name, keys, sources in parts:
            delta = adapted[name] - view.row_parameters()[name]
            moved = tf.reduce_any(tf.not_equal(delta, 0), axis=1)  # copies of padding, for example, stay
            every = MovedRows(tf.gather(keys, sources), delta, view.owners()[name])
            kept = [tf.boolean_mask(part, moved) for part in every]
            order = tf.argsort(kept[0])
            rows[name] = MovedRows(*(tf.gather(part, order) for part in kept))
    outputs = learner.task_outputs(view, "support", adapted)
    padding = view.mask("support")[..., tf.newaxis] <= 0
    squares = [_squares(tf.where(padding, tf.zeros_like(outputs), outputs)), *map(_squares, weights.values())]
    for moved in rows.values():
        of_rows = tf.reduce_sum(tf.square(moved.deltas), axis=1)
        squares.append(tf.math.unsorted_segment_sum(of_rows, moved.owners, view.tasks))
    loss = tf.cast(learner.mean_losses(view, "support", outputs), tf.float32)
    return TaskDeltas(weights, rows, tf.math.is_finite(tf.add_n([*squares, loss])))


def _squares(values: tf.Tensor) -> tf.Tensor:
    """Sum the squares of each task's numbers, (tasks,) float32."""
    return tf.reduce_sum(tf.square(tf.cast(values, tf.float32)), axis=list(range(1, values.shape.rank)))


def outputs_with(
    learner: TaskLearner,
    features: Mapping[str, Any],
    deltas: Mapping[str, tf.Tensor],
    rows: Mapping[str, tuple[tf.Tensor, tf.Tensor]],
) -> tf.Tensor:
    """Compute a task's outputs for samples, (samples,) or (samples, outputs).

    Args:
      learner: The learner.
      features: The samples, flat.
      deltas: Name -> the delta of a weight, of its shape; empty for a task without samples.
      rows: Table -> (keys, deltas) of its moved rows.
    """
    return without_single_output(query_outputs(learner, query_only(features), deltas, rows))[0]


def query_outputs(
    learner: TaskLearner,
    batch: TaskBatch,
    deltas: Mapping[str, tf.Tensor],
    rows: Mapping[str, tuple[tf.Tensor, tf.Tensor]],
) -> tf.Tensor:
    """Compute a task's outputs for its query, (1, samples, outputs).

    Args:
      learner: The learner.
      batch: A batch of the one task.
      deltas: As for `outputs_with`.
      rows: As for `outputs_with`.
    """
    lookup = learner.collection.lookup(batch["features"], insert=False)
    tables = zip(row_names(learner.collection), lookup.rows, lookup.keys, strict=True)
    moved = tuple(_move(own, keys, *rows[name]) if name in rows else own for name, own, keys in tables)
    view = learner.view(batch, lookup._replace(rows=moved))
    weights = learner.start_weights(view)
    shared = learner.network.task_weights()
    for name, delta in deltas.items():
        weights[name] = _shift(shared[name], delta) if name in shared else delta
    return learner.task_outputs(view, "query", weights)


def _shift(shared: tf.Variable, delta: tf.Tensor) -> tf.Tensor:
    return shared + tf.cast(tf.ensure_shape(delta, shared.shape), shared.dtype)


def _move(rows: tf.Tensor, keys: tf.Tensor, moved_keys: tf.Tensor, deltas: tf.Tensor) -> tf.Tensor:
    """Add deltas to those rows of a lookup whose keys have one."""
    order = tf.argsort(moved_keys)
    # No key is negative, so with -1 in front every key has a known key at or before it.
    known = tf.concat([tf.constant([-1], tf.int64), tf.gather(moved_keys, order)], axis=0)
    places = tf.searchsorted(known, keys, side="right") - 1
    found = tf.equal(tf.gather(known, places), keys)
    deltas = tf.pad(tf.gather(tf.cast(deltas, rows.dtype), order), [[1, 0], [0, 0]])
    return rows + tf.where(found[:, tf.newaxis], tf.gather(deltas, places), 0)


def support_only(features: Mapping[str, Any], labels: tf.Tensor) -> dict[str, Any]:
    """Return samples as a batch of one task, with the samples as its support."""
    index = tf.range(tf.shape(labels, tf.int64)[0])[tf.newaxis]
    return one_task(features, labels, support=index, query=index[:, :0])


def query_only(features: Mapping[str, Any]) -> dict[str, Any]:
    """Return samples as a batch of one task, with the samples as its query."""
    first = next(iter(features.values()))
    count = first.nrows(tf.int64) if isinstance(first, tf.RaggedTensor) else tf.shape(first, tf.int64)[0]
    index = tf.range(count)[tf.newaxis]
    return one_task(features, tf.zeros([count]), support=index[:, :0], query=index)


def one_task(features: Mapping[str, Any], labels: tf.Tensor, **parts: tf.Tensor) -> dict[str, Any]:
    """Return a batch of one task; ``support`` and ``query`` are the indices of their samples, (1, n)."""
    sides = {part: {"index": index, "mask": tf.ones_like(index, tf.float32)} for part, index in parts.items()}
    return {"features": dict(features), "label": labels, "task": tf.zeros([1], tf.int64), **sides}

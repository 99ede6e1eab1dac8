"""Runs a function for each task of a batch, side by side in a graph."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from gmeta.core import collectives

_MAPPED: ContextVar[bool] = ContextVar("mapped_over_tasks", default=False)


def is_mapped() -> bool:
    """Return whether the graph of one task is being made, for `map_tasks` to turn into that of all tasks.

    The shapes in such a graph mustn't depend on values, because tasks would have different ones.
    """
    return _MAPPED.get()


def map_tasks(one_task: Callable[[tuple[Any, ...]], tf.Tensor], elements: tuple[Any, ...]) -> tf.Tensor:
    """Apply ``one_task`` to each task's elements and stack the results.

    Args:
      one_task: Maps a task's elements to a tensor.
      elements: A nest of tensors (tasks, ...). On several ranks there may be no tasks.
    """
    first = tf.nest.flatten(elements)[0]
    tasks = first.shape[0]
    if not (tf.executing_eagerly() and tasks):
        may_be_none = not tasks and collectives.world().size > 1
        mapped = _at_least_one(elements) if may_be_none else elements
        results = tf.vectorized_map(lambda each: _in_a_map(one_task, each), mapped)
        return results[: tf.shape(first)[0]] if may_be_none else results
    # In eager mode vectorized_map would trace a new graph in each call, slower than running task after task.
    of = [tf.nest.map_structure(lambda part, task=task: part[task], elements) for task in range(tasks)]
    return tf.stack([one_task(each) for each in of])


@tf.autograph.experimental.do_not_convert
def _at_least_one(elements: Any) -> Any:
    """Return the elements of tasks, or those of a task of zeros if there are none.

    A rank whose data has ended takes steps without tasks. `tf.vectorized_map` infers a dimension of a product
    from its number of elements, and is wrong if that is 0.
    """
    parts = tf.nest.flatten(elements)

    def zeros() -> list[tf.Tensor]:
        return [tf.zeros(tf.concat([[1], tf.shape(part)[1:]], axis=0), part.dtype) for part in parts]

    some = tf.cond(tf.shape(parts[0])[0] > 0, lambda: [tf.identity(part) for part in parts], zeros)
    for part, given in zip(some, parts, strict=True):
        part.set_shape([None, *given.shape[1:]])
    return tf.nest.pack_sequence_as(elements, some)


def _in_a_map(one_task: Callable[[tuple[Any, ...]], tf.Tensor], elements: tuple[Any, ...]) -> tf.Tensor:
    token = _MAPPED.set(True)
    try:
        return one_task(elements)
    finally:
        _MAPPED.reset(token)

"""Runs a function for each task of a batch, side by side in a graph."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

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
      elements: A nest of tensors (tasks, ...).
    """
    tasks = tf.nest.flatten(elements)[0].shape[0]
    if not (tf.executing_eagerly() and tasks):
        return tf.vectorized_map(lambda each: _in_a_map(one_task, each), elements)
    # In eager mode vectorized_map would trace a new graph in each call, slower than running task after task.
    of = [tf.nest.map_structure(lambda part, task=task: part[task], elements) for task in range(tasks)]
    return tf.stack([one_task(each) for each in of])


def _in_a_map(one_task: Callable[[tuple[Any, ...]], tf.Tensor], elements: tuple[Any, ...]) -> tf.Tensor:
    token = _MAPPED.set(True)
    try:
        return one_task(elements)
    finally:
        _MAPPED.reset(token)

"""Tasks whose rows a rule can't split in two, because all are of one kind: refused, or left out and counted.

The native reader knows how many rows a task has, and treats small tasks. Only this module knows which rows a
column makes query rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.io.reader_stats import ReaderStats


class About(NamedTuple):
    """The parts of a message: the split's path, the rule, the kind of row, the advice, and the reason."""

    path: str
    rule: str
    kind: str = "query"
    advice: str = "; give it a row of either kind, or leave such tasks out with on_bad='skip'"
    reason: str = "one_sided"


def refuse_unsound(
    element: dict[str, Any], sound: tf.Tensor, queries: tf.Tensor, about: About
) -> dict[str, Any]:
    """Return the element, if all of its tasks are ``sound`` (T,).

    Raises:
      tf.errors.InvalidArgumentError: While iterating; `gmeta.io.as_data_error` reduces it to one line.
    """
    first = tf.argmin(tf.cast(tf.concat([sound, [False]], axis=0), tf.int32))
    # An escaped line break ends the message, because TensorFlow appends a bracket and the node.
    message = tf.strings.join([_message(element, queries, about, first), "\n"])
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(sound), [message])]):
        return {**element, "task": tf.identity(element["task"])}


def left_out(
    element: dict[str, Any],
    chosen: tf.Tensor,
    sound: tf.Tensor,
    queries: tf.Tensor,
    stats: ReaderStats | None,
    about: About,
) -> tuple[dict[str, Any], tf.Tensor]:
    """Remove tasks that aren't ``sound`` (T,), and their rows, from the element and ``chosen`` (rows,)."""
    rows = tf.repeat(sound, element["row_splits"][1:] - element["row_splits"][:-1])
    return keep(count_unsound(element, sound, queries, stats, about), sound), tf.boolean_mask(chosen, rows)


def keep(element: dict[str, Any], sound: tf.Tensor) -> dict[str, Any]:
    """Remove the tasks that aren't ``sound`` (T,), and their rows, from the element."""
    lengths = element["row_splits"][1:] - element["row_splits"][:-1]
    rows, tasks = (tf.where(kept)[:, 0] for kept in (tf.repeat(sound, lengths), sound))
    return {
        **element,
        "columns": {name: tf.gather(values, rows) for name, values in element["columns"].items()},
        "task": tf.gather(element["task"], tasks),
        "batch_id": tf.gather(element["batch_id"], tasks),
        "row_splits": tf.concat([[0], tf.cumsum(tf.gather(lengths, tasks))], axis=0),
    }


def count_unsound(
    element: dict[str, Any],
    sound: tf.Tensor,
    queries: tf.Tensor,
    stats: ReaderStats | None,
    about: About,
) -> dict[str, Any]:
    """Return the element; evaluating its ``"task"`` counts the tasks that aren't ``sound`` (T,)."""
    if stats is None:
        return element
    lengths = element["row_splits"][1:] - element["row_splits"][:-1]
    bad = tf.cast(tf.where(~sound)[:, 0], tf.int32)
    messages = tf.map_fn(
        lambda place: _message(element, queries, about, place), bad, fn_output_signature=tf.string
    )
    count = functools.partial(stats.leave_out, about.reason)
    done = tf.numpy_function(count, [tf.gather(lengths, bad), messages], tf.int64)
    with tf.control_dependencies([done]):
        return {**element, "task": tf.identity(element["task"])}


def _message(element: dict[str, Any], queries: tf.Tensor, about: About, place: Any) -> tf.Tensor:
    """Describe the task at a place of the element in one line; at the place past the last, numbers are 0."""

    def number(values: tf.Tensor) -> tf.Tensor:
        return tf.strings.as_string(tf.gather(tf.concat([values, [0]], axis=0), place))

    lengths = element["row_splits"][1:] - element["row_splits"][:-1]
    return tf.strings.join(
        [
            *(
                f"gmeta: {about.path}: task ",
                number(element["task"]),
                ", batch ",
                number(element["batch_id"]),
            ),
            *(" has ", number(queries), f" {about.kind} rows of ", number(lengths), f" by {about.rule}"),
            about.advice,
        ]
    )

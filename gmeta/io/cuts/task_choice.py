"""The choice of which tasks of a split to read, by their ids and sizes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.io.reader_stats import ReaderStats

# Tasks that a rule can't split because all rows are of one kind: refused, or skipped and counted.
#
# The native reader knows how many rows a task has, and treats small tasks. Only this module knows which rows
# a column marks as query rows.


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
      tf.errors.InvalidArgumentError: While iterating; `gmeta.io.reader_stats.as_data_error` reduces it to one
      line.
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
    """Describe the task at a place of the element in one line; past the last task, numbers are 0."""

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


By = Literal["hash", "id"]
"""How a task's id gives its part."""


@dataclass(frozen=True)
class TaskChoice:
    """A choice of tasks by their ids and sizes; skipped tasks don't count as bad.

    Divides a split into tasks to train on and tasks to evaluate on. The held-out tasks are those of one part
    whose size is within ``held_out_rows``. A choice reads either these tasks or all others, so two choices
    that differ only in ``held_out`` are disjoint and together contain all tasks. Each then skips tasks with
    fewer than ``min_rows`` or more than ``max_rows`` rows. If `gmeta prepare --batch-rows` cut tasks into
    batches, each batch is chosen by its own size.

    Attributes:
      parts: The number of parts that tasks are divided into by their ids. 1: no task is held out.
      part: Which part is held out, from 0 to ``parts`` - 1.
      by: ``"hash"``: the part is a hash of the id, so that parts are about equal. ``"id"``: the id modulo
        ``parts``.
      held_out: True: read the held-out tasks; False: read all others.
      held_out_rows: The minimum and maximum number of rows of a held-out task; a maximum of 0: any number.
        Smaller and larger tasks of the part belong to the others.
      min_rows: The minimum number of rows of a task that is read.
      max_rows: The maximum number of rows of a task that is read; 0: any number.
      within: Another choice, which must also keep the task: this choice then divides the tasks that the other
        keeps. If both use ``"hash"``, their ``parts`` must have no common divisor; otherwise, their parts
        depend on each other.

    Raises:
      ConfigError: A number is out of range, ``by`` is unknown, or there is only one part and another argument
        sets what is held out.

    Example:
      >>> tasks("data/train", query=0.2, only=TaskChoice(parts=5))  # four fifths of the users
      >>> tasks("data/train", query=0.2, only=TaskChoice(parts=5, held_out=True))  # the others
    """

    parts: int = 1
    part: int = 0
    by: By = "hash"
    held_out: bool = False
    held_out_rows: tuple[int, int] = (1, 0)
    min_rows: int = 1
    max_rows: int = 0
    within: TaskChoice | None = None

    def __post_init__(self) -> None:
        whole_number("TaskChoice: parts", self.parts, least=1)
        whole_number("TaskChoice: part", self.part, least=0)
        if self.part >= self.parts:
            raise ConfigError(f"TaskChoice: part={self.part} of parts={self.parts}: parts count from 0")
        if self.by not in get_args(By):
            raise ConfigError(f"TaskChoice: by must be one of {', '.join(get_args(By))}, got {self.by!r}")
        check_bounds("TaskChoice: min_rows and max_rows", (self.min_rows, self.max_rows))
        check_bounds("TaskChoice: held_out_rows", self.held_out_rows)
        given = (self.by, self.held_out, tuple(self.held_out_rows))
        if self.parts == 1 and given != ("hash", False, (1, 0)):
            raise ConfigError(
                f"TaskChoice: by={self.by!r}, held_out={self.held_out}, held_out_rows={self.held_out_rows} "
                "define the held-out part, and one part holds out nothing: give parts of at least 2"
            )

    def at_least(self, rows: int) -> TaskChoice:
        """Return the same choice, limited to tasks with at least ``rows`` rows."""
        return replace(self, min_rows=max(rows, self.min_rows))

    def keeps(self, task: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Mark the tasks to read, (T,) bool, by their ids and numbers of rows, both (T,) int64."""
        read = _within(rows, (self.min_rows, self.max_rows))
        if self.within is not None:
            read &= self.within.keeps(task, rows)
        if self.parts == 1:
            return read
        held_out = (self._part_of(task) == self.part) & _within(rows, self.held_out_rows)
        return read & (held_out if self.held_out else ~held_out)

    def _part_of(self, task: tf.Tensor) -> tf.Tensor:
        if self.by == "id":
            return tf.math.floormod(task, self.parts)
        return tf.strings.to_hash_bucket_fast(tf.strings.as_string(task), self.parts)

    @tf.autograph.experimental.do_not_convert
    def __call__(self, element: dict[str, Any]) -> dict[str, Any]:
        """Reduce an element of `gmeta.io.groups` to the chosen tasks."""
        lengths = element["row_splits"][1:] - element["row_splits"][:-1]
        return keep(element, self.keeps(element["task"], lengths))


def check_bounds(what: str, bounds: tuple[int, int]) -> None:
    """Refuse minimum and maximum numbers of rows (a maximum of 0: any number) that no task can have.

    Raises:
      ConfigError: The minimum is below 1, or the maximum is below the minimum.
    """
    fewest, most = bounds
    whole_number(f"{what}: the fewest", fewest, least=1)
    whole_number(f"{what}: the most", most, least=0)
    if 0 < most < fewest:
        raise ConfigError(f"{what}: the most, {most}, is below the fewest, {fewest}; 0: any number")


def _within(rows: tf.Tensor, bounds: tuple[int, int]) -> tf.Tensor:
    fewest, most = bounds
    return (rows >= fewest) & (rows <= (most or rows.dtype.max))

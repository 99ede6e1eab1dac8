"""The choice of a split's tasks to read, by their ids and by their sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.errors import ConfigError
from gmeta.io.cuts.unsplit_tasks import keep

By = Literal["hash", "id"]
"""How a task's id gives its part."""


@dataclass(frozen=True)
class TaskChoice:
    """A choice of tasks by their ids and sizes; tasks left out don't count as bad.

    It divides a data set of one split into tasks to train on and tasks to evaluate on. Held out are the tasks
    of one part that also have a size within ``held_out_rows``. A choice reads either these tasks or all
    others, so two choices that differ in ``held_out`` alone have no task in common and together all tasks.
    Each then leaves out what it reads of tasks with fewer than ``min_rows`` or more than ``max_rows`` rows.
    If `gmeta prepare --batch-rows` has cut tasks, each batch is chosen by its own size.

    Attributes:
      parts: The number of parts that tasks are divided into by their ids. 1: no task is held out.
      part: Which part is held out, from 0 to ``parts`` - 1.
      by: ``"hash"``: a hash of the id says the part, so that parts are about equal. ``"id"``: the id modulo
        ``parts``.
      held_out: True: read the held-out tasks; False: read all others.
      held_out_rows: The fewest and the most rows of a held-out task; 0 as the most: any number. Smaller and
        larger tasks of the part are among the others.
      min_rows: The fewest rows of a task that is read.
      max_rows: The most rows of a task that is read; 0: any number.

    Raises:
      ConfigError: A number is out of range, ``by`` is unknown, or there is only one part and another argument
        says what is held out.

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
                "say what is held out, and one part holds out nothing: give parts of at least 2"
            )

    def at_least(self, rows: int) -> TaskChoice:
        """Return the same choice, limited to tasks with at least ``rows`` rows."""
        return replace(self, min_rows=max(rows, self.min_rows))

    def keeps(self, task: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Mark the tasks to read, (T,) bool, by their ids and numbers of rows, both (T,) int64."""
        read = _within(rows, (self.min_rows, self.max_rows))
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
    """Refuse a fewest and a most number of rows, 0 as the most being any, that no task can have.

    Raises:
      ConfigError: The fewest is below 1, or the most is below the fewest.
    """
    fewest, most = bounds
    whole_number(f"{what}: the fewest", fewest, least=1)
    whole_number(f"{what}: the most", most, least=0)
    if 0 < most < fewest:
        raise ConfigError(f"{what}: the most, {most}, is below the fewest, {fewest}; 0: any number")


def _within(rows: tf.Tensor, bounds: tuple[int, int]) -> tf.Tensor:
    fewest, most = bounds
    return (rows >= fewest) & (rows <= (most or rows.dtype.max))

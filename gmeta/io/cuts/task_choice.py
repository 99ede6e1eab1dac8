"""The choice of a split's tasks to read, by a hash of their ids and by their sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.errors import ConfigError
from gmeta.io.cuts.unsplit_tasks import keep


@dataclass(frozen=True)
class TaskChoice:
    """A choice of tasks by their ids and sizes; tasks left out don't count as bad.

    It divides a data set of one split into tasks to train on and tasks to evaluate on, and leaves out tasks
    that are too small for a support and a query set.

    Attributes:
      parts: The number of parts of about equal size that tasks are divided into, by a hash of their ids.
      held_out: True: read the first of these parts; False: read all others. With one part, all tasks are
        read.
      min_rows: The fewest rows of a task that is read.

    Raises:
      ConfigError: ``parts`` or ``min_rows`` is below 1, or ``held_out`` is set and there is only one part.

    Example:
      >>> tasks("data/train", query=0.2, only=TaskChoice(parts=5))  # four fifths of the users
      >>> tasks("data/train", query=0.2, only=TaskChoice(parts=5, held_out=True))  # the others
    """

    parts: int = 1
    held_out: bool = False
    min_rows: int = 1

    def __post_init__(self) -> None:
        for name in ("parts", "min_rows"):
            whole_number(f"TaskChoice: {name}", getattr(self, name), least=1)
        if self.held_out and self.parts == 1:
            raise ConfigError("TaskChoice: held_out=True names a part of the tasks: give parts of at least 2")

    def at_least(self, rows: int) -> TaskChoice:
        """Return the same choice, limited to tasks with at least ``rows`` rows."""
        return replace(self, min_rows=max(rows, self.min_rows))

    def keeps(self, task: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Mark the tasks to read, (T,) bool, by their ids and numbers of rows, both (T,) int64."""
        enough = rows >= self.min_rows
        if self.parts == 1:
            return enough
        part = tf.strings.to_hash_bucket_fast(tf.strings.as_string(task), self.parts)
        return enough & ((part == 0) if self.held_out else (part != 0))

    @tf.autograph.experimental.do_not_convert
    def __call__(self, element: dict[str, Any]) -> dict[str, Any]:
        """Reduce an element of `gmeta.io.groups` to the chosen tasks."""
        lengths = element["row_splits"][1:] - element["row_splits"][:-1]
        return keep(element, self.keeps(element["task"], lengths))

"""Exposures of a user that are near in time, cut into windows that share one history.

A window begins at an exposure and has the exposures of the user that follow within so much time. Its history
is that of its last exposure; a model that attends by time hides from the earlier ones what happened after
them. What happened before an exposure and arrived after it can't be hidden so: where the generation changes,
or a tail has an event that the exposure before should have had too, a new window begins.

The first row of the window after the one that begins at row i is a function of i, next(i). The windows'
first rows are those that next reaches from the users' first rows; `_reach` finds them by doubling, with
next, next(next), and so on, in as many steps as the logarithm of a user's windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.data.schema import Schema
from gmeta.core.errors import ConfigError


@dataclass(frozen=True)
class ExposureWindows:
    """A function that cuts the groups of an element, users' exposures in the order of time, into windows.

    Attributes:
      time: The column of times.
      within: An exposure belongs to a window if its time is less than that of the window's first plus this.
      generation: The column of generations; all exposures of a window have one. None: it doesn't matter.
      tail: The store's column -> the list column of the exposures' tails; empty: there are none.
      tail_time: Which of the store's columns is the time.

    Raises:
      ConfigError: ``within`` is below 1.
    """

    time: str
    within: int
    generation: str | None
    tail: Mapping[str, str]
    tail_time: str

    def __post_init__(self) -> None:
        whole_number("late: within", self.within, least=1)

    def check(self, schema: Schema) -> None:
        """Check that times are whole numbers.

        Raises:
          ConfigError: They aren't.
        """
        if schema[self.time].dtype != "int64":
            raise ConfigError(f"late: share='window' needs an int64 time, got {schema[self.time]}")

    @tf.autograph.experimental.do_not_convert  # no Python branch on a tensor, so tracing is quicker
    def __call__(self, element: dict[str, Any]) -> dict[str, Any]:
        """Return the element with a group for each window."""
        columns, splits = element["columns"], element["row_splits"]
        owners = tf.repeat(tf.range(tf.size(splits, tf.int64) - 1), splits[1:] - splits[:-1])
        ends = self._ends(columns[self.time], owners)
        for changes in self._changes(columns):
            ends = tf.minimum(ends, _next_of(changes, ends))
        begins = _reach(splits[:-1], ends)
        users = tf.gather(owners, begins)
        return {
            **element,
            "task": tf.gather(element["task"], users),
            "batch_id": tf.gather(element["batch_id"], users),
            "row_splits": tf.concat([begins, splits[-1:]], axis=0),
        }

    def _ends(self, times: tf.Tensor, owners: tf.Tensor) -> tf.Tensor:
        """Return for each row the first one, of its user or the next, that a window from it doesn't have."""
        endless = times > times.dtype.max - self.within
        both = tf.concat([times, tf.where(endless, times, times + self.within)], axis=0)
        size = tf.size(both, tf.int64)
        ranks, of_ends = tf.split(tf.searchsorted(tf.sort(both), both, out_type=tf.int64), 2)
        of_times = owners * size + ranks
        of_limits = owners * size + tf.where(endless, size, of_ends)
        found = tf.searchsorted(of_times, of_limits, out_type=tf.int64)
        return tf.maximum(found, tf.range(1, tf.size(times, tf.int64) + 1))

    def _changes(self, columns: dict[str, Any]) -> list[tf.Tensor]:
        """Mark rows, (rows - 1,) bool from the second on, that can't share a history with the row before."""
        changes = []
        if self.generation is not None:
            generations = columns[self.generation]
            changes.append(generations[1:] != generations[:-1])
        if self.tail:
            tails = {name: columns[of] for name, of in self.tail.items()}
            changes.append(_late_tails(columns[self.time], tails, self.tail_time))
        return changes


def _next_of(changes: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Return for each of `rows` the next row that is marked, or the number of rows."""
    size = tf.size(rows, tf.int64)
    marked = tf.concat([tf.where(changes)[:, 0] + 1, [size]], axis=0)
    return tf.gather(marked, tf.searchsorted(marked, tf.range(size), side="right"))


def _late_tails(times: tf.Tensor, tails: dict[str, tf.RaggedTensor], tail_time: str) -> tf.Tensor:
    """Mark rows, from the second on, whose tail before the time of the row before isn't that row's tail."""
    happened = tails[tail_time][1:]
    was_before = happened.with_values(happened.values < tf.gather(times, happened.value_rowids()))
    lengths = tails[tail_time].row_lengths()[:-1]
    differ = tf.math.reduce_sum(tf.cast(was_before, tf.int64), axis=1) != lengths
    same = tf.where(~differ)[:, 0]
    for own in tails.values():
        now = tf.gather(tf.ragged.boolean_mask(own[1:], was_before), same)
        before = tf.gather(own[:-1], same)
        others = tf.boolean_mask(before.value_rowids(), now.values != before.values)
        differ = tf.tensor_scatter_nd_update(
            differ, tf.gather(same, others)[:, None], tf.ones_like(others, tf.bool)
        )
    return differ


def _reach(first: tf.Tensor, following: tf.Tensor) -> tf.Tensor:
    """Return the numbers, ascending, of the rows that `following` reaches from the `first` ones."""
    size = tf.size(following, tf.int64)
    jump = tf.concat([following, [size]], axis=0)  # the place past the last is followed by itself
    reached = tf.scatter_nd(first[:, None], tf.ones_like(first), tf.shape(jump, tf.int64)) > 0

    def double(reached: tf.Tensor, jump: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        more = reached | (tf.math.unsorted_segment_max(tf.cast(reached, tf.int32), jump, size + 1) > 0)
        return more, tf.gather(jump, jump), tf.reduce_any(more != reached)

    reached, _, _ = tf.while_loop(lambda *state: state[2], double, (reached, jump, size > 0))
    return tf.where(reached[:-1])[:, 0]

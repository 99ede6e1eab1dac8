"""A selection of an element's rows, group by group."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class GroupRows(NamedTuple):
    """A selection of rows of an element's groups, in their order; one gather selects them from a column.

    Attributes:
      numbers: (n,) int64, ascending; row numbers of the element.
      splits: (groups + 1,) int64; group g has ``numbers[splits[g]:splits[g + 1]]``.
    """

    numbers: tf.Tensor
    splits: tf.Tensor

    @classmethod
    def of_marks(cls, marks: tf.Tensor, row_splits: tf.Tensor) -> GroupRows:
        """Select the rows whose mark (rows,) bool is true.

        A group's rows begin after all selected rows that have a smaller number than its first row.
        """
        numbers = tf.where(marks)[:, 0]
        return cls(numbers, tf.searchsorted(numbers, row_splits, out_type=tf.int64))

    @property
    def lengths(self) -> tf.Tensor:
        """The number of rows of each group, (groups,) int64."""
        return self.splits[1:] - self.splits[:-1]

    def latest(self, most: int) -> GroupRows:
        """Keep the last ``most`` rows of each group."""
        return self._between(tf.maximum(self.splits[:-1], self.splits[1:] - most), self.splits[1:])

    def of_groups(self, groups: tf.Tensor) -> GroupRows:
        """Keep the rows of some groups (m,) int64, ascending."""
        return self._between(tf.gather(self.splits[:-1], groups), tf.gather(self.splits[1:], groups))

    def of(self, column: Any) -> tf.RaggedTensor:
        """Gather these rows of a column, (rows,) or RaggedTensor (rows, None): one ragged row a group."""
        return tf.RaggedTensor.from_row_splits(tf.gather(column, self.numbers), self.splits, validate=False)

    def _between(self, begins: tf.Tensor, ends: tf.Tensor) -> GroupRows:
        places = tf.ragged.range(begins, ends)
        return GroupRows(tf.gather(self.numbers, places.values), places.row_splits)

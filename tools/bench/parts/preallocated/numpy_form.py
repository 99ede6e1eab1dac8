"""A preallocated table on a CPU: a sorted map of ids in NumPy, rows in TensorFlow variables.

Our own form of what TorchRec calls Managed Collision Handling, with its policy of the least frequently
used: all rows are made at the start. A sorted array has the ids with a row; the distinct ids of a batch are
found in it by binary search, in ascending order, so that neighbours share search paths. Ids without a row
read and train a shared one, and wait. Every ``interval`` batches the waiting ids are merged into the map, and
if there are too many, the ids with the fewest uses lose their rows. Rows are read by `tf.gather` and trained
in place by TensorFlow's fused Adagrad for sparse gradients.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

Ids = NDArray[np.int64]
_NONE = np.iinfo(np.int64).max
_PIECE = 1 << 16  # rows made at once


class NumpyForm:
    """The table.

    Args:
      capacity: The number of rows, without the shared one.
      dim: The width of a row.
      interval: Batches between merges.
    """

    def __init__(self, capacity: int, dim: int, interval: int) -> None:
        self._ids = np.full(capacity, _NONE)
        self._slots = np.arange(capacity)
        self._uses = np.zeros(capacity, np.int64)
        self._live, self._interval = 0, interval
        self._waiting: list[tuple[Ids, Ids]] = []
        shape = [capacity + 1, dim]
        self.rows = tf.Variable(tf.raw_ops.Empty(shape=shape, dtype=tf.float32))
        self._sums = tf.Variable(tf.raw_ops.Empty(shape=shape, dtype=tf.float32))
        for first in range(0, capacity + 1, _PIECE):
            slots = np.arange(first, min(first + _PIECE, capacity + 1))
            self._renew(slots)

    def step(self, ids: Ids, gradient: tf.Tensor) -> None:
        """Look up a batch's ids, and train their rows by the first of the gradients."""
        distinct, counts = np.unique(ids, return_counts=True)
        slots = tf.constant(self._slots_of(distinct, counts))
        rows = tf.gather(self.rows, slots)
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=self.rows.handle,
            accum=self._sums.handle,
            lr=1e-3,
            epsilon=1e-7,
            grad=gradient[: rows.shape[0]],
            indices=slots,
        )
        if len(self._waiting) == self._interval:
            self.merge()

    def bytes(self) -> int:
        """Return the bytes of the table."""
        of_map = self._ids.nbytes + self._slots.nbytes + self._uses.nbytes
        return of_map + 2 * 4 * int(np.prod(self.rows.shape))

    def find(self, distinct: Ids) -> tuple[Ids, NDArray[np.bool_]]:
        """Return the places of ascending ids in the map, and which of them have one."""
        at = np.searchsorted(self._ids[: self._live], distinct)
        return at, self._ids[np.minimum(at, len(self._ids) - 1)] == distinct

    def _slots_of(self, distinct: Ids, counts: Ids) -> Ids:
        at, found = self.find(distinct)
        self._uses[at[found]] += counts[found]
        self._waiting.append((distinct[~found], counts[~found]))
        slots = np.full(len(distinct), len(self._ids))
        slots[found] = self._slots[at[found]]
        return slots

    def merge(self) -> None:
        """Give rows to the waiting ids, if necessary those of the least used ids."""
        ids, inverse = np.unique(np.concatenate([ids for ids, _ in self._waiting]), return_inverse=True)
        counts = np.concatenate([counts for _, counts in self._waiting])
        uses = np.bincount(inverse, counts, len(ids)).astype(np.int64)
        self._waiting.clear()
        capacity, live = len(self._ids), self._live
        kept = np.ones(live + len(ids), bool)
        if (over := len(kept) - capacity) > 0:
            kept[np.argpartition(np.concatenate([self._uses[:live], uses]), over - 1)[:over]] = False
        old, new = kept[:live], kept[live:]
        free = np.concatenate([self._slots[:live][~old], self._slots[live:]])
        slots = free[: int(new.sum())]
        left = free[len(slots) :]
        self._renew(slots)
        merged = np.concatenate([self._ids[:live][old], ids[new]])
        order = np.argsort(merged, kind="stable")  # merges two sorted runs
        self._live = len(merged)
        self._uses[: self._live] = np.concatenate([self._uses[:live][old], uses[new]])[order]
        self._slots = np.concatenate([np.concatenate([self._slots[:live][old], slots])[order], left])
        self._ids[: self._live], self._ids[self._live :] = merged[order], _NONE

    def _renew(self, slots: Ids) -> None:
        for first in range(0, len(slots), _PIECE):
            piece = tf.constant(slots[first : first + _PIECE])
            shape = [len(piece), self.rows.shape[1]]
            self.rows.scatter_update(tf.IndexedSlices(tf.random.normal(shape, stddev=0.05), piece))
            self._sums.scatter_update(tf.IndexedSlices(tf.fill(shape, 0.1), piece))

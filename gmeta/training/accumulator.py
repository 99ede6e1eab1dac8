"""Sums the gradients of dense variables and table rows over several batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.graph import lift_variables
from gmeta.initializers import Zeros
from gmeta.layers.exchange.recorded_lookups import TableGradient
from gmeta.ops import HashTable
from gmeta.ops.table.records import Records
from gmeta.optimizers import SGD
from gmeta.training.mean_gradients import SOUND, Gradient, with_number

Drained = tuple[list[Gradient], list[tf.Variable], list[TableGradient]]
Sums = tuple[list[Gradient], list[tf.Variable], list[TableGradient], tf.Tensor, tf.Tensor]


class GradientAccumulator:
    """Sample-weighted sums of the gradients of dense variables and table rows.

    A row's sum is itself a row of a hash table, under the same key. It starts at zeros when the key first
    gets a gradient, and an SGD update with the rate -n adds n times the gradient. So only touched rows take
    memory, and summing runs where updates run and as fast as they do.

    Args:
      steps: The number of batches that make it full.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        with tf.device("CPU:0"):  # where it is read
            self._batches = tf.Variable(0, dtype=tf.int64, trainable=False, name="accumulated_batches")
        self._samples = tf.Variable(0, dtype=tf.int64, trainable=False, name="accumulated_samples")
        self._state = tf.Variable(SOUND, dtype=tf.int64, trainable=False, name="accumulated_state")
        self._variables: list[tf.Variable] = []
        self._sums: list[tf.Variable | None] = []  # None: no batch has had a gradient of the variable
        self._tables: dict[int, tuple[HashTable, HashTable]] = {}  # table's id -> table, its sums

    @property
    def batches(self) -> int:
        """The number of batches that were added since the last `drain`."""
        return int(self._batches)

    @property
    def is_made(self) -> bool:
        """Whether it has seen any gradients since it was made."""
        return bool(self._sums or self._tables)

    def is_full(self) -> tf.Tensor:
        """Return whether the accumulator is full, so that `drain` is due."""
        return self._batches >= self._steps

    def is_empty(self) -> tf.Tensor:
        """Return whether there is nothing to `drain`."""
        return tf.equal(self._batches, 0)

    def times_full(self, batches: int) -> tf.Tensor:
        """Return how often it is time to `drain` while some more batches are added, () int64."""
        with tf.device("CPU:0"):
            return (self._batches + batches) // self._steps

    def add(
        self,
        gradients: Sequence[Any],
        variables: Sequence[tf.Variable],
        tables: Sequence[TableGradient],
        samples: tf.Tensor,
    ) -> None:
        """Add a batch's gradients, multiplied by its number of samples."""
        self._add(gradients, variables, tables, tf.cast(samples, tf.float32))
        self._samples.assign_add(tf.cast(samples, tf.int64))

    def add_sums(
        self,
        sums: Sequence[Any],
        variables: Sequence[tf.Variable],
        tables: Sequence[TableGradient],
        samples: tf.Tensor,
        state: tf.Tensor,
    ) -> None:
        """Add a batch's gradients that are already multiplied by its number of samples, and their state.

        The state is a result of `state_of`. Gradients that aren't finite are summed like others: the state
        decides how the sum is used. On several ranks, ``tables`` hold the gradients of all ranks' samples
        for the rows that this rank owns; the other arguments cover only this rank's samples.
        """
        self._add(sums, variables, tables, tf.constant(1.0))
        self._samples.assign_add(tf.cast(samples, tf.int64))
        self._state.assign(tf.maximum(self._state, tf.cast(state, tf.int64)))

    def drain(self) -> Drained:
        """Return the mean gradient over all samples since the last call, and empty the accumulator.

        Returns:
          The gradients of the dense variables, None for one that no batch has had a gradient of; these
          variables; and the gradients of the rows that have one.
        """
        sums, variables, tables, samples, _ = self.drain_sums()
        scale = tf.math.divide_no_nan(1.0, tf.cast(samples, tf.float32))
        means = [with_number(tf.multiply, total, scale) for total in sums]
        return means, variables, [part.times(scale) for part in tables]

    def drain_sums(self) -> Sums:
        """Return the sums since the last call, and empty the accumulator.

        Returns:
          As `drain`, but sums instead of means; the number of samples summed, int64; and the worst state that
          was added.
        """
        sums = [None if total is None else tf.identity(total) for total in self._sums]
        samples, state = tf.identity(self._samples), tf.identity(self._state)
        parts = []
        for table, own in self._tables.values():
            records = own.export()
            parts.append(TableGradient(table, records.keys, records.rows))
        self.clear()
        return sums, list(self._variables), parts, samples, state

    def clear(self) -> None:
        """Forget what was added since the last `drain`."""
        for table, own in self._tables.values():
            own.import_(_no_records(table.dim), replace=True)
        for variable in (*self._sums, self._batches, self._samples):
            if variable is not None:
                variable.assign(tf.zeros_like(variable))
        self._state.assign(SOUND)

    def _add(
        self,
        gradients: Sequence[Any],
        variables: Sequence[tf.Variable],
        tables: Sequence[TableGradient],
        weight: tf.Tensor,
    ) -> None:
        if [id(v) for v in variables] != [id(v) for v in self._variables]:
            self._variables, self._sums = list(variables), [None] * len(variables)
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                total = self._sum_of(number)
                total.assign_add(tf.convert_to_tensor(gradient) * tf.cast(weight, total.dtype))
        for part in tables:
            sums = self._sums_of(part.table)
            sums.lookup(part.keys)  # creates missing rows
            sums.apply_gradients(
                part.keys, part.values, learning_rate=-weight, finite=False
            )  # see `add_sums`
        self._batches.assign_add(1)

    def _sum_of(self, number: int) -> tf.Variable:
        if self._sums[number] is None:
            like = self._variables[number]
            with lift_variables():
                self._sums[number] = tf.Variable(
                    tf.zeros(like.shape, like.dtype), trainable=False, name="accumulated_gradient"
                )
        return self._sums[number]

    def _sums_of(self, table: HashTable) -> HashTable:
        if id(table) not in self._tables:
            name = f"{table.name}/accumulated_gradient"
            sums = HashTable(table.dim, SGD(None), Zeros(), name=name, device=table.device)
            self._tables[id(table)] = (table, sums)
        return self._tables[id(table)][1]


def _no_records(dim: int) -> Records:
    none = tf.zeros([0], tf.int64)
    return Records(
        keys=none,
        rows=tf.zeros([0, dim]),
        slots=tf.zeros([0, 0]),
        frequency=none,
        last_step=none,
        step=tf.constant(0, tf.int64),
    )

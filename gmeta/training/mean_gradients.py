r"""Computes the gradients of the mean loss over the samples of all ranks, and sums them over several batches.

Rank r has the gradient :math:`g_r` of the mean loss over its :math:`n_r` samples. The gradient of the mean
over all :math:`N = \sum_r n_r` samples is

.. math:: g = \frac{1}{N} \sum_r n_r g_r,

a mean weighted by the numbers of samples (MTGenRec, section 3.4), which holds even if some :math:`n_r` are 0.
One grouped all-reduce sums the dense gradients together with the numbers of samples. On CPU ranks, those of
large gradients that the backward pass computes first have all-reduces of their own, which run while it
computes the others (`sum_early`). The rows' owners sum the rows' gradients (`gmeta.layers.exchange.pieces`).
Task parameters never leave their rank (G-Meta, section 2.1.3): only the outer gradient is exchanged.

A `GradientAccumulator` sums the gradients of several batches for one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.collectives.lane import lane_kind
from gmeta.core.graph import lift_variables
from gmeta.core.step import beside_step
from gmeta.initializers import Zeros
from gmeta.layers.exchange.recorded_lookups import RowGradients, TableGradient
from gmeta.ops import HashTable
from gmeta.ops.device import compute_place
from gmeta.ops.table.records import Records
from gmeta.optimizers import SGD

# Packs the small gradients of a step into one vector, so that an operation on all of them is one op. To start
# an op takes 5 to 10 µs, and several ranks take four for each gradient. Large ones would take longer to copy.

Gradient = Any  # tf.Tensor | tf.IndexedSlices | None

MOST_NUMBERS = 1 << 16
"""Gradients with more numbers aren't packed."""


class PackedGradients(NamedTuple):
    """The gradients of variables.

    Attributes:
      parts: A vector for each dtype, and the gradients that aren't packed; some may be None.
      unpack: A function from parts like these to the list of gradients.
    """

    parts: list[Gradient]
    unpack: Callable[[Sequence[Gradient]], list[Gradient]]


def pack_gradients(gradients: Sequence[Gradient]) -> PackedGradients:
    """Pack small gradients of known shape into one vector for each dtype.

    Args:
      gradients: For each variable its gradient, or None.

    Example:
      >>> packed = pack_gradients([tf.ones([2, 2]), None, tf.zeros([3])])
      >>> packed.parts[0].numpy()
      array([1., 1., 1., 1., 0., 0., 0.], dtype=float32)
      >>> [None if each is None else each.shape.as_list() for each in packed.unpack(packed.parts)]
      [[2, 2], None, [3]]
    """
    by_dtype: dict[tf.DType, list[int]] = {}
    for number, gradient in enumerate(gradients):
        if _is_small(gradient):
            by_dtype.setdefault(gradient.dtype, []).append(number)
    groups = [numbers for numbers in by_dtype.values() if len(numbers) > 1]
    alone = sorted(set(range(len(gradients))).difference(*groups))
    vectors = [tf.concat([tf.reshape(gradients[n], [-1]) for n in numbers], axis=0) for numbers in groups]
    shapes = [[gradients[n].shape for n in numbers] for numbers in groups]

    def unpack(parts: Sequence[Gradient]) -> list[Gradient]:
        found: list[Gradient] = [None] * len(gradients)
        for numbers, of_group, vector in zip(groups, shapes, parts, strict=False):
            pieces = tf.split(vector, [shape.num_elements() for shape in of_group])
            for number, shape, piece in zip(numbers, of_group, pieces, strict=True):
                found[number] = tf.reshape(piece, shape)
        for number, part in zip(alone, parts[len(groups) :], strict=True):
            found[number] = part
        return found

    return PackedGradients([*vectors, *(gradients[number] for number in alone)], unpack)


def _is_small(gradient: Gradient) -> bool:
    numbers = _numbers_of(gradient)
    return numbers is not None and numbers <= MOST_NUMBERS


def _numbers_of(gradient: Gradient) -> int | None:
    """Return how many numbers a gradient has; None if it isn't a tensor, or its size is unknown."""
    if not tf.is_tensor(gradient) or isinstance(gradient, tf.IndexedSlices):
        return None
    return gradient.shape.num_elements()


SOUND, NOT_FINITE, REFUSED = 0, 1, 2
"""The state of a rank's gradients: finite; not finite, so loss scaling skips the step; or not to be learned
from, which ends training."""


class GlobalMeans(NamedTuple):
    """The results of a step's all-reduces, the same on every rank.

    Attributes:
      dense: The gradients of the mean over all samples; None for a variable without a gradient.
      scale: () float32, 1 / N; 0 if there are no samples at all.
      states: (world size,) int32, the state of each rank's gradients: `SOUND`, `NOT_FINITE` or `REFUSED`.
      stop: () bool, whether any rank requests a stop.
    """

    dense: list[tf.Tensor | None]
    scale: tf.Tensor
    states: tf.Tensor
    stop: tf.Tensor


def times_samples(gradients: Sequence[Gradient], samples: tf.Tensor) -> list[Gradient]:
    """Multiply each gradient by n, the number of samples; for n = 0 the result is zeros.

    That holds even if the gradient is NaN, as that of a mean over no samples may be.
    """
    return [with_number(tf.math.multiply_no_nan, gradient, samples) for gradient in gradients]


def with_number(operation: Callable[[Any, Any], Any], gradient: Gradient, number: tf.Tensor) -> Gradient:
    """Return ``operation(values, number)`` as a gradient like the given one, whose values these are.

    Args:
      operation: An elementwise op, such as `tf.multiply`.
      gradient: The gradient; None stays None.
      number: A scalar, which is cast to the gradient's dtype.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = with_number(operation, gradient.values, number)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return operation(gradient, tf.cast(number, gradient.dtype))


def state_of(gradients: Sequence[Gradient], allowed: tf.Tensor) -> tf.Tensor:
    """Return whether a rank's gradients are `SOUND`, `NOT_FINITE` or `REFUSED`, () int32.

    Args:
      gradients: The gradients of one rank that are to be checked.
      allowed: Whether a step may be made otherwise, () bool, as returned by `NanGuard.finite`.
    """
    if not gradients:
        with tf.device("CPU:0"):  # which is where `allowed` is, and where the state is needed
            return tf.where(allowed, SOUND, REFUSED)
    return tf.where(allowed, tf.where(all_finite(gradients), SOUND, NOT_FINITE), REFUSED)


def all_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Return whether every number in the gradients is finite, () bool."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    good = [tf.reduce_all(tf.math.is_finite(value)) for value in values]
    return tf.reduce_all(good) if good else tf.constant(True)


LEAST_BUCKET, MOST_BUCKETS = 4 << 20, 8
"""`sum_early` divides gradients into at most so many buckets, each of at least so many bytes."""


def take_shapes(gradients: Sequence[Gradient], variables: Sequence[tf.Variable]) -> None:
    """Give gradients their variables' static shapes: all ranks know them, and divide gradients by them."""
    for gradient, variable in zip(gradients, variables, strict=True):
        if tf.is_tensor(gradient) and not isinstance(gradient, tf.IndexedSlices):
            gradient.set_shape(variable.shape)


def sum_early(sums: Sequence[Gradient]) -> list[tf.Tensor | None]:
    """Sum large gradients over the ranks while a backward pass computes the others.

    The backward pass computes the gradients of a model's last variables first. These travel first, a bucket
    of them in each all-reduce (PyTorch DistributedDataParallel; Li et al., 2020, section 3.2.3). The bucket
    of the first variables is left to `global_means`. Exchanges run in the order in which they are traced, so
    call this before the rows' gradients are exchanged. Only lanes of host memory do so, which all ranks have
    or none has: buckets on GPUs made no step faster.

    Args:
      sums: n_r times this rank's gradients, in the order of the variables.

    Returns:
      For each gradient its sum over all ranks; None for one that is left to `global_means`.
    """
    found: list[tf.Tensor | None] = [None] * len(sums)
    if tf.executing_eagerly() or lane_kind(place := compute_place()) != "tcp":
        return found
    numbers = [_numbers_of(gradient) or 0 for gradient in sums]
    bytes_of = {n: many * sums[n].dtype.size for n, many in enumerate(numbers) if many > MOST_NUMBERS}
    least = max(LEAST_BUCKET, -(-sum(bytes_of.values()) // MOST_BUCKETS))
    bucket: list[int] = []
    for number in reversed(bytes_of):
        if sum(bytes_of[each] for each in bucket) >= least:
            with beside_step():  # it delays the step only if it ends after the backward pass
                terms = [sums[each] for each in bucket]
                totals = collectives.allreduce_sum(terms, name="step/dense/early", place=place)
            for each, total in zip(bucket, totals, strict=True):
                found[each] = total
            bucket.clear()
        bucket.append(number)
    return found


def global_means(
    sums: Sequence[Gradient],
    samples: tf.Tensor,
    state: tf.Tensor,
    stop: tf.Tensor,
    summed: Sequence[tf.Tensor | None] = (),
) -> GlobalMeans:
    """Turn the ranks' sums over samples into means over all samples, in one grouped all-reduce.

    Args:
      sums: n_r times this rank's gradients.
      samples: n_r.
      state: The state of this rank's gradients, as returned by `state_of`.
      stop: Whether this rank requests that all stop after this step, () bool.
      summed: What `sum_early` has returned for these gradients, if it was called.
    """
    totals = list(summed) or [None] * len(sums)
    left = [n for n, gradient in enumerate(sums) if gradient is not None and totals[n] is None]
    terms = [tf.convert_to_tensor(sums[n]) for n in left]
    # In 16 bits, a number of samples would be rounded.
    wide = next((term.dtype for term in terms if term.dtype.size >= 4), tf.float32)
    tail = _tail(wide, samples, state, stop)
    place = compute_place() if terms else "cpu"
    *dense, tail = collectives.allreduce_sum([*terms, tail], name="step/dense", place=place)
    for number, total in zip(left, dense, strict=True):
        totals[number] = total
    return _means(totals, tail)


def scattered_means(
    sums: Sequence[Gradient],
    variables: Sequence[tf.Variable],
    owners: Sequence[int],
    samples: tf.Tensor,
    state: tf.Tensor,
    stop: tf.Tensor,
) -> GlobalMeans:
    """Return the `global_means` of the variables that this rank owns, in one reduce-scatter for each dtype.

    Args:
      sums: n_r times this rank's gradients, one for each variable.
      variables: The variables.
      owners: The rank that owns each of them.
      samples: As for `global_means`.
      state: As for `global_means`.
      stop: As for `global_means`.

    Returns:
      The results of `global_means`, with None for the gradients of other ranks' variables.
    """
    here = collectives.world()
    sums = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in sums]
    by_dtype: dict[tf.DType, list[int]] = {}
    for number, gradient in enumerate(sums):
        if gradient is not None:
            by_dtype.setdefault(gradient.dtype, []).append(number)
    if not by_dtype:
        return global_means(sums, samples, state, stop)
    sizes = [variable.shape.num_elements() for variable in variables]
    tails = [_tail(next(iter(by_dtype)), samples, state, stop)]  # of the first dtype; other dtypes have none
    told: list[tf.Tensor] = []
    totals: list[Gradient] = [None] * len(sums)
    for dtype, members in by_dtype.items():
        of_rank = [[number for number in members if owners[number] == rank] for rank in range(here.size)]
        parts = []
        for numbers in of_rank:
            flat = [*(tf.reshape(sums[number], [sizes[number]]) for number in numbers), *tails]
            parts.append(tf.concat(flat, axis=0) if flat else tf.zeros([0], dtype))
        total = collectives.reduce_scatter_sum(parts, name="step/dense", place=compute_place())
        own = of_rank[here.rank]
        lengths = [*(sizes[number] for number in own), *(tail.shape.num_elements() for tail in tails)]
        pieces = tf.split(total, lengths) if lengths else []
        for number, piece in zip(own, pieces, strict=False):
            totals[number] = tf.reshape(piece, variables[number].shape)
        told += pieces[len(own) :]
        tails = []
    return _means(totals, told[0])


def _tail(dtype: tf.DType, samples: tf.Tensor, state: tf.Tensor, stop: tf.Tensor) -> tf.Tensor:
    """Return the numbers that travel with the gradients: (2 + world size,) of their dtype, in host memory."""
    here = collectives.world()
    with tf.device("CPU:0"):
        states = tf.cast(state, dtype) * tf.one_hot(here.rank, here.size, dtype=dtype)
        return tf.concat([[tf.cast(samples, dtype)], [tf.cast(stop, dtype)], states], axis=0)


def _means(totals: Sequence[Gradient], tail: tf.Tensor) -> GlobalMeans:
    """Divide sums over all ranks by the number of samples, which is in the sum of the ranks' `_tail`."""
    scale = _one_over(tail[0])
    means = [None if total is None else total * tf.cast(scale, total.dtype) for total in totals]
    with tf.device("CPU:0"):  # these numbers decide about ops, so they come here together, once
        told = tf.identity(tail)
        return GlobalMeans(
            means, tf.cast(_one_over(told[0]), tf.float32), tf.cast(told[2:], tf.int32), told[1] > 0
        )


def _one_over(samples: tf.Tensor) -> tf.Tensor:
    return tf.math.divide_no_nan(tf.constant(1, samples.dtype), samples)


# The result of a train step's forward and backward pass.


class StepGradients(NamedTuple):
    """The loss and gradients of one batch.

    Attributes:
      loss: () the loss, a mean over the batch's samples.
      samples: () the number of samples.
      dense: For each trainable variable its gradient, or None.
      rows: The gradients of rows that ``lookups.by_table`` takes.
      lookups: The lookups of the forward pass.
      logs: Name -> value of what the step reports.
    """

    loss: tf.Tensor
    samples: tf.Tensor
    dense: Sequence[Gradient]
    rows: Sequence[Gradient]
    lookups: RowGradients
    logs: dict[str, tf.Tensor]


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

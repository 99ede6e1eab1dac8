r"""Computes the gradients of the mean loss over the samples of all ranks.

Rank r has the gradient :math:`g_r` of the mean loss over its :math:`n_r` samples. The gradient of the mean
over all :math:`N = \sum_r n_r` samples is

.. math:: g = \frac{1}{N} \sum_r n_r g_r,

a mean weighted by the numbers of samples (MTGenRec, section 3.4), which holds even if some :math:`n_r` are 0.
One grouped all-reduce sums the dense gradients together with the numbers of samples. The rows' owners sum the
rows' gradients (`gmeta.layers.exchange.pieces`). Task parameters never leave their rank (G-Meta, section
2.1.3): only the outer gradient is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core import collectives
from gmeta.layers.exchange.recorded_lookups import RowGradients
from gmeta.ops.device import compute_place

# Packs the small gradients of a step into one vector, so that an operation on all of them is one op.
#
# Starting an op takes 5 to 10 µs, however little it computes. A step of several ranks multiplies each dense
# gradient by a number, checks it, sums it over the ranks and divides it. For tens of small gradients this
# takes four ops on their vector. Large gradients aren't packed, because the copy would take longer.

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
    if not tf.is_tensor(gradient) or isinstance(gradient, tf.IndexedSlices):
        return False
    numbers = gradient.shape.num_elements()
    return numbers is not None and numbers <= MOST_NUMBERS


SOUND, NOT_FINITE, REFUSED = 0, 1, 2
"""The state of a rank's gradients: finite; not finite, so loss scaling skips the step; or not to be learned
from, which ends training."""


class GlobalMeans(NamedTuple):
    """The results of a step's all-reduce, the same on every rank.

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
    return tf.where(allowed, tf.where(all_finite(gradients), SOUND, NOT_FINITE), REFUSED)


def all_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Return whether every number in the gradients is finite, () bool."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    good = [tf.reduce_all(tf.math.is_finite(value)) for value in values]
    return tf.reduce_all(good) if good else tf.constant(True)


def global_means(
    sums: Sequence[Gradient], samples: tf.Tensor, state: tf.Tensor, stop: tf.Tensor
) -> GlobalMeans:
    """Turn the ranks' sums over samples into means over all samples, in one grouped all-reduce.

    Args:
      sums: n_r times this rank's gradients.
      samples: n_r.
      state: The state of this rank's gradients, as returned by `state_of`.
      stop: Whether this rank requests that all stop after this step, () bool.
    """
    here = collectives.world()
    present = [tf.convert_to_tensor(gradient) for gradient in sums if gradient is not None]
    dtype = present[0].dtype if present else tf.float32
    with tf.device("CPU:0"):
        states = tf.cast(state, dtype) * tf.one_hot(here.rank, here.size, dtype=dtype)
        tail = tf.concat([[tf.cast(samples, dtype)], [tf.cast(stop, dtype)], states], axis=0)
    place = compute_place() if present else "cpu"
    *dense, tail = collectives.allreduce_sum([*present, tail], name="step/dense", place=place)
    scale = _one_over(tail[0])
    means = iter([total * tf.cast(scale, total.dtype) for total in dense])
    with tf.device("CPU:0"):  # these numbers decide about ops, so they come here together, once
        told = tf.identity(tail)
        return GlobalMeans(
            [None if gradient is None else next(means) for gradient in sums],
            tf.cast(_one_over(told[0]), tf.float32),
            tf.cast(told[2:], tf.int32),
            told[1] > 0,
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

"""Packs the small gradients of a step into one vector, so that what is done to all of them is one op.

To start an op takes 5 to 10 µs, however little it computes. A step of several ranks multiplies each dense
gradient by a number, checks it, sums it over the ranks and divides it. A model has tens of small gradients;
of their vector this takes four ops. A large gradient stays as it is: to copy it would take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

Gradient = Any  # tf.Tensor | tf.IndexedSlices | None

MOST_NUMBERS = 1 << 16
"""A gradient of more numbers isn't packed."""


class PackedGradients(NamedTuple):
    """The gradients of variables.

    Attributes:
      parts: A vector for each dtype, and the gradients that aren't packed; some may be None.
      unpack: A function that makes of parts like these the list of the gradients.
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

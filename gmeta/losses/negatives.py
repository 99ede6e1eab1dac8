"""Negatives drawn from the whole catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.arguments import whole_number


def uniform_negatives(shape: int | Sequence[int], items: int, *, seed: int, step: Any) -> tf.Tensor:
    """Numbers of items, each as likely as any other, with replacement.

    A pure function of (seed, step): counter-based random numbers (Philox4x32-10, Salmon et al. 2011), with
    the seed as their key and the step in the upper half of their counter. Nothing is kept between calls, so a
    resumed run draws what the interrupted one would have, and all ranks of a job draw the same. Add the rank
    to the seed where each shall have negatives of its own.

    Draw them before the step's lookup, so that their rows come with those of the other ids. That an item is
    drawn which is some sample's positive is `SampledSoftmax`'s to mask.

    Args:
      shape: How many: m for all samples together, (n, m) for m of each.
      items: The size V of the catalogue; numbers are from 0 to V - 1. A 64-bit draw modulo V prefers some of
        them by V / 2^64 at most.
      seed: From 0 to 2^64 - 1.
      step: Of the training, from 0 on; a tensor or variable too.

    Returns:
      int64 of that shape.

    Raises:
      ConfigError: There are no items, or the seed is no such number.

    Example:
      >>> uniform_negatives(4, 1000, seed=1, step=7).numpy()
      array([577, 586, 796, 897])
    """
    items = whole_number("uniform_negatives: items", items, least=1)
    key = tf.constant(whole_number("uniform_negatives: seed", seed) & 0xFFFFFFFFFFFFFFFF, tf.uint64)
    counter = tf.stack([tf.constant(0, tf.uint64), tf.cast(step, tf.uint64)])
    return tf.raw_ops.StatelessRandomUniformIntV2(
        shape=tf.convert_to_tensor([shape] if isinstance(shape, int) else shape, tf.int32),
        key=key[tf.newaxis],
        counter=counter,
        alg=_PHILOX,
        minval=tf.constant(0, tf.int64),
        maxval=tf.constant(items, tf.int64),
    )


_PHILOX = 1  # tf.random.Algorithm.PHILOX, as the op wants it

"""The initial rows of a table in plain TensorFlow ops, for graphs that run where gmeta isn't installed.

The same integer and float32 operations in the same order as ``ops/table/core/initializer.h``: the results are
equal to the last bit. TensorFlow's graph optimizer changes the order of additions that follow each other, and
of multiplications by constants; where it could, the formula has an equal form that leaves it nothing to
change: subtract the negative, multiply inside a selection.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from gmeta.initializers.coefficients import CENTER, LOG, TAIL, TRUNCATION
from gmeta.initializers.distributions import Initializer
from gmeta.initializers.philox import LOW, philox4x32

LARGEST_HALF = 65504.0


def _word(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)


def _high(words: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.right_shift(words, _word(32))


def _polynomial(coefficients: Sequence[float], x: tf.Tensor) -> tf.Tensor:
    value = tf.constant(coefficients[0], tf.float32)
    for coefficient in coefficients[1:]:
        value = tf.constant(coefficient, tf.float32) + value * x
    return value


def _log(x: tf.Tensor) -> tf.Tensor:
    bits = tf.bitcast(x, tf.int32)  # of a positive number: no sign to shift in
    mantissa = tf.bitwise.bitwise_or(tf.bitwise.bitwise_and(bits, 0x007FFFFF), 0x3F000000)
    m = tf.bitcast(mantissa, tf.float32)
    low = m < tf.constant(0.707106781186547524, tf.float32)
    e = tf.cast(tf.bitwise.right_shift(bits, 23) - 126, tf.float32) - tf.cast(low, tf.float32)
    m = (m - 1.0) + tf.where(low, m, 0.0)
    z = m * m
    p = _polynomial(LOG, m) * m * z
    p = p + e * -2.12194440e-4
    p = p - 0.5 * z
    return (m + p) - e * -0.693359375


def _erfinv(x: tf.Tensor) -> tf.Tensor:
    w = -_log((1.0 - x) * (1.0 + x))
    center = _polynomial(CENTER, w - 2.5)
    tail = _polynomial(TAIL, tf.sqrt(tf.maximum(w, 5.0)) - 3.0)
    return tf.where(w < 5.0, center * x, tail * x)


def portable_initial_rows(initializer: Initializer, seed: int, keys: tf.Tensor, dim: int) -> tf.Tensor:
    """The initial rows of keys.

    Args:
      initializer: The distribution.
      seed: The table's seed, any int64.
      keys: (n,) int64.
      dim: Width of a row.

    Returns:
      (n, dim) float32, as `initial_rows` and as the native table makes them.

    Example:
      >>> portable_initial_rows(Uniform(0, 1), seed=0, keys=tf.constant([5, -1], tf.int64), dim=2).numpy()
      array([[0.79673123, 0.6647489 ],
             [0.8379536 , 0.50708705]], dtype=float32)
    """
    a, *rest = (np.float32(value) for value in initializer.parameters)
    if initializer.kind == "constant":
        return tf.fill([tf.shape(keys)[0], dim], a)
    (b,) = rest
    bits = tf.bitcast(keys, tf.uint64)[:, tf.newaxis]
    blocks = tf.constant(np.arange(-(-dim // 4), dtype=np.uint64))
    zero = tf.zeros_like(bits + blocks)
    counter = (zero + blocks, zero, zero + (bits & _word(LOW)), zero + _high(bits))
    words = tf.stack(philox4x32(seed, counter, _word, _high), axis=-1)
    words = tf.reshape(words, [tf.shape(keys)[0], 4 * blocks.shape[0]])[:, :dim]
    integers = tf.cast(tf.bitwise.right_shift(words, _word(8)), tf.int32)
    unit = np.float32(2.0**-24)
    if initializer.kind == "uniform":
        return a + (b - a) * (tf.cast(integers, tf.float32) * unit)
    x = tf.cast(2 * integers + (1 - (1 << 24)), tf.float32) * unit
    if initializer.kind == "truncated_normal":
        x = TRUNCATION * x
    return a + b * np.float32(np.sqrt(2.0)) * _erfinv(x)


def portable_round_to_float16(rows: tf.Tensor) -> tf.Tensor:
    """Rows as a table of two precisions reads them for ids that it doesn't hold: `round_to_float16`.

    Example:
      >>> portable_round_to_float16(tf.constant([1.0001, 1e6])).numpy()
      array([1.0000e+00, 6.5504e+04], dtype=float32)
    """
    return tf.cast(tf.cast(tf.clip_by_value(rows, -LARGEST_HALF, LARGEST_HALF), tf.float16), tf.float32)

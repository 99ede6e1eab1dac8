"""Initial rows of tables: pure functions of (table seed, key)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError

# Initial rows of a `gmeta.ops.HashTable`.
#
# Element j of the row of a key is a pure function of (initializer, table seed, key, j): counter-based random
# numbers (Philox4x32-10), turned into the distribution by inversion. It never depends on rank, step or order
# of insertion, and it is the same bit for bit on every machine. The formulas are in
# ``ops/table/core/initializer.h``; `support.reference.table.initial_rows` has them in NumPy.


@dataclass(frozen=True)
class Initializer:
    """Base of the initializers."""

    kind: ClassVar[str]
    """The name in the native op."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value):
                raise ConfigError(f"{type(self).__name__}: {field.name} must be finite, got {value}")

    @property
    def parameters(self) -> tuple[float, ...]:
        """The parameters of the native op, in its order."""
        return tuple(float(getattr(self, field.name)) for field in fields(self))


@dataclass(frozen=True)
class Zeros(Initializer):
    """Rows of zeros."""

    kind: ClassVar[str] = "constant"

    @property
    def parameters(self) -> tuple[float, ...]:
        """The constant."""
        return (0.0,)


@dataclass(frozen=True)
class Constant(Initializer):
    """Rows of one value.

    Args:
      value: The value.
    """

    value: float = 0.0
    kind: ClassVar[str] = "constant"


@dataclass(frozen=True)
class Uniform(Initializer):
    """Uniform in [low, high), at 2^24 equally spaced values.

    Args:
      low: Lower bound.
      high: Upper bound, above ``low``.
    """

    low: float = -0.05
    high: float = 0.05
    kind: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            raise ConfigError(f"Uniform: low must be below high, got low={self.low}, high={self.high}")


def _check_stddev(owner: Normal | TruncatedNormal) -> None:
    if owner.stddev < 0:
        raise ConfigError(f"{type(owner).__name__}: stddev must be >= 0, got {owner.stddev}")


@dataclass(frozen=True)
class Normal(Initializer):
    """Normal; the farthest value that can occur is 5.3 standard deviations from the mean.

    Args:
      mean: Mean.
      stddev: Standard deviation, >= 0.
    """

    mean: float = 0.0
    stddev: float = 0.05
    kind: ClassVar[str] = "normal"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_stddev(self)


@dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """Normal, conditioned on lying within two standard deviations of the mean.

    Args:
      mean: Mean before truncation (and after: the bounds are symmetric).
      stddev: Standard deviation before truncation, >= 0.
    """

    mean: float = 0.0
    stddev: float = 0.05
    kind: ClassVar[str] = "truncated_normal"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_stddev(self)


__all__ = ["Constant", "Normal", "TruncatedNormal", "Uniform", "Zeros"]


# The coefficients that make uniform numbers normal, those of ``ops/table/core/initializer.h``.

LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
CENTER = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
TAIL = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)
TRUNCATION = np.float32(0.95449973610364158)  # erf(sqrt(2))


# Philox4x32-10, the counter-based random numbers of initial rows, over arrays of any library.
#
# Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). NumPy's and TensorFlow's references
# share it: they differ in how an integer becomes a word and how a word is shifted.

LOW = 0xFFFFFFFF
"""The lower 32 bits of a 64-bit word."""


def philox4x32(
    key: int, counter: Sequence[Any], word: Callable[[int], Any], high: Callable[[Any], Any]
) -> list[Any]:
    """Compute blocks of four random words.

    Args:
      key: The 64-bit key.
      counter: The four words of the blocks' counters, the least first: arrays of one shape. A word of 32 bits
        is held in a uint64, so that products of two have room.
      word: Makes such a word of an integer.
      high: The upper 32 bits of words, shifted to the lower.

    Returns:
      The four words of the blocks, arrays of that shape.

    Example:
      >>> words = philox4x32(0, np.zeros((4, 1), np.uint64), np.uint64, lambda x: x >> np.uint64(32))
      >>> [hex(x) for (x,) in words]
      ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & LOW, key >> 32 & LOW
    for _ in range(10):
        product0, product1 = word(0xD2511F53) * c0, word(0xCD9E8D57) * c2
        c0, c2 = high(product1) ^ c1 ^ word(k0), high(product0) ^ c3 ^ word(k1)
        c1, c3 = product1 & word(LOW), product0 & word(LOW)
        k0, k1 = k0 + 0x9E3779B9 & LOW, k1 + 0xBB67AE85 & LOW
    return [c0, c1, c2, c3]


# The initial rows of a table in plain TensorFlow ops, for graphs that run where gmeta isn't installed.
#
# The integer and float32 operations are those of ``ops/table/core/initializer.h``, in the same order, so the
# results are equal bit for bit. TensorFlow's graph optimizer reorders successive additions and
# multiplications by constants. Where it could, the formula is written in an equivalent form that can't be
# reordered: it subtracts the negative, or multiplies inside a selection.

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
    """Compute the initial rows of keys.

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
    parameters = np.array(initializer.parameters, np.float32)
    if initializer.kind == "constant":
        return tf.fill([tf.shape(keys)[0], dim], parameters[0])
    return _drawn_rows(initializer.kind, parameters.tobytes(), seed, dim)(keys)


@functools.lru_cache(maxsize=256)
def _drawn_rows(kind: str, parameters: bytes, seed: int, dim: int) -> Any:
    """Return the function from keys to drawn rows: graphs share it, so its 200 ops are traced once."""
    a, b = np.frombuffer(parameters, np.float32)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
    def rows(keys: tf.Tensor) -> tf.Tensor:
        bits = tf.bitcast(keys, tf.uint64)[:, tf.newaxis]
        blocks = tf.constant(np.arange(-(-dim // 4), dtype=np.uint64))
        zero = tf.zeros_like(bits + blocks)
        counter = (zero + blocks, zero, zero + (bits & _word(LOW)), zero + _high(bits))
        words = tf.stack(philox4x32(seed, counter, _word, _high), axis=-1)
        words = tf.reshape(words, [tf.shape(keys)[0], 4 * blocks.shape[0]])[:, :dim]
        integers = tf.cast(tf.bitwise.right_shift(words, _word(8)), tf.int32)
        unit = np.float32(2.0**-24)
        if kind == "uniform":
            return a + (b - a) * (tf.cast(integers, tf.float32) * unit)
        x = tf.cast(2 * integers + (1 - (1 << 24)), tf.float32) * unit
        if kind == "truncated_normal":
            x = TRUNCATION * x
        return a + b * np.float32(np.sqrt(2.0)) * _erfinv(x)

    return rows


def portable_round_to_float16(rows: tf.Tensor) -> tf.Tensor:
    """Round rows as a table of two precisions reads them for ids that it doesn't hold: `round_to_float16`.

    Example:
      >>> portable_round_to_float16(tf.constant([1.0001, 1e6])).numpy()
      array([1.0000e+00, 6.5504e+04], dtype=float32)
    """
    return tf.cast(tf.cast(tf.clip_by_value(rows, -LARGEST_HALF, LARGEST_HALF), tf.float16), tf.float32)

"""The initial rows of a table, as ``ops/table/core/initializer.h`` makes them, in NumPy.

The same operations on float32 in the same order: the results are equal to the last bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gmeta.initializers.coefficients import CENTER, LOG, TAIL, TRUNCATION
from gmeta.initializers.distributions import Initializer
from gmeta.initializers.philox import LOW, philox4x32

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]


def _high(words: Words) -> Words:
    return words >> np.uint64(32)


def _polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = np.float32(coefficient) + value * x
    return value


def _log(x: Floats) -> Floats:
    bits = x.view(np.uint32)
    m = (bits & np.uint32(0x007FFFFF) | np.uint32(0x3F000000)).view(np.float32)
    low = m < np.float32(0.707106781186547524)
    e = ((bits >> np.uint32(23)).astype(np.int32) - 126).astype(np.float32) - low.astype(np.float32)
    m = (m - np.float32(1)) + np.where(low, m, np.float32(0))
    z = m * m
    p = _polynomial(LOG, m) * m * z
    p = p + e * np.float32(-2.12194440e-4)
    p = p - np.float32(0.5) * z
    return (m + p) + e * np.float32(0.693359375)


def _erfinv(x: Floats) -> Floats:
    one = np.float32(1)
    w = -_log((one - x) * (one + x))
    center = _polynomial(CENTER, w - np.float32(2.5))
    tail = _polynomial(TAIL, np.sqrt(np.maximum(w, np.float32(5))) - np.float32(3))
    return np.where(w < 5, center, tail) * x


def initial_rows(initializer: Initializer, seed: int, keys: npt.NDArray[np.int64], dim: int) -> Floats:
    """The initial rows of keys.

    Args:
      initializer: The distribution.
      seed: The table's seed, any int64.
      keys: (n,) int64.
      dim: Width of a row.

    Returns:
      (n, dim) float32.

    Example:
      >>> initial_rows(Uniform(0, 1), seed=0, keys=np.array([5, -1]), dim=2)
      array([[0.79673123, 0.6647489 ],
             [0.8379536 , 0.50708705]], dtype=float32)
    """
    parameters = [np.float32(value) for value in initializer.parameters]
    if initializer.kind == "constant":
        return np.full((len(keys), dim), parameters[0])
    blocks = -(-dim // 4)
    bits = np.asarray(keys, np.int64).view(np.uint64)
    zero = np.zeros((len(bits), blocks), np.uint64)
    number, key = np.arange(blocks, dtype=np.uint64), bits[:, np.newaxis]
    counter = (zero + number, zero, zero + (key & np.uint64(LOW)), zero + _high(key))
    words = np.stack(philox4x32(seed, counter, np.uint64, _high), axis=-1)
    words = words.reshape(len(bits), 4 * blocks)[:, :dim]
    integers = (words >> np.uint64(8)).astype(np.int32)
    unit = np.float32(2.0**-24)
    a, b = parameters
    if initializer.kind == "uniform":
        return a + (b - a) * (integers.astype(np.float32) * unit)
    x = (2 * integers + 1 - (1 << 24)).astype(np.float32) * unit
    if initializer.kind == "truncated_normal":
        x = TRUNCATION * x
    return a + b * np.float32(np.sqrt(2.0)) * _erfinv(x)

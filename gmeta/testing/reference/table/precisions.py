"""Float32 numbers as they are after having been stored in 16 bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

LARGEST_HALF = 65504.0


def round_to_float16(values: Floats) -> Floats:
    """Through IEEE binary16; magnitudes above 65504 become 65504."""
    return np.clip(values, -LARGEST_HALF, LARGEST_HALF).astype(np.float16).astype(np.float32)


def round_to_bfloat16(values: Floats) -> Floats:
    """Through bfloat16, the upper half of a float32; for numbers that are not NaN."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


def draw_float16(values: Floats, random: npt.NDArray[np.uint32]) -> Floats:
    """Through IEEE binary16, up or down by 16 random bits for each number; for numbers that are not NaN."""
    magnitude = np.minimum(np.abs(values), np.float32(LARGEST_HALF))
    exponent = np.maximum(np.frexp(magnitude)[1].astype(np.int64) - 11, -24)  # of a unit of the last place
    fine = np.floor(np.ldexp(magnitude.astype(np.float64), 16 - exponent)).astype(np.int64)
    units = (fine + random) >> 16
    return np.copysign(np.ldexp(units.astype(np.float64), exponent), values).astype(np.float32)


def draw_bfloat16(values: Floats, random: npt.NDArray[np.uint32]) -> Floats:
    """Through bfloat16, up or down by 16 random bits for each number; for numbers that are not NaN."""
    return ((values.view(np.uint32) + random) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


def to_scaled_float16(rows: Floats) -> npt.NDArray[np.float16]:
    """(n, dim) -> (n, 1 + dim): each row's e, then the row over 2^e (``ops/common/halves/scaled_half.h``)."""
    values = _normal(rows)
    finite = np.abs(np.where(np.isfinite(values), values, 0)).max(axis=1, initial=0, keepdims=True)
    exponents = np.where(finite > 0, np.maximum(np.frexp(finite)[1] - 16, -126), 0)
    scaled = _normal(np.ldexp(values, -exponents))
    clipped = np.where(np.isinf(scaled), scaled, np.clip(scaled, -LARGEST_HALF, LARGEST_HALF))
    return np.concatenate([exponents, clipped], axis=1).astype(np.float16)


def from_scaled_float16(wire: npt.NDArray[np.float16]) -> Floats:
    """The inverse."""
    return _normal(np.ldexp(wire[:, 1:].astype(np.float32), wire[:, :1].astype(np.int32)))


def _normal(values: Floats) -> Floats:
    """With zeros of the same sign in place of subnormal numbers."""
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)

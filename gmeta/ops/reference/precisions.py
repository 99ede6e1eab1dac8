"""Float32 numbers as they are after having been stored in 16 bits, rounded to nearest, ties to even."""

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

"""Random numbers that are a pure function of counters: whoever draws them, in whatever order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data.splitmix import splitmix64


def uniform(*counters: Any) -> NDArray[np.float64]:
    """Draw a number of [0, 1) for each tuple of counters.

    Each counter is mixed into the SplitMix64 of those before it, and the upper 53 bits are the number.

    Args:
      *counters: Integers or arrays of integers that broadcast, such as a seed, a purpose, users and steps.

    Returns:
      float64, in the shape that the counters have together.

    Example:
      >>> bool(uniform(0, 1, np.arange(3), 7)[2] == uniform(0, 1, 2, 7))
      True
    """
    mixed = np.zeros(1, np.uint64)
    for counter in counters:
        mixed = splitmix64(mixed ^ np.asarray(counter).astype(np.int64).view(np.uint64))
    shape = np.broadcast_shapes(*(np.shape(counter) for counter in counters))
    return (mixed >> np.uint64(11)).reshape(shape) * 2.0**-53

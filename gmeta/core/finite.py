"""Finds rows of numbers that hold NaN or infinity."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def rows_not_finite(rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return which rows of a matrix hold NaN or infinity, in ascending order.

    Example:
      >>> rows_not_finite(np.array([[1.0, 2.0], [np.nan, 3e38]])).tolist()
      [1]
    """
    given = np.asarray(rows)
    with np.errstate(over="ignore", invalid="ignore"):  # one pass; rows of huge numbers are then read again
        doubtful = np.flatnonzero(~np.isfinite(np.einsum("ij,ij->i", given, given)))
    return doubtful[~np.isfinite(given[doubtful]).all(axis=1)]

"""Checks numbers that a caller gives; the error says what was given instead."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.core.errors import ConfigError


def whole_number(what: str, value: Any, least: int = 0) -> int:
    """Return a whole number of at least ``least`` as an int; NumPy's integers count too.

    Args:
      what: What to call it in the error.
      value: The value that was given.
      least: The smallest number allowed.

    Raises:
      ConfigError: The value is something else: a smaller number, a float, a text, True or False.

    Example:
      >>> whole_number("fit: steps", 3)
      3
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{what} must be a whole number from {least} on, got {value!r}")
    return int(value)


def finite_number(what: str, value: Any) -> float:
    """Return a number that is neither infinite nor NaN as a float; NumPy's numbers count too.

    Args:
      what: What to call it in the error.
      value: The value that was given.

    Raises:
      ConfigError: The value is something else, such as a text, a schedule or a tensor.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigError(f"{what} must be a finite number, got {value!r}")
    return float(value)


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

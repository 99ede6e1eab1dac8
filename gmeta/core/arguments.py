"""Numbers that a caller has given, or an error that says what was given instead."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from gmeta.core.errors import ConfigError


def whole_number(what: str, value: Any, least: int = 0) -> int:
    """A whole number of at least ``least``, NumPy's among them, as an int.

    Args:
      what: What to call it in the error.
      value: What was given.
      least: The smallest that is one.

    Raises:
      ConfigError: It is something else: a smaller one, a float, a text, True or False.

    Example:
      >>> whole_number("fit: steps", 3)
      3
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{what} must be a whole number from {least} on, got {value!r}")
    return int(value)


def finite_number(what: str, value: Any) -> float:
    """A number that is neither infinite nor NaN, NumPy's among them, as a float.

    Args:
      what: What to call it in the error.
      value: What was given.

    Raises:
      ConfigError: It is something else, such as a text, a schedule or a tensor.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigError(f"{what} must be a finite number, got {value!r}")
    return float(value)

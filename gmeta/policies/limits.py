"""Checks the integers of settings."""

from __future__ import annotations

import math

from gmeta.core.errors import ConfigError


def check_whole(owner: object, name: str, value: object, low: int, high: float = math.inf) -> None:
    """Check that a setting is an integer from ``low`` to ``high``.

    Args:
      owner: What has the setting; errors say its class.
      name: The setting's name.
      value: Its value.
      low: The smallest value allowed.
      high: The largest value allowed.

    Raises:
      ConfigError: It is anything else.
    """
    if not (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
        limit = f"of at least {low}" if high == math.inf else f"from {low} to {high:.0f}"
        raise ConfigError(f"{type(owner).__name__}: {name} must be an integer {limit}, got {value!r}")

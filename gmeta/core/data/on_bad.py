"""The rule for bad records, the same in every package."""

from __future__ import annotations

from typing import Literal, get_args

from gmeta.core.errors import ConfigError

OnBad = Literal["raise", "skip"]
"""What a bad record does: ``"raise"`` ends the run at the first one, ``"skip"`` counts it and goes on."""

ON_BAD: tuple[OnBad, ...] = get_args(OnBad)


def check_on_bad(on_bad: str) -> OnBad:
    """Return ``on_bad`` if it is one of the two rules.

    Raises:
      ConfigError: It is something else.
    """
    for rule in ON_BAD:
        if on_bad == rule:
            return rule
    raise ConfigError(f"on_bad must be 'raise' or 'skip', got {on_bad!r}")

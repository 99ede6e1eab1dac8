"""The settings of negatives for data with only positive rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gmeta.core.errors import ConfigError

NegativeLaw = Literal["uniform", "popularity"]
NEGATIVE_LAWS: tuple[str, ...] = get_args(NegativeLaw)
ADVICE = "--set 'negatives={law=\"uniform\", count=4}'"
"""How negatives are drawn, in messages."""


@dataclass(frozen=True)
class DrawnNegatives:
    """Negatives for implicit feedback, whose rows are all positive (`gmeta.experiment.ranking.negatives`).

    Attributes:
      law: ``"uniform"``: each item is as likely as any other; ``"popularity"``: in proportion to its rows.
      count: The number of negatives for each positive row.
      seed: The seed of the draws.
    """

    law: NegativeLaw = "uniform"
    count: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.law not in NEGATIVE_LAWS:
            raise ConfigError(f"negatives: law must be {' or '.join(NEGATIVE_LAWS)}, got {self.law!r}")
        if self.count < 1 or self.seed < 0:
            raise ConfigError(
                f"negatives: count must be at least 1 and seed at least 0, got {self.count} and {self.seed}"
            )


def describe(settings: DrawnNegatives) -> str:
    """Return how negatives are drawn, as a sentence."""
    law = "evenly" if settings.law == "uniform" else "in proportion to the items' rows"
    return (
        f"Each positive row has up to {settings.count:,} negatives, of items that the user doesn't have, "
        f"drawn {law}: once, so that all methods and baselines see the same rows."
    )

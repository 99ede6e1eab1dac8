"""The settings of simulated users."""

from __future__ import annotations

from dataclasses import dataclass, field

from gmeta.core.arguments import finite_number, whole_number
from gmeta.core.errors import ConfigError
from gmeta.preprocess.synthetic.exposure_config import ExposureConfig


@dataclass(frozen=True)
class SimulatorConfig:
    """The world of simulated users, and how they move and tire.

    Attributes:
      world: The items and the law of clicks: seed, items, categories, and the strengths of the law. Users
        aren't counted, so ``users``, ``mean_events``, ``most_events`` and ``exposures`` don't matter.
      page: How many items the logging policy shows at a time.
      moves: The probability that the first click on a page makes its category the interest.
      learns: λ, the share of the lasting taste that each click moves to its category.
      tired: The logit that an item loses by an exposure that was just now.
      worn: The logit that a category loses by an exposure that was just now.
      recovery: ρ, the share of either that is left after an event or a page.
      recent: How many of the latest exposures a user remembers the items of.
      later: The share of the items that aren't there from the beginning.
      span: By which step all items have appeared.
      novelty: The logit that an item has when it appears; after ``fades`` steps half of it.
      fades: The half-life of novelty, in steps.

    Raises:
      ConfigError: A number can't be what it should.
    """

    world: ExposureConfig = field(default_factory=ExposureConfig)
    page: int = 10
    moves: float = 0.3
    learns: float = 0.02
    tired: float = 1.0
    worn: float = 0.1
    recovery: float = 0.9
    recent: int = 64
    later: float = 0.1
    span: int = 100
    novelty: float = 0.5
    fades: float = 20.0

    def __post_init__(self) -> None:
        for name, least in (("page", 1), ("recent", self.page), ("span", 1)):
            whole_number(f"simulator: {name}", getattr(self, name), least)
        for name in ("moves", "learns", "recovery", "later"):
            if not 0 <= finite_number(f"simulator: {name}", getattr(self, name)) <= 1:
                raise ConfigError(f"simulator: {name} is a share from 0 to 1, got {getattr(self, name)}")
        for name in ("tired", "worn", "novelty"):
            if finite_number(f"simulator: {name}", getattr(self, name)) < 0:
                raise ConfigError(f"simulator: {name} must be 0 or more, got {getattr(self, name)}")
        if finite_number("simulator: fades", self.fades) <= 0:
            raise ConfigError(f"simulator: fades must be more than 0, got {self.fades}")

"""The settings of the synthetic log of exposures."""

from __future__ import annotations

from dataclasses import dataclass

from gmeta.core.errors import ConfigError

FEWEST_EVENTS = 10
"""What each user has at least."""


@dataclass(frozen=True)
class ExposureConfig:
    """The size of the log and the strength of its effects.

    Attributes:
      seed: Seeds all draws.
      users: Number of users, numbered from 1.
      items: Number of items.
      categories: Number of categories.
      styles: Number of styles.
      mean_events: Mean number of a user's events.
      most_events: Largest number of a user's events.
      exposures: Number of items shown to each user, in requests of ``page`` items.
      page: Items of a request.
      click: b; this and the following are the parameters of the formula above.
      now: Logit of the current interest.
      next: Logit of the category that follows it.
      taste: Logit of a category that makes up the user's whole taste.
      quality: Standard deviation of the items' quality.
      home: Standard deviation of a city's taste.
      own: Strength of the user's own liking of styles.
      fresh: Probability that the interest changes at the start of a session.
      drift: Probability that it changes at another event.
      focus: Share of the events that are of the current interest.

    Raises:
      ConfigError: The sizes are impossible.
    """

    seed: int = 0
    users: int = 2000
    items: int = 2000
    categories: int = 20
    styles: int = 8
    mean_events: float = 600
    most_events: int = 3000
    exposures: int = 20
    page: int = 5
    click: float = -3.0
    now: float = 2.5
    next: float = 2.0
    taste: float = 2.0
    quality: float = 0.5
    home: float = 0.3
    own: float = 0.0
    fresh: float = 0.5
    drift: float = 0.01
    focus: float = 0.75

    def __post_init__(self) -> None:
        if min(self.users, self.styles) < 1 or self.categories < 2 or self.items < self.categories:
            raise ConfigError(
                f"at least a user, a style, 2 categories and an item of each are needed, got {self.users}, "
                f"{self.styles}, {self.categories} and {self.items}"
            )
        if not FEWEST_EVENTS <= self.mean_events < self.most_events:
            raise ConfigError(
                f"users have {FEWEST_EVENTS} events or more, on the mean fewer than at most: got mean_events="
                f"{self.mean_events}, most_events={self.most_events}"
            )
        shares = {name: getattr(self, name) for name in ("fresh", "drift", "focus")}
        if not all(0 <= share <= 1 for share in shares.values()):
            raise ConfigError(f"fresh, drift and focus are shares from 0 to 1, got {shares}")
        if self.page < 1 or self.exposures < self.page or self.exposures % self.page:
            raise ConfigError(f"exposures={self.exposures} must be a multiple of page={self.page}")

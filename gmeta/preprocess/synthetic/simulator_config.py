"""The settings of simulated users."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, DataError, finite_number, whole_number
from gmeta.core.shares import splitmix64
from gmeta.preprocess.synthetic.exposures import ExposureConfig


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
      ConfigError: A number is out of its range.
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


# Random numbers that are a pure function of counters, independent of the order of draws.


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


# The states of simulated users at a moment.

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class UserStates:
    """The states of users, a row each; nothing changes them.

    Attributes:
      users: int64 (n,).
      steps: int64 (n,): how many events and pages each has had.
      times: int64 (n,), seconds.
      interest: int64 (n,), the category of interest.
      taste: float64 (n, categories), the lasting taste, which sums to 1.
      shown: int64 (n, recent): the items of the latest exposures, the latest first; -1: none.
      tired: float64 (n, recent): the remaining effect of each of these exposures, from 1 down.
      worn: float64 (n, categories): the remaining effect of all exposures of a category.
    """

    users: Ints
    steps: Ints
    times: Ints
    interest: Ints
    taste: Floats
    shown: Ints
    tired: Floats
    worn: Floats

    def __len__(self) -> int:
        return len(self.users)

    def take(self, rows: NDArray[Any]) -> UserStates:
        """Return the states at some rows, int (m,) or bool (n,)."""
        return UserStates(**{each.name: getattr(self, each.name)[rows] for each in fields(self)})

    def put(self, rows: NDArray[Any], states: UserStates) -> UserStates:
        """Return these states with those at some rows, int (m,) without repetition or bool (n,), replaced."""
        found = {}
        for each in fields(self):
            found[each.name] = getattr(self, each.name).copy()
            found[each.name][rows] = getattr(states, each.name)
        return UserStates(**found)

    def of(self, users: Any) -> UserStates:
        """Return the states of users by their numbers, int (m,).

        Raises:
          DataError: A user has no state.
        """
        users = np.asarray(users, np.int64)
        order = np.argsort(self.users, kind="stable")
        rows = order[np.minimum(np.searchsorted(self.users[order], users), max(len(order) - 1, 0))]
        if (strange := self.users[rows] != users).any():
            raise DataError(
                f"user {users[np.argmax(strange)]} has no state; there are {len(self)} users, from "
                f"{self.users.min()} to {self.users.max()}: give the states of all requested users"
            )
        return self.take(rows)

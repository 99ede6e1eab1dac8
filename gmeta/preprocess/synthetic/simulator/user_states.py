"""What simulated users are like at a moment."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import DataError

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
      tired: float64 (n, recent): what is left of each of these exposures, from 1 down.
      worn: float64 (n, categories): what is left of all exposures of a category.
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
          DataError: A user isn't there.
        """
        users = np.asarray(users, np.int64)
        order = np.argsort(self.users, kind="stable")
        rows = order[np.minimum(np.searchsorted(self.users[order], users), max(len(order) - 1, 0))]
        if (strange := self.users[rows] != users).any():
            raise DataError(
                f"user {users[np.argmax(strange)]} has no state; there are {len(self)} users, from "
                f"{self.users.min()} to {self.users.max()}: give the states of all users that are asked for"
            )
        return self.take(rows)

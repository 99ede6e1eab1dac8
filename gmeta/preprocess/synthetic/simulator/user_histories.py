"""What a log has of simulated users: their own events, and what they were shown by a mediocre policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gmeta.preprocess.synthetic.exposure_world import SHOWN
from gmeta.preprocess.synthetic.simulator.user_states import Floats, Ints, UserStates


@dataclass(frozen=True)
class UserHistories:
    """The histories of n users, of as many events and pages each.

    Attributes:
      items: int64 (n, events), the items of a user's own events, the oldest first.
      actions: int64 (n, events).
      times: int64 (n, events), seconds.
      shown: int64 (n, pages, page), the items of the pages, the oldest first.
      clicks: bool (n, pages, page).
      p_click: float64 (n, pages, page), the true probabilities, which no model may learn from.
      before: int64 (n, pages): how many of the events were before each page.
      states: The states after everything.
    """

    items: Ints
    actions: Ints
    times: Ints
    shown: Ints
    clicks: NDArray[np.bool_]
    p_click: Floats
    before: Ints
    states: UserStates

    @property
    def shown_times(self) -> Ints:
        """When each page was shown, int64 (n, pages), seconds."""
        return np.take_along_axis(self.times, self.before - 1, axis=1) + 1

    def log(self, category: Ints) -> dict[str, NDArray[np.generic]]:
        """Return the columns of a log of events and exposures, by user and time.

        A page comes a second after the event before it, and before the one after.

        Args:
          category: int64 (items,), of the catalogue.

        Returns:
          ``user``, ``timestamp``, ``item``, ``category``, ``action``, ``exposed``, int64, and ``click``,
          ``p_click``, float32, named as those of `gmeta.preprocess.EXPOSURE_SPEC`.
        """
        n, events = self.items.shape
        pages, page = self.shown.shape[1:]
        order = np.concatenate(
            [np.tile(np.arange(events), (n, 1)), np.repeat(self.before - 1, page, axis=1)], axis=1
        )
        places = np.argsort(order, axis=1, kind="stable")

        def column(own: NDArray[np.generic], shown: NDArray[np.generic]) -> NDArray[np.generic]:
            both = np.concatenate([own, shown.reshape(n, pages * page)], axis=1)
            return np.take_along_axis(both, places, axis=1).ravel()

        at = np.repeat(self.shown_times, page, axis=1)
        nothing, items = np.zeros((n, events)), column(self.items, self.shown)
        return {
            "user": np.repeat(self.states.users, events + pages * page),
            "timestamp": column(self.times, at),
            "item": items,
            "category": category[items.astype(np.int64)],
            "action": column(self.actions, np.full_like(self.shown, SHOWN)),
            "exposed": column(np.zeros_like(self.items), np.ones_like(self.shown)),
            "click": column(nothing, self.clicks.astype(np.float64)).astype(np.float32),
            "p_click": column(nothing, self.p_click).astype(np.float32),
        }

"""A simulator of users whose true click probabilities are known, to train and judge policies on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, whole_number
from gmeta.preprocess.synthetic.exposures import SHOWN, SHOWN_OF
from gmeta.preprocess.synthetic.user_law import Floats, Ints, UserLaw, UserStates, choose, uniform

# The log of simulated users: their own events, and the items that a mediocre policy showed them.


@dataclass(frozen=True)
class UserHistories:
    """The histories of n users, with the same numbers of events and pages for each.

    Attributes:
      items: int64 (n, events), the items of a user's own events, the oldest first.
      actions: int64 (n, events).
      times: int64 (n, events), seconds.
      shown: int64 (n, pages, page), the items of the pages, the oldest first.
      clicks: bool (n, pages, page).
      p_click: float64 (n, pages, page), the true probabilities, which no model may learn from.
      before: int64 (n, pages): the number of events before each page.
      states: The states at the end.
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

        A page is shown one second after the preceding event, and before the next one.

        Args:
          category: int64 (items,), of the catalogue.

        Returns:
          ``user``, ``timestamp``, ``item``, ``category``, ``action``, ``exposed``, int64, and ``click``,
          ``p_click``, float32, named as those of `gmeta.preprocess.synthetic.exposures.EXPOSURE_SPEC`.
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


_KIND, _CATEGORY, _POPULAR, _PAGES = range(20, 24)  # purposes of draws, in addition to those of the law
_BLOCK = 4_000_000  # probabilities in memory at once


class Best(NamedTuple):
    """The best items of each user.

    Attributes:
      items: int64 (n, k), the best first.
      probabilities: float64 (n, k).
    """

    items: Ints
    probabilities: Floats


class UserSimulator(UserLaw):
    """Users who follow the law of `gmeta.preprocess.synthetic.user_law`.

    A user's whole life is a function of the seed, the user's number and the items shown to the user. States
    are values: a method returns new ones, and the old ones don't change.

    Args:
      config: The settings; None: the defaults, 2,000 items of 20 categories.

    Example:
      >>> simulator = UserSimulator()
      >>> past = simulator.histories(np.arange(100), events=50)
      >>> past.items.shape
      (100, 50)
      >>> best = simulator.oracle(past.states, k=10)
      >>> shown = simulator.step(past.states, best.items)
      >>> shown.clicks.shape
      (100, 10)
      >>> bool(best.probabilities.mean() > past.p_click.mean())
      True
    """

    def histories(self, users: Any, events: int = 50, pages: int = 4) -> UserHistories:
        """Simulate users from their first event.

        The pages are shown in the later half of the events. A mediocre policy, that of the log, chooses them:
        fixed shares of items from the user's interest, from the category that follows, from the lasting taste
        and from any category, by their popularity in it.

        Args:
          users: Numbers of users, int (n,).
          events: The number of events of each user, >= 2.
          pages: The number of pages shown to each user, at most half of ``events``.

        Raises:
          ConfigError: There are more pages than events to show them after.
        """
        events = whole_number("simulator: events", events, 2)
        pages = whole_number("simulator: pages", pages)
        half = events // 2
        if pages > half:
            raise ConfigError(f"simulator: pages={pages} must be at most half of events={events}")
        states = self.begin(users)
        n, page = len(states), self.config.page
        items, actions, times = (np.empty((n, events), np.int64) for _ in range(3))
        shown, clicks = np.empty((n, pages, page), np.int64), np.empty((n, pages, page), bool)
        p_click = np.empty((n, pages, page))
        width = half // max(pages, 1)
        within = np.floor(width * uniform(self.seed, _PAGES, states.users[:, None], np.arange(pages)))
        before = events - half + 1 + width * np.arange(pages) + within.astype(np.int64)
        for event in range(events):
            items[:, event], actions[:, event], times[:, event], states = self.live(states)
            if pages:
                rows, which = np.nonzero(before == event + 1)
                some = states.take(rows)
                here = self.usual_page(some)
                shown[rows, which], p_click[rows, which] = here, self.click_probability(some, here)
                clicks[rows, which], some = self.step(some, here)
                states = states.put(rows, some)
        return UserHistories(items, actions, times, shown, clicks, p_click, before, states)

    def usual_page(self, states: UserStates) -> Ints:
        """Return the page that the logging policy shows each user now, int64 (n, page)."""
        world, places = self.world, np.arange(self.config.page)

        def draw(purpose: int) -> Floats:
            return uniform(self.seed, purpose, states.users[:, None], states.steps[:, None], places)

        kinds = np.searchsorted(np.cumsum(SHOWN_OF)[:-1], draw(_KIND), side="right")
        which = draw(_CATEGORY)
        taste = np.stack([choose(states.taste, column) for column in which.T], axis=1)
        anything = np.floor(which * self.config.world.categories).astype(np.int64)
        now = np.broadcast_to(states.interest[:, None], which.shape)
        categories = np.choose(kinds, [now, world.follows[now], taste, anything])
        items = world.items(categories.ravel(), draw(_POPULAR).ravel()).reshape(which.shape)
        return self.those_there(items, states.steps[:, None])

    def oracle(self, states: UserStates, k: int = 10) -> Best:
        """Find the k items that each user would most probably click on, knowing the user's state.

        Args:
          states: n users.
          k: The number of items; equal probabilities are ordered by the items' places.

        Raises:
          ConfigError: The catalogue has fewer than ``k`` items.
        """
        size = self.config.world.items
        if whole_number("simulator: k", k, 1) > size:
            raise ConfigError(f"simulator: k must be at most {size}, the items there are, got {k}")
        block = max(1, _BLOCK // size)
        parts = [
            self._best(states.take(np.arange(begin, min(begin + block, len(states)))), k)
            for begin in range(0, len(states), block)
        ]
        if not parts:
            return Best(np.zeros((0, k), np.int64), np.zeros((0, k)))
        return Best(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def all_probabilities(self, states: UserStates) -> Floats:
        """Compute the true probabilities of all items, float64 (n, items)."""
        world = self.world
        logits = self.of_categories(states)[:, world.category] + world.quality[0]
        if self.config.world.own:
            logits += self.of_styles(states)[:, world.style]
        rows, slots = np.nonzero(states.shown >= 0)
        np.subtract.at(
            logits, (rows, states.shown[rows, slots]), self.config.tired * states.tired[rows, slots]
        )
        return self.probabilities(logits, states, np.arange(len(world.category))[None])

    def _best(self, states: UserStates, k: int) -> tuple[Ints, Floats]:
        every = self.all_probabilities(states)
        items = np.argsort(-every, axis=1, kind="stable")[:, :k]
        return items, np.take_along_axis(every, items, axis=1)

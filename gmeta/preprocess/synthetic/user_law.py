"""Defines simulated users: their settings, which items they click on, and how time and exposures change that.

The items, and most terms of a click's logit, are those of the log of `gmeta.preprocess.synthetic.exposures`
with the same seed::

    logit P(click) = b + now·[c = s] + next·[c = f(s)] + taste·τ_u[c] + q_i + home_u[c] + own·w_u[style_i]
                     - tired·F_ui - worn·G_uc + novelty·2^(-(t - b_i) / fades)

=======  =============================================================================================
F, G     how often the item, and its category, were shown to the user: each exposure counts ρ^a after a
         more events and pages
b_i      the step at which the item appears, if it isn't available from the beginning; until then no
         user clicks on it
=======  =============================================================================================

A user's own event moves the interest as in the log: often at the start of a session, rarely within
one. A page moves it to the category of its first click with the probability ``moves``, and each click moves
a share λ of the lasting taste. Everything random is a function of the seed, the user and the user's step, so
users behave the same on any number of ranks, in any order, and after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, DataError, finite_number, whole_number
from gmeta.core.shares import splitmix64
from gmeta.preprocess.synthetic.exposures import (
    ACTIONS,
    CITIES,
    FOLLOWS,
    SESSION,
    SPAN,
    START,
    VIEW,
    ExposureConfig,
    ExposureWorld,
)


@dataclass(frozen=True)
class SimulatorConfig:
    """The world of simulated users, their changes of interest, and their fatigue.

    Attributes:
      world: The items and the law of clicks: seed, items, categories, and the strengths of the law. The
        number of users isn't fixed, so ``users``, ``mean_events``, ``most_events`` and ``exposures`` don't
        matter.
      page: The number of items that the logging policy shows at a time.
      moves: The probability that the first click on a page makes its category the interest.
      learns: λ, the share of the lasting taste that each click moves to its category.
      tired: The logit that an item loses right after an exposure.
      worn: The logit that a category loses right after an exposure.
      recovery: ρ, the share of either that is left after an event or a page.
      recent: The number of latest exposures whose items a user remembers.
      later: The share of the items that aren't available from the beginning.
      span: The step by which all items have appeared.
      novelty: The logit that an item gains when it appears; half of it remains after ``fades`` steps.
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
      float64, in the shape to which the counters broadcast.

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
    """The states of users, one row each; they are immutable.

    Attributes:
      users: int64 (n,).
      steps: int64 (n,): the number of events and pages of each user so far.
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


# Purposes of draws.
_TASTE, _CITY, _STYLES, _BEGIN, _FRESH, _GAP, _GO_ON, _WHICH, _FOCUS, _ITEM, _ACTION = range(11)
_CLICK, _MOVE, _BORN, _AT = range(11, 15)
_CONCENTRATION = 0.3  # of the Dirichlet distribution of tastes


class Events(NamedTuple):
    """One event of each user.

    Attributes:
      items: int64 (n,).
      actions: int64 (n,), as in the log: 1 to 3.
      times: int64 (n,), seconds.
      states: The states after it.
    """

    items: Ints
    actions: Ints
    times: Ints
    states: UserStates


class Shown(NamedTuple):
    """One page that each user was shown.

    Attributes:
      clicks: bool (n, items).
      states: The states after it.
    """

    clicks: NDArray[np.bool_]
    states: UserStates


class UserLaw:
    """The law of simulated users, which this module describes.

    Args:
      config: The settings; None: the defaults.

    Attributes:
      config: The settings.
      world: The items.
      born: int64 (items,): the step at which each item appears; 0: it is available from the beginning.
    """

    def __init__(self, config: SimulatorConfig | None = None) -> None:
        self.config = config or SimulatorConfig()
        self.seed = self.config.world.seed
        self.world = ExposureWorld(np.random.default_rng(self.seed), self.config.world)
        places = np.arange(self.config.world.items)
        late = uniform(self.seed, _BORN, places) < self.config.later
        late &= places >= self.config.world.categories  # a category always has an item
        steps = 1 + np.floor(self.config.span * uniform(self.seed, _AT, places)).astype(np.int64)
        self.born: Ints = np.where(late, steps, 0)

    def begin(self, users: Any) -> UserStates:
        """Return users as they are before their first event.

        Args:
          users: Any numbers of users, int (n,).
        """
        from scipy.special import gammaincinv

        users, categories = np.asarray(users, np.int64), np.arange(self.config.world.categories)
        shares = gammaincinv(_CONCENTRATION, uniform(self.seed, _TASTE, users[:, None], categories))
        taste = shares / shares.sum(axis=1, keepdims=True)
        n, recent = len(users), self.config.recent
        return UserStates(
            users=users,
            steps=np.zeros(n, np.int64),
            times=START + np.floor(SPAN * uniform(self.seed, _BEGIN, users)).astype(np.int64),
            interest=choose(taste, uniform(self.seed, _WHICH, users, -1)),
            taste=taste,
            shown=np.full((n, recent), -1, np.int64),
            tired=np.zeros((n, recent)),
            worn=np.zeros((n, len(categories))),
        )

    def available(self, step: int) -> NDArray[np.bool_]:
        """Return which items are available at a step, bool (items,): a mask as `CodeTrie.allow` takes it."""
        return self.born <= step

    def click_probability(self, states: UserStates, items: Any) -> Floats:
        """Compute the true probabilities that users click on items now.

        Args:
          states: n users.
          items: Places in the catalogue, int (n, group). Each is judged as if no other item were shown.

        Returns:
          float64 (n, group); 0 for an item that hasn't appeared yet.

        Raises:
          DataError: An item isn't in the catalogue, or there isn't a row for each user.
        """
        items = self._items(states, items)
        rows = np.arange(len(states))[:, None]
        logits = self.of_categories(states)[rows, self.world.category[items]] + self.world.quality[0, items]
        if self.config.world.own:
            logits += self.of_styles(states)[rows, self.world.style[items]]
        alike = states.shown[:, None, :] == items[:, :, None]
        logits -= self.config.tired * np.einsum("ngr,nr->ng", alike, states.tired)
        return self.probabilities(logits, states, items)

    def would_click(self, states: UserStates, items: Any) -> NDArray[np.bool_]:
        """Draw whether users would click on items if they were shown now, bool (n, group).

        `step` draws the same clicks: they are a function of the user, the user's step and the item.

        Args:
          states: n users.
          items: As for `click_probability`.

        Raises:
          DataError: As for `click_probability`.
        """
        items = self._items(states, items)
        draws = uniform(self.seed, _CLICK, states.users[:, None], states.steps[:, None], items)
        return draws < self.click_probability(states, items)

    def step(self, states: UserStates, items: Any) -> Shown:
        """Show each user a page of items: draw the clicks, and move the states.

        Args:
          states: n users.
          items: Places in the catalogue, int (n, page), the top of the page first; page <= recent.

        Raises:
          DataError: As for `click_probability`; or a page is longer than what users remember.
        """
        config, items = self.config, self._items(states, items)
        if items.shape[1] > config.recent:
            raise DataError(
                f"simulator: a page of {items.shape[1]} items is longer than recent={config.recent}: make "
                "the simulator with a greater number"
            )
        n, page = items.shape
        clicks = self.would_click(states, items)
        categories = self.world.category[items]
        counts = np.zeros_like(states.worn)
        rows = np.broadcast_to(np.arange(n)[:, None], items.shape)
        np.add.at(counts, (rows[clicks], categories[clicks]), 1.0)
        number = counts.sum(axis=1, keepdims=True)
        moved = 1 - (1 - config.learns) ** number
        taste = (1 - moved) * states.taste + moved * counts / np.maximum(number, 1)
        first = categories[np.arange(n), clicks.argmax(axis=1)]
        moves = clicks.any(axis=1) & (uniform(self.seed, _MOVE, states.users, states.steps) < config.moves)
        worn = states.worn.copy()
        np.add.at(worn, (rows, categories), 1.0)
        states = UserStates(
            users=states.users,
            steps=states.steps,
            times=states.times,
            interest=np.where(moves, first, states.interest),
            taste=taste,
            shown=np.concatenate([items, states.shown], axis=1)[:, : config.recent],
            tired=np.concatenate([np.ones((n, page)), states.tired], axis=1)[:, : config.recent],
            worn=worn,
        )
        return Shown(clicks, self._later(states, 1, states.interest))

    def live(self, states: UserStates) -> Events:
        """Draw one event of each user, and move the states."""
        config, world = self.config.world, self.world

        def draw(purpose: int) -> Floats:
            return uniform(self.seed, purpose, states.users, states.steps)

        starts = draw(_BEGIN) < SESSION
        gaps = -np.log1p(-draw(_GAP)) * np.where(starts, 8 * 3600.0, 30.0)
        changes = draw(_FRESH) < np.where(starts, config.fresh, config.drift)
        fresh = np.where(
            draw(_GO_ON) < FOLLOWS, world.follows[states.interest], choose(states.taste, draw(_WHICH))
        )
        interest = np.where(changes, fresh, states.interest)
        focus = draw(_FOCUS)
        other = choose(states.taste, (focus - config.focus) / max(1 - config.focus, 1e-9))
        category = np.where(focus < config.focus, interest, other)
        items = self.those_there(world.items(category, draw(_ITEM)), states.steps)
        on = (category == interest).astype(np.int64)
        actions = VIEW + (draw(_ACTION)[:, None] > ACTIONS[on].cumsum(axis=1)[:, :2]).sum(axis=1)
        moved = self._later(states, 1 + gaps.astype(np.int64), interest)
        return Events(items, actions, moved.times, moved)

    def those_there(self, items: Ints, steps: Ints) -> Ints:
        """Replace items that haven't appeared yet by the first of their category, which always has."""
        return np.where(self.born[items] <= steps, items, self.world.category[items])

    def _later(self, states: UserStates, seconds: Any, interest: Ints) -> UserStates:
        return UserStates(
            users=states.users,
            steps=states.steps + 1,
            times=states.times + seconds,
            interest=interest,
            taste=states.taste,
            shown=states.shown,
            tired=states.tired * self.config.recovery,
            worn=states.worn * self.config.recovery,
        )

    def _items(self, states: UserStates, items: Any) -> Ints:
        found = np.asarray(items)
        size = self.config.world.items
        if found.ndim != 2 or len(found) != len(states) or found.dtype.kind not in "iu":
            raise DataError(
                f"simulator: items must be integers ({len(states)}, group), a row for each user, got "
                f"{found.dtype} {found.shape}"
            )
        if found.size and not (found.min() >= 0 and found.max() < size):
            row = int(np.argmax(((found < 0) | (found >= size)).any(axis=1)))
            raise DataError(
                f"simulator: user {states.users[row]} is shown {found[row].tolist()}: items are places in "
                f"the catalogue, from 0 to {size - 1}"
            )
        return found.astype(np.int64)

    def of_categories(self, states: UserStates) -> Floats:
        """Compute each category's term in the logits of its items, (n, categories)."""
        city = np.floor(CITIES * uniform(self.seed, _CITY, states.users)).astype(np.int64)
        return self.world.logits(states.interest, states.taste, city) - self.config.worn * states.worn

    def of_styles(self, states: UserStates) -> Floats:
        """Compute each style's term in the logits of its items, (n, styles)."""
        from scipy.special import ndtri  # SciPy takes a while to import, so only when users are simulated

        styles = np.arange(self.config.world.styles)
        drawn = uniform(self.seed, _STYLES, states.users[:, None], styles)
        return self.config.world.own * ndtri(np.maximum(drawn, 2.0**-54))

    def probabilities(self, logits: Floats, states: UserStates, items: Ints) -> Floats:
        """Turn logits into probabilities, higher for new items and 0 for items that don't exist yet.

        Args:
          logits: (n, group), the sum of all other terms.
          states: n users.
          items: int (n, group) or (1, group).
        """
        born, steps = self.born[items], states.steps[:, None]
        age = steps - born
        fresh = (born > 0) * 2.0 ** (-np.maximum(age, 0) / self.config.fades)
        return np.where(age >= 0, 1 / (1 + np.exp(-(logits + self.config.novelty * fresh))), 0.0)


def choose(shares: Floats, numbers: Floats) -> Ints:
    """Choose a column for each row by the row's shares, with a number from 0 to 1 for each."""
    passed = (np.cumsum(shares, axis=1) <= numbers[:, None]).sum(axis=1)
    return np.minimum(passed, shares.shape[1] - 1)

"""A synthetic log of user actions and exposures, in which clicks depend on the order of past events.

The number of a user's events is distributed as in MTGenRec: log-normal with σ 0.9, a mean of 600 and at most
3,000. Events come in sessions. At each moment the user is interested in one category. The interest changes
often at the start of a session and rarely within one: either to the category that follows the current one
(from phones to cases, say) or to a category of the user's lasting taste. Most events are of the current
interest; the others are seldom more than views. Settings decide how often the interest changes, and how many
events are of it: with rarer changes and fewer events, the last few events no longer reveal it, and if ``now``
and ``next`` are small compared with ``taste``, the whole history matters equally. Requests come in the later
half of the history, each for a page of items::

    logit P(click) = b + now·[c = s] + next·[c = f(s)] + taste·τ_u[c] + q_i + home_u[c] + own·w_u[style_i]
    logit P(buy | click) = b' + now·[c = s] / 2 + q'_i

=======  ============================================================================================
c, s     category of the item i that is shown, and the user's interest at that moment
f        which category follows which, the same for all users
τ_u      lasting taste over categories: how often each occurs in the user's history
q, q'    quality of the item, for clicks and for purchases
home_u   taste of the user's city
w_u      the user's own liking of each style, standard normal. No event reveals it: only the clicks among
         exposures do, and adaptation can learn from them
=======  ============================================================================================

The log doesn't contain s, but the order and the actions of the last events reveal it. The mean of a history
reveals τ_u, and little of s. The log contains the true probabilities (``p_click``, and ``p_buy`` of click and
purchase both), so the quality of the best possible ranking is known.

A row is an event (``exposed`` 0) or an exposure (1), of ``user`` at ``timestamp`` in seconds. The data are a
function of the seed and of NumPy's generator; another version of NumPy may draw other data.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError
from gmeta.preprocess.table_spec import ColumnSpec, TableSpec

# The settings of the synthetic log of exposures.

FEWEST_EVENTS = 10
"""The smallest number of events of a user."""


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


# The items of the synthetic log of exposures, and the parameters that all of its users share.

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SHOWN, VIEW, CART, BUY = 0, 1, 2, 3
"""Actions; an exposure has `SHOWN`."""

START, SPAN = 1_700_000_000, 30 * 86_400
"""The earliest time of users' first events, and the range of these times, in seconds."""

SESSION = 0.05
"""The probability that an event begins a session."""

FOLLOWS = 0.4
"""The probability that an interest that changes becomes the category that follows."""

ACTIONS = np.array([[0.94, 0.05, 0.01], [0.70, 0.22, 0.08]])
"""The shares of views, carts and purchases among events off the interest and on it."""

SHOWN_OF = (0.3, 0.25, 0.25, 0.2)
"""The shares of shown items: of the interest, of its successor, of the lasting taste, of any category."""

CITIES = 12


class ExposureWorld:
    """The parameters that are the same for all users."""

    def __init__(self, rng: np.random.Generator, config: ExposureConfig) -> None:
        self.config = config
        items, categories = config.items, config.categories
        self.category = np.concatenate(
            [np.arange(categories), rng.integers(categories, size=items - categories)]
        )
        self.style = rng.integers(config.styles, size=items)
        self.quality = config.quality * rng.standard_normal((2, items))
        ring = rng.permutation(categories)
        self.follows = np.empty(categories, np.int64)
        self.follows[ring] = np.roll(ring, -1)  # all categories form one ring, so none follows itself
        self.home = config.home * rng.standard_normal((CITIES, categories))
        # Items by category, with cumulative popularities from 0 to 1 in each: one search draws an item.
        self.order = np.argsort(self.category, kind="stable")
        popularity = 1 / (rng.permutation(items) + 10.0)
        total = np.bincount(self.category, popularity)
        share = np.cumsum((popularity / total[self.category])[self.order])
        self.shares = np.minimum(share, self.category[self.order] + 1.0)

    def items(self, categories: Ints, uniform: Floats) -> Ints:
        """Return an item of each category, chosen by popularity with a number from 0 to 1 for each."""
        found = np.searchsorted(self.shares, categories + uniform, side="right")
        return self.order[np.minimum(found, len(self.order) - 1)]

    def logits(self, interest: Ints, taste: Floats, city: Ints) -> Floats:
        """Compute each category's terms in the logit of a click, including b.

        Args:
          interest: s, (n,).
          taste: τ_u, (n, categories), or (1, categories) for one user.
          city: (n,).

        Returns:
          (n, categories).
        """
        config, shown = self.config, np.arange(self.config.categories)
        follows = self.follows[interest][:, None]
        logit = config.click + config.now * (shown == interest[:, None]) + config.next * (shown == follows)
        logit += config.taste * taste + self.home[city]
        return logit


EXPOSURE_SPEC = TableSpec(
    task="user",
    time="timestamp",
    columns={
        **{name: ColumnSpec() for name in ("item", "category", "style", "action", "exposed", "city", "age")},
        **{name: ColumnSpec(dtype="float32") for name in ("click", "buy", "p_click", "p_buy")},
    },
)
"""The spec with which `gmeta prepare` reads the log."""

_SIGMA = 0.9
_AGES = 7


def write_exposures(path: str | os.PathLike[str], config: ExposureConfig | None = None) -> Path:
    """Write the log as a Parquet file, a table that `EXPOSURE_SPEC` describes, and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.table(exposure_log(config)), path)
    return path


def exposure_log(config: ExposureConfig | None = None) -> dict[str, NDArray[np.generic]]:
    """Generate the columns of the log, by user and time: int64, but float32 for labels and probabilities."""
    config = config or ExposureConfig()
    rng = np.random.default_rng(config.seed)
    world = ExposureWorld(rng, config)
    events = event_counts(rng, config)
    parts = [_User(rng, config, world, user + 1).rows(int(events[user])) for user in range(config.users)]
    floats = ("click", "buy", "p_click", "p_buy")
    return {
        name: np.concatenate([part[name] for part in parts]).astype(
            np.float32 if name in floats else np.int64
        )
        for name in parts[0]
    }


def event_counts(rng: np.random.Generator, config: ExposureConfig) -> Ints:
    """Draw the number of each user's events, (users,), stratified so that the total hardly varies."""
    normal = NormalDist()
    scores = np.array([normal.inv_cdf((rank + 0.5) / config.users) for rank in range(config.users)])
    low, high = 0.0, math.log(config.most_events)
    for _ in range(50):  # bisection for the mean after clipping
        middle = (low + high) / 2
        mean = np.exp(middle + _SIGMA * scores).clip(FEWEST_EVENTS, config.most_events).mean()
        low, high = (middle, high) if mean < config.mean_events else (low, middle)
    return rng.permutation(
        np.exp(low + _SIGMA * scores).clip(FEWEST_EVENTS, config.most_events).astype(np.int64)
    )


class _User:
    """A user's events and exposures."""

    def __init__(
        self, rng: np.random.Generator, config: ExposureConfig, world: ExposureWorld, number: int
    ) -> None:
        self.rng, self.config, self.world, self.number = rng, config, world, number
        self.city, self.age = int(rng.integers(CITIES)), int(rng.integers(_AGES))
        self.taste: Floats = rng.dirichlet(np.full(config.categories, 0.3))
        self.styles: Floats = config.own * rng.standard_normal(config.styles)

    def rows(self, events: int) -> dict[str, NDArray[np.generic]]:
        """Draw the columns of the user's events and exposures, by time."""
        starts = self.rng.random(events) < SESSION
        gaps = np.where(starts, self.rng.exponential(8 * 3600, events), self.rng.exponential(30, events))
        times = START + int(self.rng.integers(SPAN)) + np.cumsum(1 + gaps).astype(np.int64)
        interest = self._interests(starts)
        history, exposures = self._history(times, interest), self._exposures(times, interest)
        both = {name: np.concatenate([history[name], exposures[name]]) for name in history}
        order = np.argsort(both["timestamp"], kind="stable")
        fixed = {"user": self.number, "city": self.city, "age": self.age}
        return {
            **{name: values[order] for name, values in both.items()},
            **{name: np.full(len(order), value) for name, value in fixed.items()},
        }

    def _draw(self, count: int) -> Ints:
        """Draw categories of the lasting taste."""
        return self.rng.choice(self.config.categories, size=count, p=self.taste)

    def _interests(self, starts: NDArray[np.bool_]) -> Ints:
        """Draw the category of interest at each event, (events,)."""
        changes = self.rng.random(len(starts)) < np.where(starts, self.config.fresh, self.config.drift)
        changes[0] = True
        stays = np.cumsum(changes) - 1
        fresh, goes_on = self._draw(stays[-1] + 1), self.rng.random(stays[-1] + 1) < FOLLOWS
        for stay in range(1, len(fresh)):
            if goes_on[stay]:
                fresh[stay] = self.world.follows[fresh[stay - 1]]
        return fresh[stays]

    def _history(self, times: Ints, interest: Ints) -> dict[str, NDArray[np.generic]]:
        count = len(times)
        focus = self.rng.random(count) < self.config.focus
        category = np.where(focus, interest, self._draw(count))
        on = (category == interest).astype(np.int64)
        actions = VIEW + (self.rng.random(count)[:, None] > ACTIONS[on].cumsum(axis=1)[:, :2]).sum(axis=1)
        nothing = np.zeros(count)
        labels = dict.fromkeys(("click", "buy", "p_click", "p_buy"), nothing)
        return self._columns(times, self.world.items(category, self.rng.random(count)), actions, 0) | labels

    def _exposures(self, times: Ints, interest: Ints) -> dict[str, NDArray[np.generic]]:
        config, rng, world = self.config, self.rng, self.world
        moments = rng.integers(len(times) // 2, len(times), size=config.exposures // config.page)
        moments = np.repeat(np.sort(moments), config.page)
        now = interest[moments]
        kinds = rng.choice(len(SHOWN_OF), size=len(now), p=SHOWN_OF)
        anything = rng.integers(config.categories, size=len(now))
        shown = np.choose(kinds, [now, world.follows[now], self._draw(len(now)), anything])
        items = world.items(shown, rng.random(len(now)))
        of_categories = world.logits(now, self.taste[None], np.full(len(now), self.city))
        logit = of_categories[np.arange(len(now)), shown]
        logit += world.quality[0, items] + self.styles[world.style[items]]
        p_click = 1 / (1 + np.exp(-logit))
        p_buy = p_click / (1 + np.exp(1.0 - config.now / 2 * (shown == now) - world.quality[1, items]))
        # One draw for both: a user who buys has clicked.
        draw = rng.random(len(now))
        labels = {
            "click": (draw < p_click).astype(np.float64),
            "buy": (draw < p_buy).astype(np.float64),
            "p_click": p_click,
            "p_buy": p_buy,
        }
        return self._columns(times[moments] + 1, items, np.full(len(now), SHOWN), 1) | labels

    def _columns(
        self, times: Ints, items: Ints, actions: Ints, exposed: int
    ) -> dict[str, NDArray[np.generic]]:
        return {
            "timestamp": times,
            "item": items,
            "category": self.world.category[items],
            "style": self.world.style[items],
            "action": actions,
            "exposed": np.full(len(times), exposed),
        }

"""A synthetic log of clicks whose tastes and items drift, so that a model that isn't updated loses quality.

A new item appears every few minutes. It is shown often while it is young: the number of its impressions
halves every few hours. Each event shows one item to one user, and the user clicks with the probability p::

    logit p = b + trend_k(t) + a_i(t) + strength <u(t), v_i(t)> / sqrt(d),      v_i(t) = w_k + o_i(t)

=========  =============================================================================================
i, k       item and its topic
u(t)       taste of the user, d numbers
w_k        vector of the topic, which is constant
o_i(t)     the item's own vector, with the share ``own`` of the variance of v_i
a_i(t)     appeal of the item
trend_k    appeal of the topic, the same for all users
=========  =============================================================================================

u, o, a and trend are stationary Gaussian random walks in event time (Ornstein-Uhlenbeck processes): from
one minute to the next, ``x <- r x + sqrt(1 - r^2) s n`` with n ~ N(0, 1) and r = exp(-1 minute / tau). So
the correlation of x(t) and x(t + h) is exp(-h / tau), and the deviation is always s. The rate of events
follows the time of day.

The log contains the true probabilities (``p_click``), so the quality of the best possible ranking is known.
The data are a function of the settings and of NumPy's generator; another version of NumPy may draw other
data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, finite_number, whole_number

Columns = dict[str, NDArray[np.generic]]
Floats = NDArray[np.float64]

START = 1_700_006_400
"""The time of the log's beginning, midnight, in seconds."""

MINUTES_OF_DAY = 1440


@dataclass(frozen=True)
class DriftConfig:
    """The size of the log, how fast it drifts, and the strength of its effects.

    Attributes:
      seed: Seeds all draws.
      hours: The length of the log in event time.
      events: The mean number of events an hour.
      users: Number of users; a user's share of the events is log-normal.
      topics: Number of topics.
      dim: d, the width of vectors.
      items: Number of items at the beginning, whose ages are as later ones' are.
      appears: Minutes between two new items.
      fades: The age at which an item's impressions have halved, in hours.
      day: The rate of events is ``1 - day cos(2 pi t / 24 h)`` times its mean.
      click: b.
      strength: The deviation of a user's liking of an item.
      own: The share of an item's vector that its topic doesn't determine, of the variance.
      appeal: The deviation of a_i.
      trend: The deviation of trend_k.
      taste_hours: tau of tastes, in hours.
      item_hours: tau of an item's vector and appeal.
      trend_hours: tau of trends.

    Raises:
      ConfigError: A number is out of its range.
    """

    seed: int = 0
    hours: int = 48
    events: int = 6000
    users: int = 1000
    topics: int = 16
    dim: int = 4
    items: int = 150
    appears: int = 5
    fades: float = 8.0
    day: float = 0.5
    click: float = -1.8
    strength: float = 1.2
    own: float = 0.3
    appeal: float = 0.6
    trend: float = 0.4
    taste_hours: float = 96.0
    item_hours: float = 24.0
    trend_hours: float = 24.0

    def __post_init__(self) -> None:
        for name in ("hours", "events", "users", "topics", "dim", "items", "appears"):
            whole_number(f"drifting clicks: {name}", getattr(self, name), 1)
        for name in ("fades", "taste_hours", "item_hours", "trend_hours"):
            if finite_number(f"drifting clicks: {name}", getattr(self, name)) <= 0:
                raise ConfigError(f"drifting clicks: {name} must be more than 0, got {getattr(self, name)}")
        for name in ("strength", "appeal", "trend"):
            if finite_number(f"drifting clicks: {name}", getattr(self, name)) < 0:
                raise ConfigError(f"drifting clicks: {name} must be 0 or more, got {getattr(self, name)}")
        finite_number("drifting clicks: click", self.click)
        for name in ("day", "own"):
            if not 0 <= finite_number(f"drifting clicks: {name}", getattr(self, name)) <= 1:
                raise ConfigError(f"drifting clicks: {name} must be from 0 to 1, got {getattr(self, name)}")


class Walk:
    """Numbers that drift, each of them N(0, deviation^2) at any time.

    Args:
      rng: The generator.
      shape: The shape of the numbers.
      deviation: s.
      hours: tau.

    Attributes:
      now: The present values.
    """

    def __init__(
        self, rng: np.random.Generator, shape: tuple[int, ...], deviation: float, hours: float
    ) -> None:
        self._rng, self._deviation = rng, deviation
        self._stays = math.exp(-1 / (60 * hours))
        self.now: Floats = deviation * rng.standard_normal(shape)

    def step(self) -> None:
        """Move by a minute."""
        moves = math.sqrt(1 - self._stays**2) * self._deviation
        self.now = self._stays * self.now + moves * self._rng.standard_normal(self.now.shape)


def click_minutes(config: DriftConfig | None = None) -> Iterator[Columns]:
    """Generate the log minute by minute.

    Args:
      config: The settings; None: the defaults.

    Yields:
      The events of a minute, in the order of their times; there may be none. Columns of (events,): ``user``,
      ``item``, ``topic`` and ``ts`` (microseconds since 1970) in int64, ``click`` and ``p_click`` in float32.

    Example:
      >>> minute = next(click_minutes(DriftConfig(events=600)))
      >>> sorted(minute)
      ['click', 'item', 'p_click', 'topic', 'ts', 'user']
    """
    config = config or DriftConfig()
    rng = np.random.default_rng(config.seed)
    minutes = 60 * config.hours
    later = (minutes - 1) // config.appears
    items = config.items + later
    born = np.concatenate(
        [
            -rng.exponential(60 * config.fades / math.log(2), config.items),
            config.appears * np.arange(1.0, later + 1),
        ]
    )
    topic = rng.integers(0, config.topics, items)
    popularity = np.exp(0.5 * rng.standard_normal(items))
    activity = np.exp(rng.standard_normal(config.users)).cumsum()
    of_topic = math.sqrt(1 - config.own) * rng.standard_normal((config.topics, config.dim))
    taste = Walk(rng, (config.users, config.dim), 1.0, config.taste_hours)
    own = Walk(rng, (items, config.dim), math.sqrt(config.own), config.item_hours)
    appeal = Walk(rng, (items,), config.appeal, config.item_hours)
    trend = Walk(rng, (config.topics,), config.trend, config.trend_hours)
    for minute in range(minutes):
        rate = 1 - config.day * math.cos(2 * math.pi * minute / MINUTES_OF_DAY)
        count = rng.poisson(config.events / 60 * rate)
        user = _choose(activity, rng.random(count))
        age = minute - born
        shown = np.where(age >= 0, popularity * np.exp2(-np.maximum(age, 0) / (60 * config.fades)), 0.0)
        item = _choose(shown.cumsum(), rng.random(count))
        vectors = of_topic[topic[item]] + own.now[item]
        logit = config.click + trend.now[topic[item]] + appeal.now[item]
        logit += config.strength / math.sqrt(config.dim) * (taste.now[user] * vectors).sum(axis=1)
        p_click = 1 / (1 + np.exp(-logit))
        seconds = START + 60 * minute + np.sort(60 * rng.random(count))
        yield {
            "user": user,
            "item": item,
            "topic": topic[item],
            "ts": (1e6 * seconds).astype(np.int64),
            "click": (rng.random(count) < p_click).astype(np.float32),
            "p_click": p_click.astype(np.float32),
        }
        for walk in (taste, own, appeal, trend):
            walk.step()


def _choose(cumulative: Floats, uniform: Floats) -> NDArray[np.int64]:
    """Return the indices that numbers from 0 to 1 choose, given cumulative weights."""
    return np.searchsorted(cumulative[:-1], uniform * cumulative[-1], side="right").astype(np.int64)

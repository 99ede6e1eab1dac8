"""Generated events of users, and requests for what users had done until a moment."""

from __future__ import annotations

from dataclasses import dataclass

from gmeta.preprocess.history.shard_reader import REQUEST

import numpy as np
from numpy.typing import NDArray

COLUMNS = ("time", "birth", "item", "action", "dwell", "category", "context", "price")
"""All columns of an event; the last one is float32, the others int64."""

READ = ("time", "item", "action", "dwell")
"""The columns of a request."""

DAYS = 90
MEAN_EVENTS = 600
STRIPE = 256
"""The most events that a form stores together, if it has such a unit."""

BEGIN, DAY = 1_600_000_000, 86_400
_ITEMS, _CATEGORIES = 1_000_000, 1_000
_LATE = 0.02  # share of late events, by one to three days


@dataclass(frozen=True)
class Events:
    """Events of some users, in the order of user, time and birth.

    Attributes:
      users: (U,) int64, ascending, at least 0.
      ends: (U,) int64: the end of each user's events.
      columns: Name -> (n,) values; the names are `COLUMNS`.
    """

    users: NDArray[np.int64]
    ends: NDArray[np.int64]
    columns: dict[str, NDArray[np.int64] | NDArray[np.float32]]

    @property
    def begins(self) -> NDArray[np.int64]:
        """(U,) int64: the first event of each user."""
        return np.concatenate([[0], self.ends[:-1]])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def stripes(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Cut every user's events into stripes.

        Returns:
          The places of their users in `users`, their first events, and the events before which they end.
        """
        counts = -(-(self.ends - self.begins) // STRIPE)
        owners = np.repeat(np.arange(len(self.users)), counts)
        number = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = self.begins[owners] + number * STRIPE
        return owners, begins, np.minimum(begins + STRIPE, self.ends[owners])


def make_events(
    users: int, mean: int = MEAN_EVENTS, seed: int = 0, *, days: int = DAYS, shortest: int = 10
) -> Events:
    """Generate events.

    A user's number of events is log-normal. So are their gaps, which makes bursts; items follow Zipf's law, a
    category and a price belong to an item, and few events are late.

    Args:
      users: The number of users.
      mean: The mean number of events of a user.
      seed: The seed of the random numbers.
      days: The length of the log.
      shortest: The fewest days between a user's first event and the last.

    Returns:
      The events.
    """
    rng = np.random.default_rng(seed)
    counts = np.maximum(rng.lognormal(np.log(mean) - 0.5, 1.0, users).astype(np.int64), 1)
    ends = np.cumsum(counts)
    owners = np.repeat(np.arange(users), counts)
    size = int(ends[-1])
    elapsed = np.cumsum(rng.lognormal(0, 2.0, size))
    before = np.concatenate([[0.0], elapsed[ends - 1]])
    share = (elapsed - before[:-1][owners]) / (before[1:] - before[:-1])[owners]
    span = rng.integers(shortest, days, users) * float(DAY)
    first = rng.random(users) * (days * DAY - span)
    time = BEGIN + (first[owners] + share * span[owners]).astype(np.int64)
    late = np.where(rng.random(size) < _LATE, rng.integers(1, 4, size), 0)
    birth = np.minimum((time - BEGIN) // DAY + late, days - 1)
    item = np.minimum(rng.zipf(1.2, size), 2**62) * 7_919 % _ITEMS
    prices = np.round(rng.lognormal(3, 1, _ITEMS), 2).astype(np.float32)
    columns = {
        "time": time,
        "birth": birth,
        "item": item,
        "action": rng.choice(6, size, p=[0.7, 0.15, 0.08, 0.04, 0.02, 0.01]),
        "dwell": rng.geometric(1 / 30, size),
        "category": rng.integers(0, _CATEGORIES, _ITEMS)[item],
        "context": np.where(rng.random(size) < 0.05, rng.integers(1, 1_000, size), 0),
        "price": prices[item],
    }
    order = np.lexsort((birth, time, owners))
    ids = np.sort(rng.choice(1_000 * users, users, replace=False))
    return Events(ids, ends, {name: values[order] for name, values in columns.items()})


def make_requests(events: Events, count: int, seed: int, *, in_order: bool) -> NDArray[np.void]:
    """Draw requests, each for the history of a user at a moment between its first event and its last.

    Args:
      events: The events of the users.
      count: The number of requests.
      seed: The seed of the random numbers.
      in_order: Whether users ascend, each once; else any users.

    Returns:
      (count,) `REQUEST`; in order at most as many as there are users.
    """
    rng = np.random.default_rng(seed)
    if in_order:
        chosen = np.sort(rng.permutation(len(events.users))[:count])
    else:
        chosen = rng.integers(0, len(events.users), count)
    time = events.columns["time"]
    first, last = time[events.begins[chosen]], time[events.ends[chosen] - 1]
    requests = np.zeros(len(chosen), REQUEST)
    requests["user"], requests["start"] = events.users[chosen], -(2**63)
    requests["until"] = first + (rng.random(len(chosen)) * (last - first + 1)).astype(np.int64)
    requests["generation"] = (requests["until"] - BEGIN) // DAY
    return requests

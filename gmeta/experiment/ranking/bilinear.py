"""The form that baselines of users and items share, and its drift with time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from gmeta.experiment.baselines.task_rows import Floats, Ints
from gmeta.experiment.measurement.split import as_logits
from gmeta.experiment.ranking.examples import Encoding, Examples

LEAST = 0.01
"""The least probability that a bilinear form predicts."""


@dataclass(frozen=True)
class Bilinear:
    r"""The common form of many baselines: :math:`\mu + b_i + x_i^T u`, for item i and the vector u of a user.

    Attributes:
      user: The feature of users; None: there is none.
      item: The feature of items; None: there is none.
      mean: :math:`\mu`.
      bias: (items + 1,); the first is for unknown items.
      vectors: (items + 1, width).
      users: (users + 1, width); the first is for unknown users.
      binary: Whether the form is a probability, which `scores` converts to a logit.
    """

    user: str | None
    item: str | None
    mean: float
    bias: Floats
    vectors: Floats
    users: Floats
    binary: bool

    def values(self, asked: Examples) -> Floats:
        """Compute the form, (rows,)."""
        item, user = (numbers_of(asked, name) for name in (self.item, self.user))
        moved = np.einsum("rk,rk->r", self.vectors[item], self.users[user])
        return np.asarray(self.mean + self.bias[item] + moved)

    def scores(self, asked: Examples) -> Floats:
        """Compute the form, or its logit, (rows,)."""
        found = self.values(asked)
        return as_logits(found, LEAST) if self.binary else found


def numbers_of(asked: Examples, name: str | None) -> Ints:
    """Return the numbers of a feature's ids, (rows,); all 0 without a feature."""
    return np.zeros(len(asked), np.int64) if name is None else np.asarray(asked.ids[name])


NEAREST = 32
"""The number of rows before a row, and of rows after it, that drift reads."""
_GAPS, _DAMPINGS = (8.0, 1.0, 64.0, 512.0), (1.0, 3.0, 10.0)


@dataclass(frozen=True)
class DriftSettings:
    r"""The settings of drift: the common deviation of a user's rows at about the same time from a baseline.

    Users rate several items of a page, and their moods change. With the residuals r of another baseline on
    the training rows of a row's user, and their times t,

    .. math:: \hat y = \hat y_0 + \frac{\sum_s k_s r_s}{\sum_s k_s + \lambda}, \quad
       k_s = e^{-|t - t_s| / \tau}

    The sum is over the `NEAREST` rows before the row and as many after it. So if test rows are random, it
    includes later training rows as well as earlier ones; if the test comes after training, only earlier ones.

    Attributes:
      scale: :math:`\tau`, in the unit of times.
      damping: :math:`\lambda`, in rows.
    """

    scale: float
    damping: float

    @classmethod
    def grid(cls, train: Examples, user: str) -> list[DriftSettings]:
        """Return the settings to choose from, scaled by the median gap between two rows of a user."""
        gap = train.median_gap(user)
        return [cls(gap * times, damping) for times, damping in product(_GAPS, _DAMPINGS)]

    def fit(self, train: Examples, encoding: Encoding, base: Bilinear) -> Drift:
        """Compute the residuals of a fitted baseline on the training rows."""
        user = encoding.config.user
        assert user is not None
        users, order = np.asarray(train.ids[user]), train.by_user(user)
        residuals = (train.labels - base.values(train))[order]
        splits = np.searchsorted(users[order], np.arange(encoding.sizes[user] + 1))
        return Drift(self, base, user, splits, train.times[order], residuals)


@dataclass(frozen=True)
class Drift:
    """A baseline with the residuals of the training rows.

    Attributes:
      settings: The settings.
      base: The baseline.
      user: The feature of users.
      splits: (users + 2,) offsets of the rows of each user's number.
      times: (rows,) user after user, ascending.
      residuals: (rows,).
    """

    settings: DriftSettings
    base: Bilinear
    user: str
    splits: Ints
    times: Ints
    residuals: Floats

    @cached_property
    def clock(self) -> Ints:
        """(times,) the distinct times, ascending."""
        return np.unique(self.times)

    @cached_property
    def keys(self) -> Ints:
        """(rows,) the rows' users and times as one number, ascending."""
        users = np.repeat(np.arange(len(self.splits) - 1), np.diff(self.splits))
        return users * (len(self.clock) + 1) + np.searchsorted(self.clock, self.times)

    def values(self, asked: Examples) -> Floats:
        """Predict rows: (rows,) rates, or labels."""
        user = np.asarray(asked.ids[self.user])
        at = np.searchsorted(
            self.keys, user * (len(self.clock) + 1) + np.searchsorted(self.clock, asked.times)
        )
        begin, end = self.splits[user], self.splits[user + 1]
        total, weight = np.zeros(len(asked)), np.full(len(asked), self.settings.damping)
        for place in self._places(at):
            there = (place >= begin) & (place < end)
            place = np.where(there, place, 0)
            away = np.abs(self.times[place] - asked.times) / self.settings.scale
            near = np.where(there, np.exp(-away), 0.0)
            total += near * self.residuals[place]
            weight += near
        return self.base.values(asked) + total / weight

    def _places(self, at: Ints) -> Iterator[Ints]:
        for back in range(-NEAREST, NEAREST):
            yield at + back

    def scores(self, asked: Examples) -> Floats:
        """Predict rows: (rows,) logits of labels 0 and 1, or labels."""
        found = self.values(asked)
        return as_logits(found, LEAST) if self.base.binary else found

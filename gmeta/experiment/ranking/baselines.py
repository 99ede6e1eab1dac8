"""Baselines of an experiment on rows, whose settings validation chooses.

Each is fitted to the training rows and returns a `Scorer`: a `Bilinear` form of a row's user and item, one
with `Drift`, or a `Linear` form of all columns. The item mean, biases, kriging and factors are those of cold
start (`gmeta.experiment.baselines`), for users with known training rows. The linear baseline is ridge
regression or, for labels 0 and 1, logistic regression on all ids and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Protocol

import numpy as np
from scipy import optimize, sparse

from gmeta.core.settings import from_mapping
from gmeta.experiment.baselines.attributes import Biases, ItemMean
from gmeta.experiment.baselines.task_rows import Floats, Fold, Ints, Rows, Tasks, within
from gmeta.experiment.baselines.tuning import one_thread
from gmeta.experiment.baselines.vectors import CoRatings, Factors, ItemVectors, Kriging, Start, squared_errors
from gmeta.experiment.measurement.split import as_logits
from gmeta.experiment.ranking.examples import Encoding, Examples, Parts

# The form that baselines of users and items share, and its drift with time.

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


MEAN, ITEM_MEAN, BIASES, KRIGING, FACTORS, DRIFT, LINEAR = (
    "mean",
    "item_mean",
    "biases",
    "kriging",
    "factors",
    "drift",
    "linear",
)
LABELS: Mapping[str, str] = {
    MEAN: "mean",
    ITEM_MEAN: "item mean",
    BIASES: "biases",
    KRIGING: "kriging",
    FACTORS: "factors (ALS)",
    DRIFT: "factors with drift",
    LINEAR: "linear",
}
PENALTIES = (10.0, 1.0, 3.0, 30.0, 100.0)
"""The penalties of the linear baseline, in rows."""
MOST_ROWS = 2_000_000
"""Settings are chosen by a random part of the users, or of the rows, if there are more rows in training."""

_TURNS = 200  # of L-BFGS


class Scorer(Protocol):
    """A fitted model or baseline that predicts rows."""

    def scores(self, asked: Examples) -> Floats:
        """Predict rows: (rows,) logits of labels 0 and 1, or labels."""
        ...


@dataclass(frozen=True)
class Linear:
    """A weight for each id and each number.

    Attributes:
      intercept: The intercept.
      ids: Feature -> (ids + 1,); the first is for unknown ids, and 0. A list's weights are summed and divided
        by the square root of its length.
      numbers: (columns,).
    """

    intercept: float
    ids: Mapping[str, Floats]
    numbers: Floats

    def scores(self, asked: Examples) -> Floats:
        """Sum the weights of each row."""
        found = self.intercept + asked.numbers.astype(np.float64) @ self.numbers
        for name, weights in self.ids.items():
            values = asked.ids[name]
            if isinstance(values, tuple):
                sizes = np.diff(values[1])
                owner = np.repeat(np.arange(len(sizes)), sizes)
                sums = np.bincount(owner, weights[values[0]], minlength=len(sizes))
                found = found + sums / np.sqrt(np.maximum(sizes, 1))
            else:
                found = found + weights[values]
        return np.asarray(found, np.float64)


@dataclass(frozen=True)
class LinearSettings:
    r"""The settings of the linear baseline.

    .. math:: \min_w \sum_r \ell(y_r, w_0 + x_r^T w) + \frac{\lambda}{2} |w|^2

    Attributes:
      penalty: :math:`\lambda`; for squared errors, in units of the labels' variance.
    """

    penalty: float

    def fit(self, train: Examples, encoding: Encoding, start: Linear | None = None) -> Linear:
        """Fit the weights to training rows by L-BFGS, from the weights of other settings."""
        matrix, sizes = design(train, encoding)
        binary = encoding.config.binary
        targets = train.labels if binary else (train.labels - encoding.mean) / encoding.deviation
        rows = len(targets)

        def loss(weights: Floats) -> tuple[float, Floats]:
            found = weights[0] + matrix @ weights[1:]
            if binary:
                value = np.logaddexp(0.0, np.where(targets > 0, -found, found)).sum()
                slope = 1 / (1 + np.exp(-found)) - targets
            else:
                slope = found - targets
                value = 0.5 * float(slope @ slope)
            value += 0.5 * self.penalty * float(weights[1:] @ weights[1:])
            down = np.concatenate([[slope.sum()], matrix.T @ slope + self.penalty * weights[1:]])
            return value / rows, down / rows

        begin = np.zeros(1 + matrix.shape[1])
        if start is not None:
            begin = np.concatenate(
                [[start.intercept], *(each[1:] for each in start.ids.values()), start.numbers]
            )
            if not binary:
                begin[0] -= encoding.mean
                begin /= encoding.deviation
        elif binary:
            begin[0] = float(as_logits(np.array(encoding.mean)))
        best = optimize.minimize(loss, begin, jac=True, method="L-BFGS-B", options={"maxiter": _TURNS}).x
        if not binary:
            best = best * encoding.deviation
            best[0] += encoding.mean
        ends = np.cumsum([1, *sizes.values()])
        ids = {
            name: np.concatenate([[0.0], best[begin : begin + size]])
            for (name, size), begin in zip(sizes.items(), ends, strict=False)
        }
        return Linear(float(best[0]), ids, best[ends[-1] :])


def design(asked: Examples, encoding: Encoding) -> tuple[sparse.csr_matrix, dict[str, int]]:
    """Return rows as a matrix with a column per id and number, and each feature's number of columns."""
    parts, sizes = [], {}
    for name in encoding.config.features:
        values, size = asked.ids[name], encoding.sizes[name] - 1
        sizes[name] = size
        if isinstance(values, tuple):
            flat, splits = values
            counts = np.diff(splits)
            entries = np.repeat(1 / np.sqrt(np.maximum(counts, 1)), counts)
        else:
            flat, splits = values[values > 0], np.concatenate([[0], np.cumsum(values > 0)])
            entries = np.ones(len(flat))
        parts.append(sparse.csr_matrix((entries, flat - 1, splits), shape=(len(asked), size)))
    parts.append(sparse.csr_matrix(asked.numbers.astype(np.float64)))
    return sparse.csr_matrix(sparse.hstack(parts)), sizes


# The settings of all baselines, chosen by the loss in validation.

Measure = Callable[[Scorer], float]


@dataclass(frozen=True)
class Tuned:
    """The settings of the baselines; None where a baseline doesn't suit the data.

    Attributes:
      mean: The settings of the item mean.
      biases: The settings of the biases, on which kriging and factors build.
      kriging: The settings of kriging.
      factors: The settings of factors.
      drift: The settings of drift on top of factors.
      linear: The settings of the linear baseline.
    """

    linear: LinearSettings
    mean: ItemMean | None = None
    biases: Biases | None = None
    kriging: Kriging | None = None
    factors: Factors | None = None
    drift: DriftSettings | None = None

    @classmethod
    def tune(cls, parts: Parts, measure: Measure) -> Tuned:
        """Choose the settings: for the linear baseline by ``measure``, for the others by squared errors.

        Args:
          parts: The data.
          measure: Returns the loss of a scorer in validation.
        """
        with one_thread():
            best, found, linear = np.inf, None, LinearSettings(PENALTIES[0])
            train = _some(parts.train)
            for penalty in sorted(PENALTIES, reverse=True):
                found = LinearSettings(penalty).fit(train, parts.encoding, found)
                if (loss := measure(found)) < best:
                    best, linear = loss, LinearSettings(penalty)
            config = parts.encoding.config
            if config.item is None:
                return cls(linear)
            fold, items = _fold(parts), parts.encoding.sizes[config.item] - 1
            mean = ItemMean.tune([fold], items)
            if config.user not in config.features:
                return cls(linear, mean)
            biases = Biases.tune([fold], items)
            fitted = biases.fit(fold.warm, items)
            pairs = CoRatings.of(fold.warm, fitted)
            grid = Kriging.grid()
            kriging = grid[int(np.argmin(squared_errors(grid, fitted, pairs, fold.cold)))]
            start = Start.of(pairs, max(each.rank for each in grid))
            factors = Factors.tune([(fold, fitted, start)], biases)
            tuned = cls(linear, mean, biases, kriging, factors)
            if not config.time:
                return tuned
            base = dict(tuned._fit(parts, parts.encoding, config.user, config.item))[FACTORS]
            assert isinstance(base, Bilinear)
            drifts = DriftSettings.grid(parts.train, config.user)
            losses = [measure(each.fit(parts.train, parts.encoding, base)) for each in drifts]
            return replace(tuned, drift=drifts[int(np.argmin(losses))])

    def fit(self, parts: Parts) -> dict[str, Scorer]:
        """Fit all baselines to the training rows, the simplest first."""
        config, encoding = parts.encoding.config, parts.encoding
        with one_thread():
            return dict(self._fit(parts, encoding, config.user, config.item))

    def _fit(
        self, parts: Parts, encoding: Encoding, user: str | None, item: str | None
    ) -> Iterator[tuple[str, Scorer]]:
        binary, nothing = encoding.config.binary, np.zeros((1, 0))
        yield MEAN, Bilinear(None, None, encoding.mean, np.zeros(1), nothing, nothing, binary)
        if self.mean is not None:
            assert item is not None
            items = encoding.sizes[item] - 1
            rows = by_user(parts.train, encoding)

            def form(mean: float, bias: Floats, vectors: Floats, users: Floats) -> Bilinear:
                # The baselines number items from 0, and the unknown item comes last.
                return Bilinear(
                    user, item, mean, np.roll(bias, 1), np.roll(vectors, 1, axis=0), users, binary
                )

            means = self.mean.fit(rows, items).means
            yield (
                ITEM_MEAN,
                Bilinear(None, item, 0.0, np.roll(means, 1), np.zeros((items + 1, 0)), nothing, binary),
            )
        if self.biases is not None:
            fitted = self.biases.fit(rows, items)
            own = fitted.tasks(rows)[:, np.newaxis]
            yield BIASES, form(fitted.mean, fitted.item, np.ones((items + 1, 1)), own)
            pairs = CoRatings.of(rows, fitted)

            def of_vectors(found: ItemVectors) -> Bilinear:
                users = found.posterior_means(rows)
                return form(found.mean, found.bias, found.vectors[found.slots], users)

            if self.kriging is not None:
                yield KRIGING, of_vectors(self.kriging.fit(fitted, pairs))
            if self.factors is not None:
                start = Start.of(pairs, self.factors.rank)
                base = of_vectors(self.factors.fit(rows, self.biases, fitted, start))
                yield FACTORS, base
                if self.drift is not None:
                    yield DRIFT, self.drift.fit(parts.train, encoding, base)
        yield LINEAR, self.linear.fit(parts.train, encoding)

    def describe(self) -> dict[str, str]:
        """Return the settings of each baseline as part of a sentence."""
        found = {LINEAR: f"on all ids and numbers, penalty {self.linear.penalty:g}"}
        if self.mean is not None:
            found[ITEM_MEAN] = f"damped by {self.mean.damping:g} rows"
        if self.biases is not None:
            found[BIASES] = (
                f"damped by {self.biases.item_damping:g} rows of an item and {self.biases.task_damping:g} of "
                "a user"
            )
        if self.kriging is not None:
            found[KRIGING] = (
                f"rank {self.kriging.rank}, shrunk by {self.kriging.shrinkage:g} pairs, "
                f"{self.kriging.noise:.0%} noise"
            )
        if self.factors is not None:
            found[FACTORS] = f"{self.factors.rank} factors, penalty {self.factors.penalty:g}"
        if self.drift is not None:
            found[DRIFT] = (
                f"{found[FACTORS]}, and the user's residuals within about {self.drift.scale:g} of a row's "
                f"time, damped by {self.drift.damping:g} rows"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Tuned:
        """Return the settings that `to_json` described."""
        return from_mapping(cls, values, "baselines")


def _some(train: Examples) -> Examples:
    if len(train) <= MOST_ROWS:
        return train
    return train.take(np.sort(np.random.default_rng(0).permutation(len(train))[:MOST_ROWS]))


def by_user(asked: Examples, encoding: Encoding) -> Rows:
    """Return rows user after user; the first user is the unknown one, the only one if rows have no user.

    Items are numbered from 0, and an unknown item has the number after the last.
    """
    config = encoding.config
    assert config.item is not None
    item, user = numbers_of(asked, config.item) - 1, numbers_of(asked, config.user)
    size = 1 if config.user is None else encoding.sizes[config.user]
    order = np.argsort(user, kind="stable")
    splits = np.concatenate([[0], np.cumsum(np.bincount(user, minlength=size))])
    unknown = encoding.sizes[config.item] - 1
    return Rows(np.where(item < 0, unknown, item)[order], asked.labels[order], splits.astype(np.int64))


def _fold(parts: Parts) -> Fold:
    """Return the training rows, and validation users with their training rows as support."""
    warm, asked = (by_user(each, parts.encoding) for each in (parts.train, parts.validation))
    if len(warm.items) > MOST_ROWS:
        order = np.random.default_rng(0).permutation(len(warm.sizes) - 1) + 1
        users = np.sort(within(order, warm.sizes, MOST_ROWS))
        warm, asked = warm.choose(users), asked.choose(users)
    return Fold(warm, Tasks(warm, asked))

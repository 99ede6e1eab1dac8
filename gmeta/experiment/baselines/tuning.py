"""Nearest neighbours, and the choice of all baselines' settings.

The settings are chosen by cross-validation, and the baselines fitted with them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from threadpoolctl import ThreadpoolController

from gmeta.experiment.baselines import (
    ATTRIBUTES,
    BIASES,
    FACTORS,
    ITEM_MEAN,
    KRIGING,
    NEIGHBOURS,
    vectors,
)
from gmeta.experiment.baselines.attributes import (
    Attributes,
    Biases,
    FittedAttributes,
    FittedBiases,
    ItemAttributes,
    ItemMean,
)
from gmeta.experiment.baselines.task_rows import (
    FOLDS,
    Floats,
    Fold,
    Predictor,
    Rows,
    Tasks,
    choose,
    cut_blocks,
    cut_folds,
)
from gmeta.experiment.baselines.vectors import RANKS, CoRatings, Factors, ItemVectors, Kriging, Start

SHRINKAGES, SIZES, DAMPINGS = (100.0, 10.0, 30.0, 300.0), (40, 5, 10, 20), (0.2, 0.1, 0.4, 0.8)


@dataclass(frozen=True)
class Neighbours:
    r"""The settings of k nearest neighbours among the items that a task has rated.

    The weight of support row s for query row q is the covariance of their items' labels beyond the task's
    bias, :math:`w = \max(\Sigma_{qs} - c, 0)` (`gmeta.experiment.baselines.vectors`). Among the k rows of
    largest weight, with residuals from mean, item bias and task bias,

    .. math:: \hat y = \mu + b_q + b_t + \frac{\sum_s w_s (r_s - b_t)}{\sum_s w_s + \lambda v}

    v is the variance of residuals, and :math:`\lambda` shrinks predictions from few weak neighbours towards
    those of the biases.

    Attributes:
      size: The maximum number of support rows that count.
      shrinkage: The number of pairs of the overall mean towards which a covariance is shrunk.
      damping: :math:`\lambda`.
    """

    size: int
    shrinkage: float
    damping: float

    @classmethod
    def grid(cls) -> list[Neighbours]:
        """Return the settings to choose from."""
        return [cls(*each) for each in product(SIZES, SHRINKAGES, DAMPINGS)]

    def fit(self, biases: FittedBiases, pairs: CoRatings) -> FittedNeighbours:
        """Combine the settings with the biases and the pairs of the warm rows."""
        return FittedNeighbours(self, biases, pairs)


@dataclass(frozen=True)
class FittedNeighbours:
    """Neighbours with the biases and pairs of warm rows."""

    settings: Neighbours
    biases: FittedBiases
    pairs: CoRatings

    def predict(self, tasks: Tasks) -> Floats:
        """Predict the query rows, (rows,)."""
        return predict_each([self.settings], self.biases, self.pairs, tasks)[self.settings]


def predict_each(
    settings: Sequence[Neighbours], biases: FittedBiases, pairs: CoRatings, tasks: Tasks
) -> dict[Neighbours, Floats]:
    """Predict the query rows with each of several settings; pairs are looked up and sorted once.

    Returns:
      Settings -> (rows,).
    """
    support, query = tasks.support, tasks.query
    own = biases.tasks(support)
    rest = biases.residuals(support) - own[support.task]
    start = biases.mean + biases.item[query.items] + own[query.task]
    found = {one: start.copy() for one in settings}
    for block in cut_blocks(tasks):
        rows = pairs.slots[query.items[block.query]][:, :, None]
        columns = pairs.slots[support.items[block.support]][:, None]
        products = np.where(block.given[:, None], np.maximum(pairs.products[rows, columns], 0), 0)
        counts = pairs.counts[rows, columns]
        for shrinkage in dict.fromkeys(one.shrinkage for one in settings):
            sums = _sums(products / (counts + np.float32(shrinkage)), rest[block.support])
            for one in settings:
                if one.shrinkage == shrinkage:
                    total, weight = (each[..., min(one.size, each.shape[-1]) - 1] for each in sums)
                    moved = total / (weight + one.damping * pairs.variance)
                    found[one][block.query[block.asked]] += moved[block.asked]
    return found


def _sums(weights: Floats, rest: Floats) -> tuple[Floats, Floats]:
    """Sum weighted residuals and weights over the 1, 2, ... nearest, each (tasks, q, s)."""
    order = np.argsort(-weights, axis=2, kind="stable")
    nearest = np.take_along_axis(weights, order, axis=2).astype(np.float64)
    residuals = np.take_along_axis(np.broadcast_to(rest[:, None], weights.shape), order, axis=2)
    return np.cumsum(nearest * residuals, axis=2), np.cumsum(nearest, axis=2)


def neighbour_errors(
    settings: Sequence[Neighbours], biases: FittedBiases, pairs: CoRatings, cold: Tasks
) -> list[float]:
    """Sum the squared errors of the query rows with each of the settings."""
    found: Mapping[Neighbours, Floats] = predict_each(settings, biases, pairs, cold)
    return [float(np.square(found[one] - cold.query.labels).sum()) for one in settings]


@dataclass(frozen=True)
class ByPairs:
    """The settings of baselines that use the covariance of two items' labels."""

    neighbours: Neighbours
    kriging: Kriging
    factors: Factors


@dataclass(frozen=True)
class Tuned:
    """The settings of all baselines.

    Attributes:
      mean: The settings of the item mean.
      biases: The settings of the biases, from which the others start.
      pairs: The settings of the baselines by pairs; None: rows have no item.
      attributes: The settings of ridge on attributes; None: items have no attributes.
    """

    mean: ItemMean
    biases: Biases
    pairs: ByPairs | None
    attributes: Attributes | None = None

    def fit(self, warm: Rows, items: int) -> dict[str, Predictor]:
        """Fit all baselines: name -> fitted baseline, the simplest first."""
        biases = self.biases.fit(warm, items)
        found: dict[str, Predictor] = {ITEM_MEAN: self.mean.fit(warm, items), BIASES: biases}
        if self.pairs is not None:
            pairs, factors = CoRatings.of(warm, biases), self.pairs.factors
            found[NEIGHBOURS] = self.pairs.neighbours.fit(biases, pairs)
            found[KRIGING] = self.pairs.kriging.fit(biases, pairs)
            found[FACTORS] = factors.fit(warm, self.biases, biases, Start.of(pairs, factors.rank))
        if self.attributes is not None:
            found[ATTRIBUTES] = self.attributes.fit(warm)
        return found

    def describe(self) -> dict[str, str]:
        """Return the settings of each baseline as part of a sentence, name -> text."""
        damping = f"{self.biases.item_damping:g} rows of an item and {self.biases.task_damping:g} of a task"
        found = {ITEM_MEAN: f"damped by {self.mean.damping:g} rows", BIASES: f"damped by {damping}"}
        if self.pairs is not None:
            near, krige, factors = self.pairs.neighbours, self.pairs.kriging, self.pairs.factors
            size, shrinkage = f"the {near.size} nearest", f"shrunk by {near.shrinkage:g} pairs"
            found[NEIGHBOURS] = f"{size}, {shrinkage}, damped by {near.damping:g}"
            found[KRIGING] = (
                f"rank {krige.rank}, shrunk by {krige.shrinkage:g} pairs, {krige.noise:.0%} noise"
            )
            found[FACTORS] = f"{factors.rank} factors, penalty {factors.penalty:g}"
        if self.attributes is not None:
            levels = self.attributes.levels
            found[ATTRIBUTES] = (
                f"penalty {levels.penalty:g}, damped by {levels.item_damping:g} rows of an item"
            )
        return found


def tune(folds: Sequence[Fold], items: int, by_item: bool, attributes: ItemAttributes | None = None) -> Tuned:
    """Choose the settings of all baselines by their squared errors on pseudo-cold tasks.

    Args:
      folds: The folds of warm tasks; without folds, the default settings are used.
      items: The number of items.
      by_item: Whether rows have an item.
      attributes: The items' attributes.
    """
    mean, biases = ItemMean.tune(folds, items), Biases.tune(folds, items)
    pairs = _tune_pairs(folds, biases, items) if by_item else None
    ridge = None if attributes is None else Attributes.tune(folds, attributes, biases.task_damping)
    return Tuned(mean, biases, pairs, ridge)


def _tune_pairs(folds: Sequence[Fold], biases: Biases, items: int) -> ByPairs:
    near_errors, krige_errors, turns = [], [], []
    for fold in folds:
        fitted = biases.fit(fold.warm, items)
        pairs = CoRatings.of(fold.warm, fitted)
        near_errors.append(neighbour_errors(Neighbours.grid(), fitted, pairs, fold.cold))
        krige_errors.append(vectors.squared_errors(Kriging.grid(), fitted, pairs, fold.cold))
        turns.append((fold, fitted, Start.of(pairs, max(RANKS))))
    return ByPairs(
        choose(Neighbours.grid(), near_errors),
        choose(Kriging.grid(), krige_errors),
        Factors.tune(turns, biases),
    )


# All baselines, tuned on warm tasks by cross-validation and fitted to their rows.


@dataclass(frozen=True)
class Baselines:
    """The baselines, fitted to warm tasks.

    Attributes:
      tuned: The settings that cross-validation chose.
      predictors: Name -> the fitted baseline, the simplest first.
      items: How many items the warm rows have. Unknown items have numbers from this one on; only the baseline
        by attributes distinguishes them.

    Example:
      >>> rng = np.random.default_rng(0)
      >>> rows = Rows(rng.integers(0, 9, 80), rng.normal(size=80), np.arange(0, 81, 4))
      >>> list(Baselines.of(Tasks(rows, rows), items=9).predictors)
      ['item_mean', 'biases', 'neighbours', 'kriging', 'factors']
    """

    tuned: Tuned
    predictors: Mapping[str, Predictor]
    items: int

    @classmethod
    def of(
        cls, warm: Tasks, items: int, *, by_item: bool = True, attributes: ItemAttributes | None = None
    ) -> Baselines:
        """Tune all baselines on pseudo-cold tasks, and fit them to all rows of the warm tasks.

        Args:
          warm: The warm tasks; those that stand for new tasks are cut into support and query like test tasks.
            Their items are numbered from 0 to ``items`` - 1.
          items: The number of items.
          by_item: Whether rows have an item. If not, only the item mean and the biases make sense.
          attributes: The attributes of all items that tasks may have; None: items have none, and the baseline
            by attributes is left out.
        """
        with one_thread():
            tuned = tune(cut_folds(warm), items, by_item, attributes)
            return cls(tuned, tuned.fit(warm.whole(), items), items)

    def predict(self, tasks: Tasks) -> dict[str, Floats]:
        """Predict the query rows of new tasks: name -> (rows,)."""
        with one_thread():
            return {name: one.predict(self._seen(name, tasks)) for name, one in self.predictors.items()}

    def predict_warm(self, warm: Tasks, asked: Tasks) -> dict[str, Floats]:
        """Predict the query rows of warm tasks, each by baselines that were fitted to other tasks.

        Args:
          warm: The tasks that the baselines were fitted to. Baselines that were fitted to a task's own query
            rows would have seen the answers.
          asked: Those of the warm tasks that have query rows, perhaps with fewer of their support rows.

        Returns:
          Name -> (rows,).
        """
        order = np.random.default_rng(0).permutation(len(warm))
        found = {name: np.zeros(len(asked.query.items)) for name in self.predictors}
        with one_thread():
            for part in np.array_split(order, min(FOLDS, len(order))):
                others = np.setdiff1d(order, part)
                if not len(others):
                    return self.predict(asked)
                fitted = self.tuned.fit(warm.choose(others).whole(), self.items)
                own = np.flatnonzero(np.isin(warm.asked, part))
                rows = np.isin(asked.query.task, own)
                for name, one in fitted.items():
                    found[name][rows] = one.predict(self._seen(name, asked.choose(own)))
        return found

    def variances(self, tasks: Tasks) -> dict[str, Floats]:
        """Compute the variance of the query rows' labels: name -> (rows,), if the baseline estimates it."""
        with one_thread():
            return {
                name: one.variance(self._seen(name, tasks))
                for name, one in self.predictors.items()
                if isinstance(one, ItemVectors | FittedAttributes)
            }

    def _seen(self, name: str, tasks: Tasks) -> Tasks:
        """Return the tasks as a baseline sees them: without attributes, all unknown items are the same."""
        return tasks if name == ATTRIBUTES else tasks.merge_unknown(self.items)


def one_thread() -> AbstractContextManager[object]:
    """Limit matrix libraries to one thread: more threads don't speed up products of many small matrices.

    If other processes are busy too, threads that wait for each other make the products ten times slower.
    """
    return _libraries().limit(limits=1, user_api="blas")


@cache
def _libraries() -> ThreadpoolController:
    """Find the matrix libraries of NumPy and SciPy once, because that takes a tenth of a second."""
    importlib.import_module("scipy.linalg")
    return ThreadpoolController()

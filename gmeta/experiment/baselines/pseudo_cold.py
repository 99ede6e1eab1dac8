"""Pseudo-cold tasks: warm tasks held out in turn, on which the settings of baselines are chosen.

The warm tasks are divided into folds. The tasks of a fold stand for new tasks: a baseline is fitted to the
rows of the other folds, sees the support rows of the held-out tasks, and predicts their query rows. Support
and query are cut as in evaluation; a task that isn't cut, because no test task has its size, is only used
for fitting. Items may stand for new ones as well. No test task is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from gmeta.experiment.baselines.task_rows import Floats, Ints, Rows, Tasks

FOLDS = 3
MOST_ROWS, MOST_PAIRS = 1_000_000, 3_000_000
"""With more warm rows, or more pairs of support and query rows in a fold, a random part of tasks is used."""


class Predictor(Protocol):
    """A fitted baseline, which predicts the query rows of tasks."""

    def predict(self, tasks: Tasks) -> Floats:
        """Predict the query rows, (rows,), from the support rows of their tasks."""
        ...


@dataclass(frozen=True)
class Fold:
    """One fold of cross-validation.

    Attributes:
      warm: All rows of the tasks to fit to.
      cold: The tasks that are held out.
    """

    warm: Rows
    cold: Tasks


def cut_folds(tasks: Tasks, folds: int = FOLDS, seed: int = 0) -> list[Fold]:
    """Divide warm tasks into folds at random, each of which is held out once.

    Args:
      tasks: The warm tasks, cut as in evaluation.
      folds: The number of folds; with fewer tasks, the number of tasks.
      seed: The seed of the draw.

    Returns:
      The folds; none if there are fewer than two tasks.

    Example:
      >>> rows = Rows(np.array([0, 1, 0, 1]), np.arange(4.0), np.array([0, 1, 2, 3, 4]))
      >>> [(len(fold.warm.items), len(fold.cold)) for fold in cut_folds(Tasks(rows, rows), folds=2)]
      [(4, 2), (4, 2)]
    """
    order = np.random.default_rng(seed).permutation(len(tasks))
    order = within(order, tasks.support.sizes + tasks.query.sizes, MOST_ROWS)
    if len(order) < 2:
        return []
    parts = np.array_split(order, min(folds, len(order)))
    pairs = tasks.support.sizes * tasks.query.sizes
    return [
        Fold(
            tasks.choose(np.concatenate([part for other, part in enumerate(parts) if other != turn])).whole(),
            tasks.choose(within(held_out[np.isin(held_out, tasks.asked)], pairs, MOST_PAIRS)),
        )
        for turn, held_out in enumerate(parts)
    ]


def within(order: Ints, cost: Ints, most: int) -> Ints:
    """Return the first tasks, at least two, whose costs sum to at most ``most``."""
    return order[: max(int(np.searchsorted(np.cumsum(cost[order]), most, side="right")), 2)]


def hide_items(fold: Fold, items: int, seed: int) -> Fold:
    """Drop a random third of the items from the rows to fit to, so that they stand for new items."""
    hidden = np.random.default_rng(seed).permutation(items)[: items // 3]
    kept = fold.warm.keep(~np.isin(fold.warm.items, hidden))
    return Fold(kept, fold.cold) if len(kept.items) else fold


def squared_error(predictor: Predictor, cold: Tasks) -> float:
    """Sum the squared errors of the query rows."""
    return float(np.square(predictor.predict(cold) - cold.query.labels).sum())


Settings = TypeVar("Settings")


def choose(settings: Sequence[Settings], errors: Iterable[Sequence[float]]) -> Settings:
    """Return the settings with the least squared error over all folds; without folds, the first ones.

    Args:
      settings: The settings to choose from, the usual choice first.
      errors: For each fold, the sum of squared errors with each of the settings.
    """
    total = np.sum([np.nan_to_num(np.asarray(each), nan=np.inf) for each in errors], axis=0)
    return settings[int(np.argmin(total))] if np.ndim(total) else settings[0]

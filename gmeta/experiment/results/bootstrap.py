r"""The paired bootstrap over tasks: whether other tasks would confirm a difference.

Tasks are drawn with replacement, as many as there are, and each drawn task contributes its query rows and all
methods' and baselines' predictions for them. The error of a draw covers all of its rows together, and is the
mean over the method's seeds. The interval of a difference contains the middle 95 % of its values over all
draws. It measures the variation over tasks; the spread measures that over seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES, LEVEL = 2000, 0.95
AT_ONCE = 2_000_000
"""So many drawn tasks are held at a time."""

Errors = Mapping[str, NDArray[np.float64]]
"""Metric -> (seeds, tasks): sums over a task's query rows of absolute errors (``"mae"``), of squared ones
(``"rmse"``), or of negative log likelihoods (``"logloss"``)."""

Cell = tuple[str, int]
"""A method or baseline, and its number of steps."""


@dataclass(frozen=True)
class Comparison:
    """The difference of an error between a method and a baseline.

    Attributes:
      method: The method's name.
      steps: Its number of steps.
      baseline: The baseline's name.
      metric: The error.
      difference: The method's error minus the baseline's, over all tasks.
      low: The lower end of its interval.
      high: The upper end.
    """

    method: str
    steps: int
    baseline: str
    metric: str
    difference: float
    low: float
    high: float

    @property
    def wins(self) -> bool:
        """Whether the whole interval is below zero."""
        return self.high < 0

    @property
    def loses(self) -> bool:
        """Whether the whole interval is above zero."""
        return self.low > 0


@dataclass(frozen=True)
class Bootstrap:
    """The comparisons of all methods with all baselines on one split.

    Attributes:
      resamples: How many times tasks were drawn.
      level: The share of the differences that an interval contains.
      comparisons: The comparisons.
    """

    resamples: int
    level: float
    comparisons: Sequence[Comparison]

    def find(self, method: str, steps: int, baseline: str, metric: str) -> Comparison | None:
        """Return one comparison; None if it was not made."""
        wanted = method, steps, baseline, metric
        found = (c for c in self.comparisons if (c.method, c.steps, c.baseline, c.metric) == wanted)
        return next(found, None)


def compare(
    methods: Mapping[Cell, Errors],
    baselines: Mapping[str, Errors],
    rows: NDArray[np.int64],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Bootstrap:
    """Compare each method with each baseline.

    Args:
      methods: Method and steps -> its errors. A method with an error that isn't finite is left out.
      baselines: Baseline -> its errors, for the same metrics and tasks.
      rows: (tasks,) how many query rows each task has.
      resamples: How many times tasks are drawn.
      seed: The seed of the draws, which all comparisons share.

    Example:
      >>> ours, theirs = {"mae": np.array([[1.0, 1.0, 2.0]])}, {"mae": np.array([[2.0, 3.0, 3.0]])}
      >>> [found] = compare({("maml", 1): ours}, {"mean": theirs}, np.array([2, 2, 2])).comparisons
      >>> round(found.difference, 3), round(found.low, 3), round(found.high, 3), found.wins
      (-0.667, -1.0, -0.5, True)
    """
    from scipy.stats import bootstrap

    tasks = len(rows)
    sound = {cell: found for cell, found in methods.items() if _finite(found)}
    known = {name: found for name, found in baselines.items() if _finite(found)}
    pairs = [(cell, name, metric) for cell, found in sound.items() for name in known for metric in found]
    if tasks < 2 or not pairs:
        return Bootstrap(resamples, LEVEL, [])

    def differences(index: NDArray[np.int64], axis: int = -1) -> NDArray[np.float64]:
        drawn = index.reshape(-1, tasks)
        at = drawn + tasks * np.arange(len(drawn))[:, None]
        weights = np.bincount(at.ravel(), minlength=tasks * len(drawn)).reshape(-1, tasks).astype(np.float64)
        total = weights @ rows
        ours = {
            (cell, m): _error(m, weights, e, total) for cell, found in sound.items() for m, e in found.items()
        }
        base = {
            (name, m): _error(m, weights, e, total) for name, found in known.items() for m, e in found.items()
        }
        found = np.stack([ours[cell, metric] - base[name, metric] for cell, name, metric in pairs])
        return found.reshape(-1, *index.shape[:-1])

    everything = np.arange(tasks)
    interval = bootstrap(
        (everything,),
        differences,
        n_resamples=resamples,
        batch=max(AT_ONCE // tasks, 1),
        vectorized=True,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    ends = zip(pairs, differences(everything), interval.low, interval.high, strict=True)
    return Bootstrap(
        resamples,
        LEVEL,
        [
            Comparison(cell[0], cell[1], name, metric, float(middle), float(low), float(high))
            for (cell, name, metric), middle, low, high in ends
        ],
    )


def _error(
    metric: str, weights: NDArray[np.float64], sums: NDArray[np.float64], rows: NDArray[np.float64]
) -> NDArray[np.float64]:
    means = weights @ sums.T / rows[:, None]
    return np.asarray((np.sqrt(means) if metric == "rmse" else means).mean(axis=1))


def _finite(found: Errors) -> bool:
    return all(np.isfinite(each).all() for each in found.values())

"""Metrics of predictions: the size of their errors, how well they rank, and their intervals over tasks.

Rows are flat, task after task, and ``row_splits`` gives the tasks' offsets. So tasks with query sets of
different sizes need no padding and no mask.

The paired bootstrap over tasks computes whether other tasks would confirm a difference (`Bootstrap`). Tasks
are drawn with replacement, as many as there are, and each drawn task contributes its query rows and all
methods' and baselines' predictions for them. The error of a draw covers all of its rows together, and is the
mean over the method's seeds. The interval of a difference contains the middle 95 % of its values over all
draws. It measures the variation over tasks; the spread measures that over seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gmeta.core.errors import DataError


@dataclass(frozen=True)
class Metric:
    """How a metric is shown: its name, the better direction, and what it measures."""

    label: str
    better: Literal["lower", "higher"]
    description: str


METRICS: Mapping[str, Metric] = {
    "mae": Metric("MAE", "lower", "mean absolute error, in the label's own unit, such as rating points"),
    "rmse": Metric("RMSE", "lower", "root mean squared error, in the label's own unit"),
    "logloss": Metric("log loss", "lower", "mean negative logarithm of the probability of what happened"),
    "auc": Metric("AUC", "higher", "area under the ROC curve of all query rows together; of ratings, ≥ 4"),
    "gauc": Metric(
        "GAUC", "higher", "a task's own AUC, mean weighted by its rows; tasks of one class left out"
    ),
    "ndcg@1": Metric("nDCG@1", "higher", "gain of the item ranked first, mean over tasks; 1 is ideal"),
    "ndcg@3": Metric("nDCG@3", "higher", "discounted gain of the first three items, mean over tasks"),
}
"""All metrics, in display order."""

ERRORS = ("mae", "logloss")
"""The metrics by which methods are compared: an evaluation uses the first of these that it has."""

OF_RATINGS = ("mae", "rmse", "auc", "ndcg@1", "ndcg@3")
"""The metrics of `rating_metrics`."""

OF_ORDER = ("auc", "ndcg@1", "ndcg@3")
"""The metrics that need only the order of predictions, so logits suffice."""

OF_NUMBERS = ("mae", "rmse")
"""The metrics of numeric labels that are not ratings."""

POSITIVE = 4.0
"""A rating of at least this value is a positive example for the AUC."""


def rating_metrics(labels: ArrayLike, predictions: ArrayLike, row_splits: ArrayLike) -> dict[str, float]:
    """Compute all metrics of one set of predictions.

    ``mae``, ``rmse`` and ``auc`` are pooled: all rows have the same weight, whatever their task. ``ndcg@k``
    is a mean over tasks. If any prediction is not finite, every metric is nan: the run has diverged, and a
    mean over the remaining rows would hide that.

    Args:
      labels: Ratings, not negative, shape ``(rows,)``.
      predictions: Predicted ratings, shape ``(rows,)``.
      row_splits: Offsets of the tasks, integers, shape ``(tasks + 1,)``: task ``t`` holds rows
        ``row_splits[t]`` up to ``row_splits[t + 1]``. A task may be empty.

    Returns:
      Metric name -> value; the keys are `OF_RATINGS`. A metric that is undefined is nan: all of them without
      rows, `auc` if all ratings lie on one side of the threshold, `ndcg` if no task can be ranked.

    Raises:
      DataError: The shapes don't match, the offsets don't cover the rows in order, or a label is negative,
        not finite, or too large for its gain.

    Example:
      >>> rating_metrics([5, 3, 4, 2], [4.5, 3.5, 2.0, 3.0], [0, 2, 4])["mae"]
      1.0
    """
    from sklearn.metrics import mean_absolute_error, root_mean_squared_error

    truth, guess, splits = _check(labels, predictions, row_splits)
    if not truth.size or not np.isfinite(guess).all():
        return dict.fromkeys(OF_RATINGS, np.nan)
    return {
        "mae": float(mean_absolute_error(truth, guess)),
        "rmse": float(root_mean_squared_error(truth, guess)),
        "auc": auc(truth, guess),
        "ndcg@1": ndcg(truth, guess, splits, k=1),
        "ndcg@3": ndcg(truth, guess, splits, k=3),
    }


def auc(labels: ArrayLike, predictions: ArrayLike, positive: float = POSITIVE) -> float:
    """Estimate the probability that a row rated ``positive`` or more outscores one rated less; ties: half.

    Args:
      labels: Ratings, shape ``(rows,)``.
      predictions: Finite scores, shape ``(rows,)``.
      positive: The threshold, in rating points.

    Returns:
      A number from 0 to 1, pooled over all rows; nan if all rows or none are positive.

    Raises:
      DataError: A label is NaN.
    """
    from sklearn.metrics import roc_auc_score

    is_positive = refuse_nan(labels) >= positive
    if is_positive.all() or not is_positive.any():
        return np.nan
    return float(roc_auc_score(is_positive, np.asarray(predictions)))


def refuse_nan(labels: ArrayLike) -> NDArray[np.float64]:
    """Return labels as float64.

    Raises:
      DataError: A label is NaN.
    """
    found = np.asarray(labels, np.float64)
    bad = np.isnan(found)
    if bad.any():
        raise DataError(f"row {int(np.argmax(bad))}: the label is NaN, so nothing can be measured")
    return found


def ndcg(labels: ArrayLike, predictions: ArrayLike, row_splits: ArrayLike, k: int) -> float:
    """Compute normalized discounted cumulative gain at ``k`` for each task, and return the mean over tasks.

    ``DCG@k = sum over ranks i = 1..k of (2^r_i - 1) / log2(i + 1)``, divided by that of the ideal order.
    Items with equal predictions share the mean of their gains, as in ``sklearn.metrics.ndcg_score``, so the
    order of the rows has no influence. Järvelin and Kekäläinen (2002), with the gain of Burges et al. (2005).

    The mean leaves out tasks with fewer than two rows, and tasks whose gains are all zero: no order of their
    rows is right or wrong.

    Args:
      labels: Ratings, not negative, shape ``(rows,)``.
      predictions: Finite scores, shape ``(rows,)``.
      row_splits: Offsets of the tasks, shape ``(tasks + 1,)``.
      k: Number of ranks that count, at least 1; a task with fewer rows is ranked whole.

    Returns:
      A number from 0 to 1; nan if no task can be ranked.

    Raises:
      DataError: As in `rating_metrics`.

    Example:
      >>> round(ndcg([3, 1], [0.2, 0.9], [0, 2], k=1), 3)  # gain 1 of a possible 7
      0.143
    """
    from sklearn.metrics import ndcg_score

    truth, guess, splits = _check(labels, predictions, row_splits)
    gains, sizes = np.exp2(truth) - 1.0, np.diff(splits)
    total, tasks = 0.0, 0
    for size in np.unique(sizes[sizes > 1]):  # one call for all tasks of a size: rows need no padding
        rows = splits[:-1][sizes == size][:, None] + np.arange(size)
        rows = rows[gains[rows].any(axis=1)]
        if len(rows):
            total += len(rows) * float(ndcg_score(gains[rows], guess[rows], k=k))
            tasks += len(rows)
    return total / tasks if tasks else np.nan


def _check(
    labels: ArrayLike, predictions: ArrayLike, row_splits: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    truth, guess = np.asarray(labels, np.float64), np.asarray(predictions, np.float64)
    splits = np.asarray(row_splits)
    if truth.ndim != 1 or truth.shape != guess.shape:
        raise DataError(f"labels and predictions must be flat and alike, got {truth.shape} and {guess.shape}")
    if splits.ndim != 1 or not splits.size or not np.issubdtype(splits.dtype, np.integer):
        raise DataError(f"row_splits must be a flat array of integers, got {splits.dtype} {splits.shape}")
    if splits[0] != 0 or splits[-1] != truth.size or (np.diff(splits) < 0).any():
        raise DataError(
            f"row_splits must rise from 0 to the number of rows, {truth.size}; they start at {splits[0]} and "
            f"end at {splits[-1]}" + (", falling between" if (np.diff(splits) < 0).any() else "")
        )
    bad = ~((truth >= 0) & (truth < 1000))  # 2^1024 exceeds float64; nan is caught here too
    if bad.any():
        row = int(np.argmax(bad))
        raise DataError(f"row {row}: a rating must be a number from 0 to 1000, got {truth[row]}")
    return truth, guess, splits.astype(np.int64)


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

"""Metrics of predictions: the size of their errors, and how well they rank a task's items.

Rows are flat, task after task, and ``row_splits`` gives the tasks' offsets. So tasks with query sets of
different sizes need no padding and no mask.
"""

from __future__ import annotations

from collections.abc import Mapping
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

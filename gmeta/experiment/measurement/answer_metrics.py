"""Metrics for labels other than ratings: arbitrary numbers, and binary labels."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gmeta.experiment.results.metrics import auc, refuse_nan


def number_metrics(labels: ArrayLike, predictions: ArrayLike) -> dict[str, float]:
    """Compute mean absolute and root mean squared error; nan without rows, or if a prediction isn't finite.

    Raises:
      DataError: A label is NaN.

    Example:
      >>> number_metrics([10.0, -10.0], [13.0, -14.0])
      {'mae': 3.5, 'rmse': 3.5355339059327378}
    """
    off = np.asarray(predictions, np.float64) - refuse_nan(labels)
    if not off.size or not np.isfinite(off).all():
        return {"mae": np.nan, "rmse": np.nan}
    return {"mae": float(np.abs(off).mean()), "rmse": float(np.sqrt(np.square(off).mean()))}


def click_metrics(
    labels: ArrayLike, logits: ArrayLike, row_splits: ArrayLike, positive: float
) -> dict[str, float]:
    """Compute log loss, AUC over all rows, and the weighted mean of each task's own AUC.

    Args:
      labels: (rows,).
      logits: (rows,) logits that a row's label is at least ``positive``.
      row_splits: (tasks + 1,): where each task's rows begin and end.
      positive: The least label that is positive.

    Returns:
      ``logloss``, ``auc`` and ``gauc`` (`gmeta.metrics.GAUC`). A metric that is undefined is nan; if a logit
      isn't finite, all three are nan.

    Raises:
      DataError: A label is NaN.

    Example:
      >>> found = click_metrics([1, 0, 1, 1], [1.0, 0.0, 0.0, 0.0], [0, 2, 4], positive=1)
      >>> round(found["logloss"], 3), round(found["auc"], 3), found["gauc"]
      (0.598, 0.667, 1.0)
    """
    clicked = refuse_nan(labels) >= positive
    scores, splits = np.asarray(logits, np.float64), np.asarray(row_splits, np.int64)
    if not scores.size or not np.isfinite(scores).all():
        return {"logloss": np.nan, "auc": np.nan, "gauc": np.nan}
    loss = np.logaddexp(0.0, np.where(clicked, -scores, scores)).mean()
    return {"logloss": float(loss), "auc": auc(clicked, scores, 0.5), "gauc": _gauc(clicked, scores, splits)}


def _gauc(clicked: NDArray[np.bool_], scores: NDArray[np.float64], splits: NDArray[np.int64]) -> float:
    """Compute GAUC for all tasks at once from rank sums (Mann and Whitney); ties share the mean rank."""
    sizes = np.diff(splits)
    task = np.repeat(np.arange(len(sizes)), sizes)
    order = np.lexsort((scores, task))
    first = splits[:-1][task[order]]  # the first row of each row's task
    same = np.concatenate([[False], (np.diff(scores[order]) == 0) & (np.diff(task[order]) == 0)])
    starts = np.flatnonzero(~same)
    tied = np.cumsum(~same) - 1
    middle = (starts + np.append(starts[1:], len(order)) - 1) / 2
    ranks = np.empty(len(order))
    ranks[order] = middle[tied] - first + 1
    yes = np.bincount(task, weights=clicked, minlength=len(sizes))
    pairs = yes * (sizes - yes)
    above = np.bincount(task, weights=ranks * clicked, minlength=len(sizes)) - yes * (yes + 1) / 2
    sound = pairs > 0
    return float(np.average(above[sound] / pairs[sound], weights=sizes[sound])) if sound.any() else np.nan

"""A drifting log of clicks in memory, and metrics of predictions of it; a benchmark and a demo share it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.metrics.progressive import ProgressiveMetrics
from gmeta.preprocess.synthetic.drifting_clicks import DriftConfig, click_minutes

Floats = npt.NDArray[Any]
FEATURES = ("user", "item", "topic")
METRICS = ("auc", "log_loss", "normalised_entropy")


class Log:
    """A whole log, with the place at which each minute begins.

    Args:
      config: The settings.
    """

    def __init__(self, config: DriftConfig) -> None:
        minutes = [*click_minutes(config)]
        self.begins = np.cumsum([0, *(len(minute["ts"]) for minute in minutes)])
        self.columns: dict[str, Floats] = {
            name: np.concatenate([minute[name] for minute in minutes]) for name in minutes[0]
        }
        self.minutes = len(minutes)

    def rows(self, first: int, last: int) -> slice:
        """Return the places of the events from one minute until another."""
        return slice(self.begins[first], self.begins[min(last, self.minutes)])

    def features(self, rows: slice) -> dict[str, Floats]:
        """Return what a model reads of some events."""
        return {name: self.columns[name][rows] for name in FEATURES}


def measure(log: Log, scores: Floats, first: int, last: int) -> dict[str, float]:
    """Compute the metrics of predicted probabilities of the events from one minute until another."""
    rows = log.rows(first, last)
    metrics = ProgressiveMetrics(len(scores) + 1, max_rows=len(scores) + 1)
    metrics.update(log.columns["click"][rows], scores[rows])
    found = metrics.current()
    return {name: getattr(found, name) for name in METRICS}

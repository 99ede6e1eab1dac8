"""A finished evaluation without training: for tests of the table, the JSON file and the report."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.experiment.results.evaluation import DataDescription, Evaluation, MethodResult, TrainingRun
from gmeta.layers.exchange.recorded_lookups import current_graph

METRICS_BY_STEPS = {
    "maml": {
        0: {"mae": 1.001, "rmse": 1.240, "auc": 0.600, "ndcg@1": 0.614, "ndcg@3": 0.655},
        1: {"mae": 0.917, "rmse": 1.131, "auc": 0.640, "ndcg@1": 0.613, "ndcg@3": 0.654},
        5: {"mae": 0.918, "rmse": 1.130, "auc": 0.641, "ndcg@1": 0.610, "ndcg@3": 0.657},
    },
    "joint": {
        0: {"mae": 0.938, "rmse": 1.160, "auc": 0.630, "ndcg@1": 0.627, "ndcg@3": 0.667},
        1: {"mae": 0.929, "rmse": 1.150, "auc": 0.638, "ndcg@1": 0.627, "ndcg@3": 0.668},
        5: {"mae": 0.919, "rmse": 1.140, "auc": 0.641, "ndcg@1": 0.623, "ndcg@3": 0.668},
    },
}


def example_evaluation(seeds: Sequence[int] = (0, 1, 2), *, joint: bool = True) -> Evaluation:
    """An evaluation with every part, its means near those of a real run on MovieLens-100K.

    Args:
      seeds: The seeds; the values of seed ``i`` lie ``0.002 * (i - middle)`` off the mean.
      joint: Whether the method ``"joint"`` is there.
    """
    offsets = [0.002 * (i - (len(seeds) - 1) / 2) for i in range(len(seeds))]

    def spread(mean: float) -> list[float]:
        return [mean + offset for offset in offsets]

    def run(offset: float) -> TrainingRun:
        loss = [9.0, 3.0, 1.5, 1.25 + offset]
        return TrainingRun([1, 2, 3, 4], {"loss": loss, "mae": [1.1, 0.95, 0.93, 0.92 + offset]})

    labels = {"maml": "MAML", "joint": "joint training"} if joint else {"maml": "MAML"}
    methods = {
        name: MethodResult(
            label,
            f"How {label} works.",
            {
                steps: {metric: spread(mean) for metric, mean in metrics.items()}
                for steps, metrics in METRICS_BY_STEPS[name].items()
            },
        )
        for name, label in labels.items()
    }
    baseline = {"mae": [0.974], "rmse": [1.17], "auc": [0.62], "ndcg@1": [0.6], "ndcg@3": [0.65]}
    methods["item_mean"] = MethodResult("item mean", "The item's mean rating.", {0: baseline})
    return Evaluation(
        title="Cold start",
        data=DataDescription("ml-100k", warm_tasks=461, cold_tasks=121, rows=21_034),
        config={"maml": {"alpha": 0.005, "layers": [64, 64]}, "on_bad": "raise"},
        seeds=seeds,
        methods=methods,
        support_curve={
            name: {size: spread(mean) for size, mean in ((1, 0.985), (4, 0.95), (16, 0.922))}
            for name in labels
        },
        support_steps=1,
        training={name: [run(offset) for offset in offsets] for name in labels},
        notes=["3 lines were skipped: <u.data>:17, 93 & 4411."],
        seconds={"train": 184.2},
    )


# A time that only work moves, for tests of what reads the time inside a graph.


class FakeTime:
    """A time that passes where work is done, and nowhere else.

    Work waits for the readings that were traced before it, so it is exact, however slow the machine is. For
    nothing else is there an order of readings than what they wait for.

    Attributes:
      seconds: The time.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._read: dict[Any, list[tf.Tensor]] = {}

    def now(self) -> tf.Tensor:
        """Return the time, () float64."""
        time = tf.ensure_shape(tf.numpy_function(lambda: np.float64(self.seconds), [], tf.float64), [])
        self._read.setdefault(current_graph(), []).append(time)
        return time

    def work(self, x: tf.Tensor, seconds: float) -> tf.Tensor:
        """Return x, after so many seconds."""

        def move(x: Any) -> Any:
            self.seconds += seconds
            return x

        read = [] if tf.executing_eagerly() else self._read.get(current_graph(), [])
        with tf.control_dependencies(read):
            return tf.ensure_shape(tf.numpy_function(move, [x], x.dtype), x.shape)


# The functions by which Python changes a drive, for tests in which a process ends at any of the changes.

NAMES = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")

# Up to Python 3.10 a Path calls functions that pathlib keeps itself.
OWNERS = [owner for owner in (os, getattr(pathlib, "_normal_accessor", None)) if owner is not None]


def wrap_changes(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    put: Callable[[Any, str, Any], None] = setattr,
) -> None:
    """Replace each of the functions by what ``wrap`` makes of it.

    Args:
      wrap: Takes the function.
      put: Sets an attribute; a test that goes on passes its monkeypatch's `setattr`.
    """
    for owner in OWNERS:
        for name in NAMES:
            if hasattr(owner, name):
                put(owner, name, wrap(getattr(owner, name)))

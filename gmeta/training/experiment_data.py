"""The tasks that an experiment is trained on and measured on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from gmeta import io
from gmeta.core.on_bad import OnBad
from gmeta.training.experiment_config import ExperimentConfig


def training_tasks(config: ExperimentConfig, data: Path, seed: int, **options: Any) -> tf.data.Dataset:
    """The training split, in an order of its own each epoch.

    Args:
      config: The experiment.
      data: A prepared data set.
      seed: Of the order, and of what is drawn.
      **options: More of `gmeta.io.tasks`.
    """
    return io.tasks(
        data / config.train_split,
        tasks_per_batch=config.tasks_per_batch,
        query=config.query,
        rows=None if config.resample else config.rows,
        resample=config.resample,
        seed=seed,
        **options,
    )


def measured_tasks(
    config: ExperimentConfig,
    data: Path,
    split: str,
    on_bad: OnBad = "raise",
    stats: io.ReaderStats | None = None,
    shard: tuple[int, int] | None = None,
) -> tf.data.Dataset:
    """The tasks of a split, in the order of the files; a rank's part of them, or as ``shard`` says.

    What is drawn is drawn by the task alone, whatever the method and its seed.
    """
    return io.tasks(
        data / split,
        tasks_per_batch=config.tasks_per_batch,
        query=config.query,
        rows=config.rows,
        shuffle=False,
        on_bad=on_bad,
        stats=stats,
        shard=shard,
    )

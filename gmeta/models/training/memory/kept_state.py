"""Keeps a model's state over training steps that shall leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers.embedding.table_weights import tables_of
from gmeta.models.training.model import Model
from gmeta.ops import TableSnapshot


@contextmanager
def keep_state(model: Model) -> Iterator[None]:
    """Restore the model when the block ends, also by an error.

    Variables (weights, the optimizer's slots and step, moving averages, metrics, states of generators) are
    copied to host memory. Tables are restored from snapshots: rows, their slots and frequencies, the step and
    what admission remembers. A snapshot of a table in host memory costs only the rows that the block uses;
    that of a table on a GPU is a copy of it in host memory. What the block added to a table's statistics, and
    random numbers drawn from TensorFlow's global generator, aren't taken back.

    Args:
      model: A compiled model that has its variables (`gmeta.models.training.ranks.start.make_variables`).

    Raises:
      ConfigError: The model has accumulated gradients, which can't be kept.
    """
    if model.is_accumulating:
        raise ConfigError(
            f"{model.name} has accumulated gradients, which trial steps would use up: call apply_accumulated "
            "first, or measure before training"
        )
    if hasattr(model.optimizer, "_create_all_weights"):  # a legacy optimizer's slots, which have no `build`
        model.optimizer._create_all_weights(model.trainable_variables)
    variables = [(variable, variable.numpy()) for variable in _variables(model)]
    snapshots = [TableSnapshot(table) for table in tables_of(model)]
    plain = {name: getattr(model, name, None) for name in ("history", "stop_training")}
    try:
        yield
    finally:
        model.reset_metrics()  # also of those that the block has made
        for variable, value in variables:
            variable.assign(value)
        for snapshot in snapshots:
            snapshot.restore()
        for name, value in plain.items():
            setattr(model, name, value)
        model.train_function = None  # its graphs hold the memory of their largest batch, and random states


def _variables(model: Model) -> list[tf.Variable]:
    tracked: list[Any] = [
        part for part in tf.train.TrackableView(model).descendants() if isinstance(part, tf.Variable)
    ]
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    optimizer = model.optimizer.variables
    optimizer = optimizer() if callable(optimizer) else optimizer
    counted = getattr(getattr(model, "catalogue", None), "variables", [])  # which checkpoints hold by key
    every = [*model.variables, *metrics, *optimizer, *tracked, *counted]
    return list({id(variable): variable for variable in every if variable.dtype != tf.resource}.values())

"""Settings of `compile` that models with dynamic tables can't follow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.errors import ConfigError


def check_compile(model: tf.keras.Model, accumulate_steps: Any, jit_compile: Any) -> None:
    """Refuse what tables can't follow.

    Args:
      model: The model that is compiled.
      accumulate_steps: As given.
      jit_compile: As given.

    Raises:
      ConfigError: Accumulation of fewer than one batch, XLA, or several replicas in one process.
    """
    whole_number("accumulate_steps", accumulate_steps, least=1)
    if jit_compile:
        raise ConfigError("XLA can't compile lookups in dynamic tables: leave jit_compile off")
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise ConfigError(
            f"{type(model.distribute_strategy).__name__} has {replicas} replicas in one process, and "
            "tables serve one: use tf.distribute's default strategy, a process for each device"
        )

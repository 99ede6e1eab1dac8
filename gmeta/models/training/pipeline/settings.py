"""What `compile` takes as ``pipeline``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.errors import ConfigError


@tf.keras.saving.register_keras_serializable("gmeta")
@dataclass(frozen=True)
class Pipeline:
    """How a training step fetches ahead of its batch (NestPipe, the dual buffer).

    Nothing that a step computes depends on the depth: rows, slots, frequencies, evictions, losses and
    checkpoints are those of depth 0, bit for bit. What is fetched ahead has no effects, and a row that
    changes between its fetch and its step is read again. Only an error in a batch, such as a bad id, is
    raised up to `depth` steps earlier.

    Args:
      depth: 0: a step begins with an exchange of its keys, then reads the rows. 1: while a batch computes,
        the keys of the next one go to the ranks that own them, and its rows are read there. 2: the keys are
        sent two batches ahead and the rows read one batch ahead, so that neither waits for the other. Each
        batch ahead takes the memory of its data, keys and rows.

    Raises:
      ConfigError: The depth isn't 0, 1 or 2.

    Example:
      >>> Pipeline(depth=1)
      Pipeline(depth=1)
    """

    depth: int = 1

    def __post_init__(self) -> None:
        """Check the settings."""
        whole_number("Pipeline: depth", self.depth, least=0)
        if self.depth > 2:
            raise ConfigError(
                f"Pipeline: depth must be 0, 1 or 2, got {self.depth}: a batch has two stages before its step"
            )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this object, fit for JSON."""
        return {"depth": self.depth}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Pipeline:
        """Recreate the object from what `get_config` returned."""
        return cls(**config)


def check_pipeline(value: Any) -> Pipeline:
    """Return the argument ``pipeline`` of `compile`; None stands for depth 0.

    Raises:
      ConfigError: It isn't a `Pipeline`.
    """
    if value is None:
        return Pipeline(depth=0)
    if not isinstance(value, Pipeline):
        raise ConfigError(f"compile: pipeline must be a gmeta.Pipeline, got {value!r}")
    return value

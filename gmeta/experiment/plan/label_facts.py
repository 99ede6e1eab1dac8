"""What a model with priors has to know of the training labels: how many there are, and their mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gmeta import io
from gmeta.core.errors import ConfigError

_TASKS = 256  # per element


@dataclass(frozen=True)
class LabelFacts:
    """The training labels.

    Attributes:
      count: How many there are.
      mean: Their mean; where the loss is a cross-entropy, the share of those that count as 1.
    """

    count: int
    mean: float

    def __post_init__(self) -> None:
        if self.count < 1 or not np.isfinite(self.mean):
            raise ConfigError(f"labels: there must be one, and their mean a number, got {self}")


def read_labels(path: Path, label: str, positive: float | None, choice: io.TaskChoice) -> LabelFacts:
    """Read all training labels.

    Args:
      path: The folder of a data set, followed by the split.
      label: Their column.
      positive: The label from which on one counts as 1, and below as 0; None: labels count as they are.
      choice: Which tasks to read.
    """
    options = io.ReadOptions(shuffle=False, shard=(0, 1))
    elements = io.groups(path, groups_per_element=_TASKS, start=io.OneEpoch(), options=options)
    count, total = 0, 0.0
    for element in elements.map(choice):
        labels = element["columns"][label].numpy().astype(np.float64)
        count += len(labels)
        total += float((labels if positive is None else labels >= positive).sum())
    return LabelFacts(count, float(f"{total / max(count, 1):.6g}"))

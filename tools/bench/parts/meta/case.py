"""What every contender of the meta-learning benchmark computes, and the check that they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from parts.meta.batches import Batch, Field, Lists

OUTER_RATE = 1e-3
INNER_RATE = 0.01
ROUNDING = 2e-5
"""float32 rounding in sums of some thousand terms, relative to the largest value of a gradient."""


@dataclass(frozen=True)
class Case:
    """A data set, a network and an inner loop.

    Attributes:
      name: The name of the data set.
      fields: Each is embedded in ``dim`` dimensions, several ids as their mean; the input concatenates them.
      batches: Steps use them in turn.
      dim: See ``fields``.
      hidden: Units of the hidden layers, with ReLU; one output unit for each label follows.
      loss: ``"mse"``, or ``"bce"`` of logits; a sample's is the mean over its labels, a task's the mean over
        its support samples, the outer one the mean over all query samples.
      steps: Inner gradient steps, of all layers.
      order: 2 differentiates through the inner steps.
    """

    name: str
    fields: Sequence[Field]
    batches: Sequence[Batch]
    dim: int
    hidden: Sequence[int]
    loss: Literal["mse", "bce"]
    steps: int = 1
    order: int = 2

    @property
    def units(self) -> dict[str, int]:
        """Layer name -> units."""
        return {f"fc{n + 1}": units for n, units in enumerate(self.hidden)} | {"out": self.outputs}

    @property
    def outputs(self) -> int:
        """The number of labels of a sample."""
        return self.batches[0].labels.shape[1]

    def batch(self, number: int) -> int:
        """The batch of a step."""
        return number % len(self.batches)


class Start(NamedTuple):
    """The initial weights: ``"layer/kernel"`` (in, out) and ``"layer/bias"``; field -> (ids, dim)."""

    weights: Mapping[str, np.ndarray]
    tables: Mapping[str, np.ndarray]


class Outer(NamedTuple):
    """The outer loss of a batch and its gradients.

    ``rows`` has for each field, and for each of its values in the batch, the gradient of that id's row.
    """

    loss: float
    weights: Mapping[str, np.ndarray]
    rows: Mapping[str, np.ndarray]


class Form(Protocol):
    """A contender."""

    def outer(self, number: int) -> Outer:
        """Loss and gradients of a batch; changes nothing."""

    def step(self, number: int) -> None:
        """Take a whole training step on a batch, including all updates."""


def assert_same(ours: Outer, theirs: Outer, who: str) -> None:
    """Compare a contender with gmeta.

    Raises:
      AssertionError: They don't compute the same thing.
    """
    pairs = {"loss": (ours.loss, theirs.loss)}
    pairs |= {name: (value, theirs.weights[name]) for name, value in ours.weights.items()}
    pairs |= {name: (value, theirs.rows[name]) for name, value in ours.rows.items()}
    for name, (mine, other) in pairs.items():
        assert np.shape(mine) == np.shape(other), (who, name, np.shape(mine), np.shape(other))
        away = np.abs(np.subtract(mine, other)).max() / np.abs(mine).max()
        assert away < ROUNDING, f"{who} doesn't compute what gmeta does: {name} is {away:.2g} away"


def values(batch: Batch, name: str) -> np.ndarray:
    """A field's ids, in the order of `Outer.rows`."""
    column = batch.columns[name]
    return column.values if isinstance(column, Lists) else column

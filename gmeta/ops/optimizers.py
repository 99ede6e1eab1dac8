"""Sparse optimizers: what a `gmeta.ops.HashTable` does with a gradient, inside its update op.

They are settings; the arithmetic is native (``ops/hash_table/optimizers.h``), and in NumPy in
`gmeta.ops.reference`. All are lazy: a row that gets no gradient in a call is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias

from gmeta.core.errors import ConfigError

LearningRate: TypeAlias = float | Callable[[Any], Any]
"""A number, or a schedule: step (a scalar int64 tensor, 0 for the first update) -> learning rate."""


def _check(owner: object, name: str, value: float, high: float = float("inf")) -> None:
    if not 0.0 <= value < high:
        raise ConfigError(f"{type(owner).__name__}: {name} must lie in [0, {high}), got {value}")


@dataclass(frozen=True)
class SparseOptimizer:
    """Base of the sparse optimizers.

    Attributes:
      learning_rate: A number >= 0, or a schedule of the table's step such as a
        ``tf.keras.optimizers.schedules.LearningRateSchedule``.
    """

    learning_rate: LearningRate = 0.001

    kind: ClassVar[str]
    """Its name in the native op."""

    slots: ClassVar[tuple[str, ...]]
    """The vectors that are kept beside a row's weights, each as wide as the row."""

    def __post_init__(self) -> None:
        if not callable(self.learning_rate):
            _check(self, "learning_rate", self.learning_rate)

    @property
    def hyperparameters(self) -> tuple[float, ...]:
        """What the native op is made with: the fields in order, without the learning rate."""
        return tuple(
            float(getattr(self, field.name)) for field in fields(self) if field.name != "learning_rate"
        )


@dataclass(frozen=True)
class SGD(SparseOptimizer):
    """Gradient descent: ``w -= learning_rate * g``.

    Args:
      learning_rate: A number, or a schedule of the table's step.

    Example:
      >>> SGD(0.1).slots
      ()
    """

    learning_rate: LearningRate = 0.01
    kind: ClassVar[str] = "sgd"
    slots: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Adagrad(SparseOptimizer):
    """Adagrad (Duchi et al., 2011), as ``tf.keras.optimizers.Adagrad``.

    ``a += g²; w -= learning_rate * g / sqrt(a + epsilon)``, elementwise.

    Args:
      learning_rate: A number, or a schedule of the table's step.
      initial_accumulator_value: What ``a`` starts as, >= 0.
      epsilon: Keeps the quotient finite, >= 0.

    Example:
      >>> Adagrad(0.05).slots
      ('accumulator',)
    """

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7
    kind: ClassVar[str] = "adagrad"
    slots: ClassVar[tuple[str, ...]] = ("accumulator",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, "initial_accumulator_value", self.initial_accumulator_value)
        _check(self, "epsilon", self.epsilon)


@dataclass(frozen=True)
class Adam(SparseOptimizer):
    """Adam (Kingma and Ba, 2015) in its lazy form.

    For each row that has a gradient in a call, elementwise::

      m += (1 - beta_1) * (g - m)
      v += (1 - beta_2) * (g² - v)
      w -= learning_rate * sqrt(1 - beta_2^t) / (1 - beta_1^t) * m / (sqrt(v) + epsilon)

    Lazy means that rows without a gradient keep ``m``, ``v`` and ``w``: nothing decays. ``t`` is the table's
    step, the number of ``apply_gradients`` calls so far including this one, and the same for all rows; it is
    saved in checkpoints. If every row has a gradient in every call, this equals ``tf.keras.optimizers.Adam``.

    Args:
      learning_rate: A number, or a schedule of the table's step.
      beta_1: Decay of the first moment, in [0, 1).
      beta_2: Decay of the second moment, in [0, 1).
      epsilon: Keeps the quotient finite, >= 0.

    Example:
      >>> Adam(1e-3).slots
      ('m', 'v')
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    kind: ClassVar[str] = "adam"
    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, "beta_1", self.beta_1, 1.0)
        _check(self, "beta_2", self.beta_2, 1.0)
        _check(self, "epsilon", self.epsilon)

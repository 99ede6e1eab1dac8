"""Sparse optimizers: what a `gmeta.ops.HashTable` does with a gradient, inside its update op.

They are settings; the arithmetic is native (``ops/table/core/optimizers.h``), and in NumPy in
`gmeta.testing.reference`. All are lazy: a row that gets no gradient in a call is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias

from gmeta.core.errors import ConfigError

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "LearningRate",
    "Momentum",
    "RowWiseAdagrad",
    "SparseOptimizer",
]

LearningRate: TypeAlias = float | Callable[[Any], Any] | None
"""A number; or a schedule: step (a scalar int64 tensor, 0 for the first update) -> learning rate; or None: it
is for whoever updates the table to say, such as the Keras optimizer of the model that it stands in."""


def _check(owner: object, name: str, value: float, high: float = float("inf")) -> None:
    if not 0.0 <= value < high:
        raise ConfigError(f"{type(owner).__name__}: {name} must lie in [0, {high}), got {value}")


@dataclass(frozen=True)
class SparseOptimizer:
    """Base of the sparse optimizers.

    Attributes:
      learning_rate: A number >= 0; or a schedule of the table's step such as a
        ``tf.keras.optimizers.schedules.LearningRateSchedule``; or None to follow the Keras optimizer of the
        model that the table stands in.
    """

    learning_rate: LearningRate = 0.001

    kind: ClassVar[str]
    """Its name in the native op."""

    slots: ClassVar[tuple[str, ...]]
    """What is kept beside a row's weights; each slot is as wide as the row, unless `slot_floats` says not."""

    def __post_init__(self) -> None:
        if self.learning_rate is not None and not callable(self.learning_rate):
            _check(self, "learning_rate", self.learning_rate)

    @property
    def hyperparameters(self) -> tuple[float, ...]:
        """What the native op is made with: the fields in order, without the learning rate."""
        return tuple(
            float(getattr(self, field.name)) for field in fields(self) if field.name != "learning_rate"
        )

    @property
    def initial_slot(self) -> float:
        """What the first slot starts as; the others start at 0."""
        return float(getattr(self, "initial_accumulator_value", 0.0))

    def slot_floats(self, dim: int) -> int:
        """How many floats are kept beside a row of ``dim`` weights."""
        return len(self.slots) * dim


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
class RowWiseAdagrad(Adagrad):
    """Adagrad with one accumulator for a whole row, as FBGEMM's and TorchRec's.

    ``a += mean(g²); w -= learning_rate * g / sqrt(a + epsilon)``. It keeps 4 bytes a row where Adagrad keeps
    4 for each weight.

    Args:
      learning_rate: A number, or a schedule of the table's step.
      initial_accumulator_value: What ``a`` starts as, >= 0.
      epsilon: Keeps the quotient finite, >= 0.

    Example:
      >>> RowWiseAdagrad(0.05).slot_floats(64)
      1
    """

    kind: ClassVar[str] = "rowwise_adagrad"

    def slot_floats(self, dim: int) -> int:
        """One, whatever ``dim``."""
        return 1


@dataclass(frozen=True)
class Momentum(SparseOptimizer):
    """Gradient descent with momentum, as ``tf.keras.optimizers.SGD`` with ``momentum``, in its lazy form.

    ``m = momentum * m - learning_rate * g; w += m``, and with ``nesterov``
    ``w += momentum * m - learning_rate * g``. Rows without a gradient in a call keep ``m`` and ``w``, where
    Keras would go on moving them.

    Args:
      learning_rate: A number, or a schedule of the table's step.
      momentum: In [0, 1).
      nesterov: Whether the step looks ahead.

    Example:
      >>> Momentum(0.1, momentum=0.9).slots
      ('momentum',)
    """

    learning_rate: LearningRate = 0.01
    momentum: float = 0.9
    nesterov: bool = False
    kind: ClassVar[str] = "momentum"
    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, "momentum", self.momentum, 1.0)


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


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019) in its lazy form.

    ``w -= learning_rate * weight_decay * w``, then `Adam`. Only rows that have a gradient in a call decay.

    Args:
      learning_rate: A number, or a schedule of the table's step.
      beta_1: Decay of the first moment, in [0, 1).
      beta_2: Decay of the second moment, in [0, 1).
      epsilon: Keeps the quotient finite, >= 0.
      weight_decay: >= 0.

    Example:
      >>> AdamW(1e-3, weight_decay=0.01).slots
      ('m', 'v')
    """

    weight_decay: float = 0.004
    kind: ClassVar[str] = "adamw"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, "weight_decay", self.weight_decay)


@dataclass(frozen=True)
class Ftrl(SparseOptimizer):
    """FTRL-proximal (McMahan et al., 2013), as ``tf.keras.optimizers.Ftrl``.

    With ``p = -learning_rate_power``, elementwise::

      a' = a + g²
      z += g + 2 * l2_shrinkage * w - (a'^p - a^p) / learning_rate * w
      w = (clip(z, -l1, l1) - z) / (a'^p / learning_rate + 2 * l2 + beta / learning_rate)
      a = a'

    The weights follow from ``z`` alone, so an initial row lasts until its first gradient only.

    Args:
      learning_rate: A number above 0, or a schedule of the table's step.
      learning_rate_power: <= 0; -0.5 is the usual one.
      initial_accumulator_value: What ``a`` starts as, >= 0.
      l1: >= 0; weights whose ``z`` stays within it are 0.
      l2: >= 0.
      l2_shrinkage: >= 0.
      beta: >= 0.

    Example:
      >>> Ftrl(0.05, l1=0.01).slots
      ('accumulator', 'linear')
    """

    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1: float = 0.0
    l2: float = 0.0
    l2_shrinkage: float = 0.0
    beta: float = 0.0
    kind: ClassVar[str] = "ftrl"
    slots: ClassVar[tuple[str, ...]] = ("accumulator", "linear")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate == 0:
            raise ConfigError("Ftrl: learning_rate must be above 0: its steps are divided by it")
        if self.learning_rate_power > 0:
            raise ConfigError(f"Ftrl: learning_rate_power must be <= 0, got {self.learning_rate_power}")
        for name in ("initial_accumulator_value", "l1", "l2", "l2_shrinkage", "beta"):
            _check(self, name, getattr(self, name))

"""Sparse optimizers: how a `gmeta.ops.HashTable` applies a gradient, inside its update op.

They are settings; the arithmetic is native (``optimizers.h`` and ``row_prior.h`` in ``ops/table/core``), and
in NumPy in `support.reference.table`. All are lazy: a row that gets no gradient in a call is left unchanged.
The gradient of a `RowPrior` for that call is added in the next call that has a gradient for the row.

`OneCycle` and `Warmup` are schedules of the learning rate, for Keras' optimizers and for these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from gmeta.core.errors import ConfigError
from gmeta.core.imports import load_lazily

if TYPE_CHECKING:
    from gmeta.core.schedules import OneCycle as OneCycle
    from gmeta.core.schedules import Warmup as Warmup

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "Momentum",
    "OneCycle",
    "RowPrior",
    "RowWiseAdagrad",
    "Warmup",
]

# Keras' schedules are of TensorFlow, which the settings of tables don't load.
__getattr__, __dir__ = load_lazily(__name__, dict.fromkeys(("OneCycle", "Warmup"), "gmeta.core.schedules"))

LearningRate: TypeAlias = float | Callable[[Any], Any] | None
"""A number; or a schedule: step (a scalar int64 tensor, 0 for the first update) -> learning rate; or None:
the caller of an update gives the rate, such as the Keras optimizer of the table's model."""


def _check(owner: object, name: str, value: float, high: float = float("inf")) -> None:
    if not 0.0 <= value < high:
        raise ConfigError(f"{type(owner).__name__}: {name} must lie in [0, {high}), got {value}")


@dataclass(frozen=True)
class RowPrior:
    r"""A Gaussian prior with mean 0 on the weights of a table's rows.

    The loss of a step is the mean negative log-likelihood of its samples; the prior adds

    .. math:: \sum_{\mathrm{rows}} \sum_c \frac{w_c^2}{2\, v_c\, N}

    to it, so that training maximizes the posterior of the rows given N samples. The prior hardly changes a
    row with many samples. A row with few samples, or whose feature explains nothing, stays near 0.

    The prior's gradient, :math:`w_c / (v_c N)`, is added to the loss's before the optimizer's step. It
    applies to every step, but is added only when a row has a gradient: for that step and for each one since
    the row's last update. At most ``w_c / learning_rate`` is added at once, which takes the weight to 0 in a
    step of `SGD`. When training ends, the steps since a row's last update are never applied. In such a table
    a record's last step is that of its insertion or its last update, so `gmeta.policies.LRU` and
    `gmeta.policies.TTL` count updates as uses, not lookups.

    Args:
      variance: The variance v of a weight; or one for each column of a row.
      samples: N, the number of samples in the training data, however many epochs there are.
      scale: The ratio of the loss to the negative log-likelihood: 1 for cross-entropies; for a mean squared
        error :math:`2 \sigma^2`, twice the variance of the labels that the model can't explain.

    Raises:
      ConfigError: A number isn't above 0.

    Example:
      >>> bias_and_factors = RowPrior(variance=[0.3, 0.003, 0.003], samples=640_000, scale=1.6)
      >>> Adam(5e-3, prior=bias_and_factors).prior.variance
      (0.3, 0.003, 0.003)
    """

    variance: float | tuple[float, ...]
    samples: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        given: Any = self.variance
        several = isinstance(given, list | tuple)
        variance = tuple(given) if several else (given,)
        for name, values in (("variance", variance), ("samples", (self.samples,)), ("scale", (self.scale,))):
            for value in values or (0.0,):
                if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0.0:
                    raise ConfigError(f"RowPrior: {name} must be above 0, got {getattr(self, name)!r}")
        if several:
            object.__setattr__(self, "variance", tuple(float(value) for value in variance))

    def l2(self, dim: int, where: str) -> tuple[float, ...]:
        """Compute the prior's gradient for weights of 1, (dim,).

        Args:
          dim: The width of a row.
          where: The owner of the rows, for the message.

        Raises:
          ConfigError: The number of variances is neither 1 nor ``dim``.
        """
        variance = self.variance if isinstance(self.variance, tuple) else (self.variance,) * dim
        if len(variance) != dim:
            raise ConfigError(
                f"{where}: its prior has {len(variance)} variances, and a row has {dim} columns: give one "
                "for each, or one for all"
            )
        return tuple(self.scale / (each * self.samples) for each in variance)


@dataclass(frozen=True)
class SparseOptimizer:
    """Base of the sparse optimizers.

    Attributes:
      learning_rate: A number >= 0; or a schedule of the table's step such as a
        ``tf.keras.optimizers.schedules.LearningRateSchedule``; or None to follow the Keras optimizer of the
        table's model.
      prior: A prior on the rows, or None.
    """

    learning_rate: LearningRate = 0.001
    prior: RowPrior | None = field(default=None, kw_only=True)

    kind: ClassVar[str]
    """The name in the native op."""

    slots: ClassVar[tuple[str, ...]]
    """What is kept beside a row's weights; each slot is as wide as the row, unless `slot_floats` differs."""

    def __post_init__(self) -> None:
        if not isinstance(self.prior, RowPrior | None):
            raise ConfigError(
                f"{type(self).__name__}: prior must be a gmeta.optimizers.RowPrior or None, "
                f"got {self.prior!r}"
            )
        if self.learning_rate is not None and not callable(self.learning_rate):
            _check(self, "learning_rate", self.learning_rate)

    @property
    def hyperparameters(self) -> tuple[float, ...]:
        """The parameters of the native op: the fields in order, without the learning rate and the prior."""
        names = [each.name for each in fields(self) if each.name not in ("learning_rate", "prior")]
        return tuple(float(getattr(self, name)) for name in names)

    @property
    def initial_slot(self) -> float:
        """The initial value of the first slot; the others start at 0."""
        return float(getattr(self, "initial_accumulator_value", 0.0))

    def prior_l2(self, dim: int, where: str = "a table") -> tuple[float, ...]:
        """Return `RowPrior.l2` of a row of ``dim`` weights; without a prior, nothing."""
        return () if self.prior is None else self.prior.l2(dim, where)

    def slot_floats(self, dim: int) -> int:
        """Return the number of floats that are kept beside a row of ``dim`` weights."""
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
    """Adagrad with one accumulator for a whole row, as in FBGEMM and TorchRec.

    ``a += mean(g²); w -= learning_rate * g / sqrt(a + epsilon)``. It keeps 4 bytes per row where Adagrad
    keeps 4 for each weight.

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
        """Return 1, whatever ``dim``."""
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

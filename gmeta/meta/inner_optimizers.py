r"""Inner optimizers, which turn gradients into steps: plain descent, momentum and Adam, all differentiable.

An optimizer here is a pure function, so that the outer gradient can pass through it: it takes gradients and
slots, and returns directions and new slots. A step is then :math:`\theta \leftarrow \theta - \alpha d`, with
the optimizer's direction d and the inner loop's rate α, which may itself be learned.

A slot has its parameter's shape and starts at zero for each task. So a parameter that the task's loss doesn't
depend on stays exactly the same, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import tensorflow as tf

from gmeta.core.errors import ConfigError

Slots = tuple[tf.Tensor, ...]


class InnerOptimizer(Protocol):
    """The interface of an inner optimizer, which maps gradients to directions.

    With ``is_linear = True``, directions are weighted sums of the gradients so far, with factors that are the
    same for all numbers of a parameter. An inner loop may then compute its steps in a faster form.
    """

    def start(self, parameter: tf.Tensor) -> Slots:
        """Return a parameter's slots before the first step."""

    def direction(self, gradient: tf.Tensor, slots: Slots, step: int) -> tuple[tf.Tensor, Slots]:
        """Return the direction of the given step, counted from 1, and the slots after it."""


@dataclass(frozen=True)
class SGD:
    r"""Plain gradient descent, :math:`d = g`: the inner step of MAML (Finn et al., 2017)."""

    is_linear: ClassVar[bool] = True

    def start(self, parameter: tf.Tensor) -> Slots:
        """Return no slots."""
        return ()

    def direction(self, gradient: tf.Tensor, slots: Slots, step: int) -> tuple[tf.Tensor, Slots]:
        """Return the gradient as the direction."""
        return gradient, slots


@dataclass(frozen=True)
class Momentum:
    r"""Heavy ball: :math:`m \leftarrow \mu m + g`, and :math:`d = m`, or Nesterov's :math:`g + \mu m`.

    Attributes:
      momentum: μ, in [0, 1).
      nesterov: Whether the direction looks one step ahead.
    """

    is_linear: ClassVar[bool] = True
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_decay("Momentum", momentum=self.momentum)

    def start(self, parameter: tf.Tensor) -> Slots:
        """Return the initial velocity m."""
        return (tf.zeros_like(parameter),)

    def direction(self, gradient: tf.Tensor, slots: Slots, step: int) -> tuple[tf.Tensor, Slots]:
        """Return the direction along the velocity."""
        velocity = self.momentum * slots[0] + gradient
        return (gradient + self.momentum * velocity if self.nesterov else velocity), (velocity,)


@dataclass(frozen=True)
class Adam:
    r"""Adam (Kingma and Ba, 2015, algorithm 1), with bias-corrected moments.

    .. math:: d_k = \frac{m_k / (1 - \beta_1^k)}{\sqrt{v_k / (1 - \beta_2^k)} + \epsilon}

    For small gradients, the derivative of the direction with respect to the gradient is up to 1/ε. Second
    order multiplies by this derivative, so ε is larger here than in an outer optimizer.

    Attributes:
      beta_1: Decay of the mean m, in [0, 1).
      beta_2: Decay of the mean square v, in [0, 1).
      epsilon: ε, above 0.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        _check_decay("Adam", beta_1=self.beta_1, beta_2=self.beta_2)
        if self.epsilon <= 0:
            raise ConfigError(f"inner Adam: epsilon must be above 0, got {self.epsilon}")

    def start(self, parameter: tf.Tensor) -> Slots:
        """Return the initial moments m and v."""
        return (tf.zeros_like(parameter), tf.zeros_like(parameter))

    def direction(self, gradient: tf.Tensor, slots: Slots, step: int) -> tuple[tf.Tensor, Slots]:
        """Return the corrected mean divided by the root of the corrected mean square."""
        mean = self.beta_1 * slots[0] + (1 - self.beta_1) * gradient
        square = self.beta_2 * slots[1] + (1 - self.beta_2) * gradient**2
        root = _root(square / (1 - self.beta_2**step))
        return mean / (1 - self.beta_1**step) / (root + self.epsilon), (mean, square)


def _root(square: tf.Tensor) -> tf.Tensor:
    """Compute the square root, with its derivative at 0 set to 0.

    There the root's derivative is infinite and is multiplied by the square's, which is 0. The direction
    g / (|g| + ε) is smooth in g, and at 0 its whole derivative comes from the mean.
    """
    positive = square > 0
    return tf.where(positive, tf.sqrt(tf.where(positive, square, tf.ones_like(square))), 0)


OptimizerName = Literal["sgd", "momentum", "adam"]
_BY_NAME: dict[str, type[SGD] | type[Momentum] | type[Adam]] = {
    "sgd": SGD,
    "momentum": Momentum,
    "adam": Adam,
}


def inner_optimizer(given: OptimizerName | InnerOptimizer) -> InnerOptimizer:
    """Return the given optimizer, or the optimizer of the given name with its default settings.

    Raises:
      ConfigError: No optimizer has that name, or ``given`` is something else, such as a Keras optimizer.
    """
    if not isinstance(given, str):
        if isinstance(given, type) or not all(hasattr(given, part) for part in ("start", "direction")):
            raise ConfigError(
                f"inner loop: optimizer must be one of {', '.join(_BY_NAME)}, or one of gmeta.meta's with "
                f"settings, such as meta.Adam(epsilon=1e-3), got {given!r}; Keras' optimizers are for the "
                "outer loop, in compile"
            )
        return given
    if given not in _BY_NAME:
        raise ConfigError(f"inner loop: optimizer must be one of {', '.join(_BY_NAME)}, got {given!r}")
    return _BY_NAME[given]()


def _check_decay(optimizer: str, **decays: float) -> None:
    for name, value in decays.items():
        if not 0 <= value < 1:
            raise ConfigError(f"inner {optimizer}: {name} must be at least 0 and below 1, got {value}")

r"""What an inner step makes of a gradient: plain descent, momentum, or Adam, all differentiable.

An optimizer here is a pure function, so that the outer gradient can pass through it: it takes gradients and
its slots, and gives directions and new slots. A step then is :math:`\theta \leftarrow \theta - \alpha d`,
with the direction d of the optimizer and the rate α of the inner loop, which may itself be learned.

A slot has its parameter's shape and starts at zero for each task, so a parameter that the task's loss doesn't
depend on stays where it is, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import tensorflow as tf

from gmeta.core.errors import ConfigError

Slots = tuple[tf.Tensor, ...]


class InnerOptimizer(Protocol):
    """From gradients to directions.

    Directions of one that has ``is_linear = True`` are sums of the gradients so far, with factors that are
    the same for all numbers of a parameter; an inner loop may then take its steps in a faster form.
    """

    def start(self, parameter: tf.Tensor) -> Slots:
        """The slots of a parameter before the first step."""

    def direction(self, gradient: tf.Tensor, slots: Slots, step: int) -> tuple[tf.Tensor, Slots]:
        """The direction of the step-th step, counted from 1, and the slots after it."""


@dataclass(frozen=True)
class SGD:
    r"""Plain gradient descent, :math:`d = g`: the inner step of MAML (Finn et al., 2017)."""

    is_linear: ClassVar[bool] = True

    def start(self, parameter: tf.Tensor) -> Slots:
        """None."""
        return ()

    def direction(self, gradient: tf.Tensor, slots: Slots, step: int) -> tuple[tf.Tensor, Slots]:
        """The gradient."""
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
        """The velocity m."""
        return (tf.zeros_like(parameter),)

    def direction(self, gradient: tf.Tensor, slots: Slots, step: int) -> tuple[tf.Tensor, Slots]:
        """Along the velocity."""
        velocity = self.momentum * slots[0] + gradient
        return (gradient + self.momentum * velocity if self.nesterov else velocity), (velocity,)


@dataclass(frozen=True)
class Adam:
    r"""Adam (Kingma and Ba, 2015, algorithm 1), with corrected moments.

    .. math:: d_k = \frac{m_k / (1 - \beta_1^k)}{\sqrt{v_k / (1 - \beta_2^k)} + \epsilon}

    The reaction of a direction to its gradient is up to 1/ε where gradients are small. Second order passes
    through it, so ε is larger here than in an outer optimizer.

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
        """The moments m and v."""
        return (tf.zeros_like(parameter), tf.zeros_like(parameter))

    def direction(self, gradient: tf.Tensor, slots: Slots, step: int) -> tuple[tf.Tensor, Slots]:
        """Along the corrected mean, by the root of the corrected mean square."""
        mean = self.beta_1 * slots[0] + (1 - self.beta_1) * gradient
        square = self.beta_2 * slots[1] + (1 - self.beta_2) * gradient**2
        root = _root(square / (1 - self.beta_2**step))
        return mean / (1 - self.beta_1**step) / (root + self.epsilon), (mean, square)


def _root(square: tf.Tensor) -> tf.Tensor:
    """The square root, whose derivative at 0 is taken for 0.

    There it is infinite and times the square's, which is 0; the direction g / (|g| + ε) is smooth in g, and
    gets all of its derivative from the mean.
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
    """An optimizer, or by its name the one with its default settings.

    Raises:
      ConfigError: No optimizer has that name, or it is something else, such as one of Keras'.
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

r"""The inner loop's gradient steps on the support set, for many tasks at once.

Every parameter has a leading task dimension, so all tasks adapt in one graph and each has its own fast
weights. Each task's slice of the gradient of the *sum* of the tasks' losses is then the gradient of that
task's own loss: no task sees another.

Some parameters differ in number between tasks, such as the embedding rows that a task's samples read. They
are laid out flat instead, (rows, ...), together with the task of each row.

Inner optimizers turn gradients into steps: plain descent, momentum and Adam, all differentiable. An optimizer
here is a pure function, so that the outer gradient can pass through it: it takes gradients and slots, and
returns directions and new slots. A step is then :math:`\theta \leftarrow \theta - \alpha d`, with the
optimizer's direction d and the inner loop's rate α, which may itself be learned. A slot has its parameter's
shape and starts at zero for each task. So a parameter that the task's loss doesn't depend on stays exactly
the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph import recompute

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


# Clipping of inner gradients, task by task.


def clip(
    gradients: Mapping[str, tf.Tensor],
    owners: Mapping[str, tf.Tensor],
    tasks: tf.Tensor | int,
    norm: float | None = None,
    value: float | None = None,
) -> dict[str, tf.Tensor]:
    r"""Clip each task's gradient: first its numbers to [-value, value], then its norm to ``norm``.

    .. math:: g_t \leftarrow g_t \min(1, c / \lVert g_t \rVert_2)

    with the norm over all parameters of task t together. Clipping is differentiable except exactly at a
    limit; it is differentiable at a gradient of zero too.

    Args:
      gradients: Name -> (tasks, ...), or (rows, ...) for those in ``owners``.
      owners: Name -> (rows,) the task of each row.
      tasks: Number of tasks.
      norm: c. None: no limit on the norm.
      value: Maximum magnitude of each number. None: no limit.
    """
    clipped = dict(gradients)
    if value is not None:
        clipped = {name: tf.clip_by_value(each, -value, value) for name, each in clipped.items()}
    if norm is None:
        return clipped
    squares = tf.add_n([_task_squares(each, owners.get(name), tasks) for name, each in clipped.items()])
    limit = tf.constant(norm**2, squares.dtype)
    long = squares > limit
    # The factor is exactly 1 for a gradient within the limit.
    factor = tf.where(long, norm * tf.math.rsqrt(tf.where(long, squares, limit)), 1)
    return {name: _times(each, factor, owners.get(name)) for name, each in clipped.items()}


def _task_squares(gradient: tf.Tensor, owner: tf.Tensor | None, tasks: tf.Tensor | int) -> tf.Tensor:
    squares = tf.reduce_sum(gradient**2, axis=list(range(1, gradient.shape.rank)))
    return squares if owner is None else tf.math.unsorted_segment_sum(squares, owner, tasks)


def _times(gradient: tf.Tensor, factor: tf.Tensor, owner: tf.Tensor | None) -> tf.Tensor:
    factor = factor if owner is None else tf.gather(factor, owner)
    return gradient * tf.reshape(factor, [-1, *[1] * (gradient.shape.rank - 1)])


Parameters = Mapping[str, tf.Tensor]
"""Name -> tensor of shape (tasks, ...), or (rows, ...) if `Adapted.owners` holds the rows' tasks."""

SupportLoss = Callable[..., tf.Tensor]
"""Parameters -> the tasks' losses on their support sets, shape (tasks,). If `Adaptation.run` receives inputs,
the loss is called with them as well."""

Rates: TypeAlias = "float | tf.Tensor | Mapping[str, tf.Tensor]"
"""α: one rate for all parameters, or name -> a tensor that broadcasts to one task's parameter."""


class Adapted(NamedTuple):
    """The tasks' state after some inner steps.

    Attributes:
      parameters: The current parameters.
      slots: Name -> the inner optimizer's slots.
      steps: The number of steps taken so far.
      owners: Name -> (rows,) int task of each row, for the parameters that are laid out flat.
    """

    parameters: dict[str, tf.Tensor]
    slots: dict[str, Slots]
    steps: int
    owners: Mapping[str, tf.Tensor]


@dataclass(frozen=True)
class Adaptation:
    r"""The inner update, :math:`\theta_t \leftarrow \theta_t - \alpha \, d(\nabla_{\theta_t} L_t(\theta_t))`.

    Attributes:
      learning_rate: α; see `Rates`.
      order: 2 keeps steps differentiable; 1 treats gradients as constants.
      optimizer: Computes the direction d from the gradient.
      clip_norm: Maximum norm of a task's gradient, over all its parameters together.
      clip_value: Maximum magnitude of each number in the gradient. This limit is applied first.
      recompute: Keep only each step's parameters and compute the rest again for the outer gradient.
        Activations then take the memory of one step, and a step costs one more forward and backward pass
        (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
      read: A function of the parameters and the number of steps taken so far. The loss receives its result
        in place of the parameters. Gradients are taken with respect to that result, and each name's gradient
        gives the direction of the parameter of that name; see `gmeta.meta.ridge`. None: the loss
        receives the parameters themselves.
    """

    learning_rate: Rates
    order: int = 2
    optimizer: InnerOptimizer = field(default_factory=SGD)
    clip_norm: float | None = None
    clip_value: float | None = None
    recompute: bool = False
    read: Callable[[Parameters, int], Parameters] | None = None

    def begin(self, parameters: Parameters, owners: Mapping[str, tf.Tensor] | None = None) -> Adapted:
        """Return the tasks' state before their first step."""
        slots = {name: self.optimizer.start(value) for name, value in parameters.items()}
        return Adapted(dict(parameters), slots, 0, owners or {})

    def run(self, support_loss: SupportLoss, adapted: Adapted, steps: int, inputs: Any = None) -> Adapted:
        """Take ``steps`` steps; 0 steps change nothing.

        Args:
          support_loss: Losses of the tasks. Loss t must depend only on slice t of the parameters, or on the
            rows that task t owns.
          adapted: The state to start from.
          steps: The number of steps.
          inputs: Float tensors, in any nest, that the loss needs besides the parameters; the loss is called
            with them. With ``recompute``, outer gradients reach only the parameters, these inputs and
            variables, and nothing else that the loss reads.
        """
        given = () if inputs is None else (inputs,)
        for _ in range(steps):
            adapted = (self._recompute if self.recompute else self._step)(support_loss, adapted, given)
        return adapted

    def _step(self, support_loss: SupportLoss, adapted: Adapted, given: tuple[Any, ...]) -> Adapted:
        parameters, slots, step, owners = adapted
        read = parameters if self.read is None else self.read(parameters, step)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(read)
            losses = support_loss(read, *given)
        gradients = tape.gradient(losses, read, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        # The gradients of gathered rows are IndexedSlices.
        gradients = {name: tf.convert_to_tensor(value) for name, value in gradients.items()}
        if self.order == 1:
            gradients = {name: tf.stop_gradient(value) for name, value in gradients.items()}
        gradients = clip(gradients, owners, tf.shape(losses)[0], self.clip_norm, self.clip_value)
        moved, kept = {}, {}
        for name, value in parameters.items():
            direction, kept[name] = self.optimizer.direction(gradients[name], slots[name], step + 1)
            moved[name] = value - self._rate(name, value, name in owners) * direction
        return Adapted(moved, kept, step + 1, owners)

    def _rate(self, name: str, value: tf.Tensor, flat: bool) -> tf.Tensor:
        rate = self.learning_rate[name] if isinstance(self.learning_rate, Mapping) else self.learning_rate
        # tf.cast of a Python float goes through float32 and would cost a float64 inner loop half its digits.
        return tf.cast(rate, value.dtype) if tf.is_tensor(rate) else tf.constant(rate, value.dtype)

    def _recompute(self, support_loss: SupportLoss, adapted: Adapted, given: tuple[Any, ...]) -> Adapted:
        rates = self.learning_rate
        shape = (adapted.parameters, adapted.slots, given, rates if _is_learned(rates) else ())
        flat = tf.nest.flatten(shape)

        def step(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            parameters, slots, inputs, learned = tf.nest.pack_sequence_as(shape, tensors)
            rule = replace(self, learning_rate=learned if _is_learned(rates) else rates)
            before = Adapted(dict(parameters), dict(slots), adapted.steps, adapted.owners)
            after = rule._step(support_loss, before, inputs)
            return tf.nest.flatten((after.parameters, after.slots))

        parameters, slots = tf.nest.pack_sequence_as(
            (adapted.parameters, adapted.slots), recompute(step, flat)
        )
        return Adapted(parameters, slots, adapted.steps + 1, adapted.owners)


def _is_learned(rates: Rates) -> bool:
    return isinstance(rates, Mapping) or tf.is_tensor(rates)


def per_task(parameters: Parameters, tasks: tf.Tensor | int) -> dict[str, tf.Tensor]:
    """Give every task its own copy of the shared parameters.

    Args:
      parameters: Name -> tensor or variable of any shape ``s``.
      tasks: The number of tasks T.

    Returns:
      Name -> tensor of shape (T, *s). The gradient of a copy flows back to the shared parameter, summed
      over the tasks.
    """
    return {
        name: tf.repeat(tf.convert_to_tensor(value)[tf.newaxis], tasks, axis=0)
        for name, value in parameters.items()
    }


def inner_step(
    support_loss: SupportLoss, parameters: Parameters, *, learning_rate: Rates, order: int = 2
) -> dict[str, tf.Tensor]:
    r"""Take one gradient step of every task: :math:`\theta_t - \alpha \nabla_{\theta_t} L_t(\theta_t)`.

    Args:
      support_loss: Parameters -> (T,) losses; loss t must depend only on slice t of the parameters.
      parameters: Name -> (T, ...) tensor.
      learning_rate: α; see `Rates`.
      order: 2 keeps the step differentiable; 1 treats the gradient as a constant.

    Returns:
      The adapted parameters, with the same names and shapes. A parameter that the loss doesn't depend on is
      unchanged.
    """
    return adapt(support_loss, parameters, steps=1, learning_rate=learning_rate, order=order)


def adapt(
    support_loss: SupportLoss,
    parameters: Parameters,
    *,
    steps: int,
    learning_rate: Rates,
    order: int = 2,
    **rule: Any,
) -> dict[str, tf.Tensor]:
    """Take ``steps`` gradient steps of every task (see `Adaptation`); 0 steps change nothing.

    Example:
      >>> adapted = adapt(
      ...     lambda p: (p["w"][:, 0] - 3.0) ** 2,
      ...     per_task({"w": tf.zeros([1])}, tasks=2),
      ...     steps=1,
      ...     learning_rate=0.5,
      ... )
      >>> adapted["w"].numpy().tolist()
      [[3.0], [3.0]]
    """
    adaptation = Adaptation(learning_rate, order, **rule)
    return adaptation.run(support_loss, adaptation.begin(parameters), steps).parameters

r"""The inner loop itself: gradient steps on the support set, for many tasks at once.

Every parameter carries a leading task dimension, so that all tasks adapt in one graph and each has its own
fast weights. The gradient of the *sum* of the tasks' losses then is, task by task, the gradient of that
task's own loss: no task sees another.

Parameters of which tasks have different numbers, such as the embedding rows that a task's samples read, are
laid out flat instead, (rows, ...), with the task of each row beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from gmeta.meta.clipping import clip
from gmeta.meta.inner_optimizers import SGD, InnerOptimizer, Slots
from gmeta.meta.recomputing import recompute

Parameters = Mapping[str, tf.Tensor]
"""Name -> tensor of shape (tasks, ...), or (rows, ...) where `Adapted.owners` names the rows' tasks."""

SupportLoss = Callable[..., tf.Tensor]
"""Parameters -> the tasks' losses on their support sets, shape (tasks,). Called with the inputs as well where
`Adaptation.run` is given any."""

Rates: TypeAlias = "float | tf.Tensor | Mapping[str, tf.Tensor]"
"""α: one for all parameters, or for each by name a tensor that broadcasts to one task's parameter."""


class Adapted(NamedTuple):
    """How far tasks have come.

    Attributes:
      parameters: As they are now.
      slots: Name -> the inner optimizer's slots.
      steps: How many steps led here.
      owners: Name -> (rows,) int task of each row, for the parameters that are laid out flat.
    """

    parameters: dict[str, tf.Tensor]
    slots: dict[str, Slots]
    steps: int
    owners: Mapping[str, tf.Tensor]


@dataclass(frozen=True)
class Adaptation:
    r"""How tasks adapt: :math:`\theta_t \leftarrow \theta_t - \alpha \, d(\nabla_{\theta_t} L_t(\theta_t))`.

    Attributes:
      learning_rate: α; see `Rates`.
      order: 2 keeps steps differentiable; 1 treats gradients as constants.
      optimizer: Makes the direction d of the gradient.
      clip_norm: The longest that a task's gradient may be, over all its parameters together.
      clip_value: The largest that a number of it may be. It is applied first.
      recompute: Keep of each step its parameters alone and compute the rest again for the outer gradient.
        Memory for activations then is that of one step, and a step costs one more forward and backward pass
        (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
      read: What the loss is given in place of the parameters, as a function of them and of the number of
        steps that led to them. Gradients are taken with respect to what it returns, and name by name make
        the parameters' directions; see `gmeta.meta.dual_dense`. None: the parameters themselves.
    """

    learning_rate: Rates
    order: int = 2
    optimizer: InnerOptimizer = field(default_factory=SGD)
    clip_norm: float | None = None
    clip_value: float | None = None
    recompute: bool = False
    read: Callable[[Parameters, int], Parameters] | None = None

    def begin(self, parameters: Parameters, owners: Mapping[str, tf.Tensor] | None = None) -> Adapted:
        """Tasks before their first step."""
        slots = {name: self.optimizer.start(value) for name, value in parameters.items()}
        return Adapted(dict(parameters), slots, 0, owners or {})

    def run(self, support_loss: SupportLoss, adapted: Adapted, steps: int, inputs: Any = None) -> Adapted:
        """Take ``steps`` steps; none is the identity.

        Args:
          support_loss: Losses of the tasks. Loss t must depend on slice t of the parameters alone, or on the
            rows that task t owns.
          adapted: Where from.
          steps: How many steps.
          inputs: Float tensors, in any nest, that the loss is computed from besides the parameters; the loss
            is called with them. With ``recompute`` outer gradients reach these, variables, and nothing else
            that the loss reads.
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
        # Rows that were gathered have slices for gradients.
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
        # tf.cast of a Python float would pass through float32 and cost a float64 inner loop half its digits.
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
    r"""One gradient step of every task: :math:`\theta_t - \alpha \nabla_{\theta_t} L_t(\theta_t)`.

    Args:
      support_loss: Parameters -> (T,) losses; loss t must depend on slice t of the parameters alone.
      parameters: Name -> (T, ...) tensor.
      learning_rate: α; see `Rates`.
      order: 2 keeps the step differentiable; 1 treats the gradient as a constant.

    Returns:
      The adapted parameters, of the same names and shapes. One that the loss doesn't depend on is unchanged.
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
    """``steps`` gradient steps of every task (see `Adaptation`); the identity for 0 steps.

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

"""A tower for each task, and probabilities that are products of other tasks', such as CTCVR."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers.networks import MLP


def product_logits(*logits: tf.Tensor) -> tf.Tensor:
    r"""Compute the logit of a product of probabilities from their logits, without computing probabilities.

    For two, from :math:`1/p = (1 + e^{-a})(1 + e^{-b})`,

    .. math:: \mathrm{logit}(\sigma(a) \sigma(b)) = -\log(e^{-a} + e^{-b} + e^{-a-b})

    This logit and its gradient are finite wherever a and b are. More than two are combined one by one.

    Args:
      *logits: One or more logits, all of one shape.

    Returns:
      The product's logit, of the same shape.

    Example:
      >>> both = product_logits(tf.constant(0.0), tf.constant(0.0))
      >>> round(float(tf.sigmoid(both)), 6)
      0.25
    """

    def of_two(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        return -tf.reduce_logsumexp(tf.stack([-a, -b, -a - b]), axis=0)

    return functools.reduce(of_two, logits)


@tf.keras.saving.register_keras_serializable("gmeta")
class TaskHeads(tf.keras.layers.Layer):
    r"""Logits of several tasks, from one tower per task, and of products of the tasks' probabilities.

    ``products={"ctcvr": ["ctr", "cvr"]}`` is the product of the Entire Space Multi-Task Model:
    :math:`p_\mathrm{ctcvr} = p_\mathrm{ctr}\, p_\mathrm{cvr}`. It trains the conversion rate after a click on
    all impressions (Ma et al., SIGIR 2018, section 2.3). Train with `gmeta.losses.MultiTaskBCE`, which takes
    the logits of the factors; for ranking, use all logits.

    Args:
      tasks: The tasks with towers.
      units: Number of units of each of a tower's hidden layers; () for a linear tower.
      products: Name -> the tasks, at least one, whose probabilities are multiplied.
      seed: Seed of the initial values.

    Shapes:
      {task: (..., dim)}, or one tensor (..., dim) for all tasks -> {task or product: (...)}, the logits. A
      logit's sigmoid is the probability. Logits are at least float32.

    Raises:
      ConfigError: A name occurs twice, a product has unknown tasks, or the inputs lack a task.

    Example:
      >>> heads = TaskHeads(["ctr", "cvr"], units=[4], products={"ctcvr": ["ctr", "cvr"]})
      >>> logits = heads({"ctr": tf.ones([5, 8]), "cvr": tf.ones([5, 8])})
      >>> {name: logit.shape for name, logit in logits.items()}
      {'ctr': TensorShape([5]), 'cvr': TensorShape([5]), 'ctcvr': TensorShape([5])}
    """

    def __init__(
        self,
        tasks: Sequence[str],
        *,
        units: Sequence[int] = (),
        products: Mapping[str, Sequence[str]] | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tasks, self.units, self.seed = tuple(tasks), tuple(units), seed
        self.products = {name: tuple(factors) for name, factors in (products or {}).items()}
        names = [*self.tasks, *self.products]
        if not self.tasks or len(set(names)) < len(names):
            raise ConfigError(f"{self.name}: tasks and products need different names, got {names}")
        for name, factors in self.products.items():
            if not factors or not set(factors) <= set(self.tasks):
                raise ConfigError(
                    f"{self.name}: {name} must be a product of tasks among {', '.join(self.tasks)}, got "
                    f"{', '.join(factors) or 'none'}"
                )
        layers = {f"fc{number + 1}": width for number, width in enumerate(self.units)}
        self.towers = {
            task: MLP(
                {**layers, "out": 1},
                seed=len(self.tasks) * seed + number,
                name=task,
                dtype=self.dtype_policy,
            )
            for number, task in enumerate(self.tasks)
        }

    def call(self, inputs: tf.Tensor | Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Compute the logits: task or product -> logit."""
        given = inputs if isinstance(inputs, Mapping) else dict.fromkeys(self.tasks, inputs)
        absent = [task for task in self.tasks if task not in given]
        if absent:
            raise ConfigError(
                f"{self.name}: no inputs for {', '.join(absent)}; got those for {', '.join(given)}"
            )
        logits = {task: tf.squeeze(self.towers[task](given[task]), -1) for task in self.tasks}
        logits = {name: tf.cast(x, tf.float32) if x.dtype.size < 4 else x for name, x in logits.items()}
        for name, factors in self.products.items():
            logits[name] = product_logits(*(logits[factor] for factor in factors))
        return logits

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        names = ("tasks", "units", "products", "seed")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}

"""Inner steps of which those of the first layer are taken among samples in place of weights.

The layer that a task's samples enter is the widest of most recommenders, and its steps are most of what an
inner loop computes; see `gmeta.meta.dual_dense` for the form and why it is fast. Its results are those of the
other form, to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import tensorflow as tf

from gmeta import meta
from gmeta.layers import MLP
from gmeta.meta.adaptation import Parameters
from gmeta.meta.dual_dense import DualDense
from gmeta.models.meta.learner.task_loops import TaskLoops
from gmeta.models.meta.learner.task_view import Part, TaskView


def steps_among_samples(model: TaskLoops) -> bool:
    """Whether a model's training steps can be taken in this form.

    The first layer has to adapt, with directions that are sums of gradients, on inputs that stay as they are.
    """
    inner, network = model.inner, model.network
    return (
        inner.steps > 0
        and isinstance(network, MLP)
        and f"{network.first}/kernel" in model.adapted_weights()
        and network.compute_dtype == network.dtype
        and getattr(inner.adaptation().optimizer, "is_linear", False)
        and not inner.adapts_embeddings
        and not (inner.clip_norm or inner.clip_value or inner.recompute)
        and inner.learn_learning_rate != "parameter"
    )


def dual_outputs(model: TaskLoops, view: TaskView, part: Part) -> tf.Tensor:
    """(tasks, samples, outputs) of tasks that have adapted, in training.

    Args:
      model: One of which `steps_among_samples` holds.
      view: The batch.
      part: The samples to give outputs for.
    """
    network, inner = model.network, model.inner
    weights = model.start_weights(view)
    kernel, bias = (weights.pop(f"{network.first}/{each}") for each in ("kernel", "bias"))
    layer = DualDense(
        view.samples(), kernel, bias, view.index("support"), order=inner.order or 2, steps=inner.steps
    )

    def read(parameters: Parameters, step: int) -> dict[str, tf.Tensor]:
        return {**parameters, network.first: layer.support_outputs(parameters[network.first], step)}

    def support_loss(given: Mapping[str, tf.Tensor]) -> tf.Tensor:
        return model.mean_losses(view, "support", network.beyond_first(given[network.first], given))

    rates = model.inner_rates.values()
    if rates is not None:
        rates[network.first] = rates[f"{network.first}/kernel"]  # the layer's, its bias' too
    rule = replace(inner.adaptation(rates), read=read)
    start = {network.first: layer.start(), **meta.per_task(weights, view.tasks)}
    adapted = rule.run(support_loss, rule.begin(start), inner.steps).parameters
    model.mark("inner", *adapted.values())
    return network.beyond_first(layer.outputs(view.index(part), adapted[network.first]), adapted)

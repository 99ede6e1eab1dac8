"""Inner steps that represent the first layer's steps by samples instead of by weights.

In most recommenders the first layer is the widest, and its steps are most of what an inner loop computes.
`gmeta.meta.dual_dense` explains the form and why it is fast. The results equal those of the plain form, to
rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import tensorflow as tf

from gmeta import meta
from gmeta.core.graph.step_marks import mark_end
from gmeta.layers import MLP
from gmeta.meta.adaptation import Parameters
from gmeta.meta.dual_dense import DualDense
from gmeta.models.meta.learner.task_learner import TaskLearner
from gmeta.models.meta.learner.task_view import Part, TaskView


def why_not_dual(learner: TaskLearner) -> str:
    """Say why a learner's training steps can't be computed in this form; empty if they can.

    The first layer must adapt, its steps must be sums of gradients, and its inputs must not change.
    """
    inner, network = learner.inner, learner.network
    if inner.algorithm == "ridge":
        return "ridge solves for the head"
    if not isinstance(network, MLP):
        return f"the network is a {type(network).__name__} and no gmeta.layers.MLP"
    if inner.steps == 0 or f"{network.first}/kernel" not in learner.adapted_weights():
        return f"the first layer, {network.first}, doesn't adapt"
    if inner.adapts_embeddings:
        return "rows adapt, so the first layer's inputs change with the steps"
    if network.compute_dtype != network.dtype:
        return f"the network computes in {network.compute_dtype}"
    if inner.clip_norm or inner.clip_value or inner.recompute or inner.learn_learning_rate == "parameter":
        return "it has no clipping, no recomputing and no rate for each weight"
    if not getattr(inner.adaptation().optimizer, "is_linear", False):
        return "the inner optimizer's steps are no sums of gradients"
    return ""


def dual_outputs(learner: TaskLearner, view: TaskView, part: Part) -> tf.Tensor:
    """Adapt the tasks in training and compute their outputs, (tasks, samples, outputs).

    Args:
      learner: A learner for which `why_not_dual` returns an empty string.
      view: The batch.
      part: The samples to compute outputs for.
    """
    network, inner = learner.network, learner.inner
    weights = learner.start_weights(view)
    kernel, bias = (weights.pop(f"{network.first}/{each}") for each in ("kernel", "bias"))
    layer = DualDense(
        view.samples(), kernel, bias, view.index("support"), order=inner.order or 2, steps=inner.steps
    )

    def read(parameters: Parameters, step: int) -> dict[str, tf.Tensor]:
        return {**parameters, network.first: layer.support_outputs(parameters[network.first], step)}

    def support_loss(given: Mapping[str, tf.Tensor]) -> tf.Tensor:
        return learner.mean_losses(view, "support", network.beyond_first(given[network.first], given))

    rates = learner.inner_rates.values()
    if rates is not None:
        rates[network.first] = rates[f"{network.first}/kernel"]  # one rate for kernel and bias of the layer
    rule = replace(inner.adaptation(rates), read=read)
    start = {network.first: layer.start(), **meta.per_task(weights, view.tasks)}
    adapted = rule.run(support_loss, rule.begin(start), inner.steps).parameters
    mark_end("inner", *adapted.values())
    return network.beyond_first(layer.outputs(view.index(part), adapted[network.first]), adapted)

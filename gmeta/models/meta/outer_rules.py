"""The outer gradient of a batch of tasks, with one rule for each algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.step import mark_end
from gmeta.layers import MLP
from gmeta.layers.embedding.collection import CollectionLookup
from gmeta.layers.networks import TaskNetwork
from gmeta.meta.adaptation import Parameters, per_task
from gmeta.meta.ridge import DualDense
from gmeta.models.meta.task_learner import OuterLoss, TaskLearner
from gmeta.models.meta.task_view import Part, TaskBatch, TaskView
from gmeta.training.compile_settings import LossScale

# Split of a batch into two halves: tasks with few support samples and tasks with many.
#
# Tasks that adapt side by side have their support sets padded to the longest one. The lengths of users'
# histories have a long tail, so in one group an inner loop may compute mostly padding: with MovieLens-1M's
# users in batches of 32, 57 rows in 100 are padding. In two groups 37 are (`tools/bench/meta.py`).


def in_two_groups(view: TaskView, outputs: Callable[[TaskView], tf.Tensor]) -> tf.Tensor:
    """Compute ``outputs(view)`` for each half separately.

    Args:
      view: A batch whose rows don't adapt.
      outputs: A view -> (tasks, ...); a task's outputs depend on its samples alone.

    Returns:
      (tasks, ...) in the order of the batch.
    """
    mask = view.mask("support")
    sizes = tf.reduce_max(tf.where(mask > 0, tf.range(1, tf.shape(mask)[1] + 1), 0), axis=1)
    order = tf.argsort(sizes)
    half = view.tasks // 2
    found = []
    for tasks in (order[:half], order[half:]):
        longest = tf.reduce_max(tf.concat([tf.gather(sizes, tasks), [0]], axis=0))
        found.append(outputs(view.of_tasks(tasks, longest)))
    return tf.gather(tf.concat(found, axis=0), tf.math.invert_permutation(order))


# Inner steps that represent the first layer's steps by samples instead of by weights.
#
# In most recommenders the first layer is the widest, and its steps are most of what an inner loop computes.
# `gmeta.meta.ridge` explains the form and why it is fast. The results equal those of the plain form, to
# rounding.


def why_not_dual(learner: TaskLearner) -> str:
    """Return why a learner's training steps can't be computed in this form; empty if they can.

    The first layer must adapt, its steps must be sums of gradients, and its inputs must not change.
    """
    inner, network = learner.inner, learner.network
    if inner.algorithm == "ridge":
        return "ridge solves for the head"
    if not isinstance(network, MLP):
        return f"the network is a {type(network).__name__} and not a gmeta.layers.MLP"
    if inner.steps == 0 or f"{network.first}/kernel" not in learner.adapted_weights():
        return f"the first layer, {network.first}, doesn't adapt"
    if inner.adapts_embeddings:
        return "rows adapt, so the first layer's inputs change with the steps"
    if network.compute_dtype != network.dtype:
        return f"the network computes in {network.compute_dtype}"
    if inner.clip_norm or inner.clip_value or inner.recompute or inner.learn_learning_rate == "parameter":
        return "it has no clipping, no recomputing and no rate for each weight"
    if not getattr(inner.adaptation().optimizer, "is_linear", False):
        return "the inner optimizer's steps aren't sums of gradients"
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
    start = {network.first: layer.start(), **per_task(weights, view.tasks)}
    adapted = rule.run(support_loss, rule.begin(start), inner.steps).parameters
    mark_end("inner", *adapted.values())
    return network.beyond_first(layer.outputs(view.index(part), adapted[network.first]), adapted)


# Forms in which a training step computes its inner loop. Results are the same, to rounding.
#
# ``"plain"`` steps all tasks side by side; every learner supports it. ``"dual"`` represents the first layer's
# steps by samples (`dual_outputs`). ``"grouped"`` splits the batch into tasks with few and tasks with many
# support samples (`in_two_groups`). ``"dual in groups"`` does both.

Form = Literal["plain", "dual", "grouped", "dual in groups"]


def choose_form(learner: TaskLearner, asked: Form | Literal["auto"] = "auto") -> Form:
    """Choose the form in which a learner's training steps are computed.

    Args:
      learner: The learner.
      asked: A form; ``"auto"`` chooses the quickest one that the learner and its inner loop allow.

    Raises:
      ConfigError: The form is unknown, or the learner doesn't allow it; the message says why.
    """
    if asked == "auto":
        dual = "dual" in learner.forms and not why_not_dual(learner)
        grouped = "grouped" in learner.forms and not _why_not_grouped(learner) and _groups_pay(learner)
        return ("dual in groups" if grouped else "dual") if dual else ("grouped" if grouped else "plain")
    if asked not in get_args(Form):
        raise ConfigError(f"form must be 'auto', {', '.join(map(repr, get_args(Form)))}, got {asked!r}")
    if asked not in learner.forms:
        raise ConfigError(
            f"{learner.name}: {type(learner).__name__} is computed in the forms {', '.join(learner.forms)}, "
            f"got form={asked!r}: leave it 'auto'"
        )
    reason = why_not_dual(learner) if "dual" in asked else ""
    reason = reason or (_why_not_grouped(learner) if "group" in asked else "")
    if reason:
        raise ConfigError(f"{learner.name}: form={asked!r} can't be: {reason}; leave it 'auto'")
    return asked


def _why_not_grouped(learner: TaskLearner) -> str:
    if learner.inner.adapts_embeddings:
        return "rows adapt, and their copies belong to the whole batch"
    if learner.outer_part == "all":
        return "the outer loss is over support and query, of which a group cuts the support"
    if learner.inner.learns_variance:
        return "the outer loss takes the variances of outputs, which aren't computed in groups"
    return ""


def _groups_pay(learner: TaskLearner) -> bool:
    # Tracing a Keras network takes longer than two groups save. A GPU is bound by kernel launches rather than
    # by arithmetic.
    slower = isinstance(learner.network, TaskNetwork) or bool(tf.config.list_logical_devices("GPU"))
    return learner.inner.steps > 1 and not slower


UNSCALED = LossScale()


class OuterGradients(NamedTuple):
    """The gradients of an outer step.

    Attributes:
      dense: The gradient of each trainable variable, or None.
      rows: The gradient of the rows of each table in the lookup, or None.
      view: The batch, as the loops saw it.
      measured: The outer loss of adapted tasks, with its samples and outputs.
    """

    dense: list[tf.Tensor | None]
    rows: list[tf.Tensor | None]
    view: TaskView
    measured: OuterLoss


def outer_gradients(
    learner: TaskLearner,
    batch: TaskBatch,
    lookup: CollectionLookup,
    variables: Sequence[tf.Variable],
    *,
    form: Form = "plain",
    scale: LossScale = UNSCALED,
) -> OuterGradients:
    """Compute the outer loss of a batch and its gradients, by the rule of the inner loop's algorithm.

    Args:
      learner: The learner.
      batch: The batch, as `TaskLearner.tasks_of` gives it.
      lookup: The rows of its samples.
      variables: The variables that get gradients besides the rows.
      form: How the inner loop is computed (`Form`).
      scale: The optimizer's loss scaling.
    """
    if learner.inner.algorithm == "reptile":
        return reptile(learner, batch, lookup, variables)
    return through_the_steps(learner, batch, lookup, variables, form=form, scale=scale)


def count_samples(learner: TaskLearner, batch: TaskBatch, part: Part) -> tf.Tensor:
    """Count the samples or tasks that a mean over a part of the batch runs over, ()."""
    masks = [batch[each]["mask"] for each in (("support", "query") if part == "all" else (part,))]
    if learner.reduction == "sample":
        return tf.add_n([tf.reduce_sum(mask) for mask in masks])
    real = tf.reduce_any(tf.concat(masks, axis=1) > 0, axis=1)
    return tf.reduce_sum(tf.cast(real, tf.float32))


def learned_part(learner: TaskLearner) -> Part:
    """Return the part that the outer gradient averages over; for Reptile it is always ``"all"``."""
    return "all" if learner.inner.algorithm == "reptile" else learner.outer_part


def through_the_steps(
    learner: TaskLearner,
    batch: TaskBatch,
    lookup: CollectionLookup,
    variables: Sequence[tf.Variable],
    *,
    form: Form = "plain",
    scale: LossScale = UNSCALED,
) -> OuterGradients:
    """Compute MAML's gradient of the adapted weights' query loss, through the inner steps or past them.

    With ridge, the gradient of `TaskLearner.unadapted_loss` is added.
    """
    with tf.GradientTape() as tape:
        tape.watch(lookup.rows)
        view = learner.view(batch, lookup, training=True)
        measured = _adapted_loss(learner, view, form)
        scaled = scale.scale(measured.loss + learner.unadapted_loss(view))
    gradients = scale.unscale(tape.gradient(scaled, [*variables, *lookup.rows]))
    dense, rows = gradients[: len(variables)], gradients[len(variables) :]
    rows = [None if g is None else tf.convert_to_tensor(g) for g in rows]
    return OuterGradients(dense, rows, view, measured)


def _adapted_loss(learner: TaskLearner, view: TaskView, form: Form) -> OuterLoss:
    """Adapt the tasks of a batch in a form, and compute the outer loss."""
    if form == "plain":
        return learner.outer_loss(view, _adapt(learner, view))
    part = learner.outer_part

    def outputs(tasks: TaskView) -> tf.Tensor:
        if form == "grouped":
            return learner.task_outputs(tasks, part, _adapt(learner, tasks), training=True)
        return dual_outputs(learner, tasks, part)

    return learner.loss_of(view, part, outputs(view) if form == "dual" else in_two_groups(view, outputs))


def _adapt(learner: TaskLearner, view: TaskView, part: Part = "support") -> dict[str, tf.Tensor]:
    weights = learner.adapt(view, steps=learner.inner.steps, part=part, training=True).parameters
    mark_end("inner", *weights.values())
    return weights


def reptile(
    learner: TaskLearner, batch: TaskBatch, lookup: CollectionLookup, variables: Sequence[tf.Variable]
) -> OuterGradients:
    r"""Compute Reptile's gradient, :math:`\sum_t w_t (\theta - \theta_t') / \alpha`.

    w are the tasks' weights in the loss. θ' are the weights after the inner steps on all samples of a task,
    support and query alike. With one step this is the gradient of joint training (Nichol et al., 2018,
    section 5).
    """
    view = learner.view(batch, lookup, training=True)
    adapted = _adapt(learner, view, "all")
    measured = learner.outer_loss(view, adapted)
    mask = tf.cast(view.mask("all") > 0, tf.float32)
    sizes = tf.reduce_sum(mask, axis=1)
    weights = sizes if learner.reduction == "sample" else tf.cast(sizes > 0, tf.float32)
    weights = tf.math.divide_no_nan(weights, tf.reduce_sum(weights) * learner.inner.learning_rate)
    moved = _move(learner, adapted)
    dense = [
        tf.tensordot(weights, moved[id(variable)], 1) if id(variable) in moved else None
        for variable in variables
    ]
    return OuterGradients(dense, _row_moves(view, adapted, weights), view, measured)


def _move(learner: TaskLearner, adapted: Mapping[str, tf.Tensor]) -> dict[int, tf.Tensor]:
    """Return id of a variable -> (tasks, ...): the variable minus each task's adapted weight."""
    return {id(v): v[tf.newaxis] - adapted[name] for name, v in learner.adapted_weights().items()}


def _row_moves(
    view: TaskView, adapted: Mapping[str, tf.Tensor], weights: tf.Tensor
) -> list[tf.Tensor | None]:
    copies = view.copies
    if copies is None:
        return [None] * len(view.lookup.rows)
    after = [adapted[name] for name in view.row_parameters()]
    return [
        tf.math.unsorted_segment_sum(
            tf.gather(weights, owner)[:, tf.newaxis] * (before - now), source, tf.shape(fetched)[0]
        )
        for before, now, owner, source, fetched in zip(
            copies.rows, after, copies.owners, copies.sources, view.lookup.rows, strict=True
        )
    ]

"""The outer gradient of a batch of tasks, with one rule for each algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from gmeta.core.graph.step_marks import mark_end
from gmeta.layers import CollectionLookup
from gmeta.models.meta.learner.forms import Form, outer_loss
from gmeta.models.meta.learner.task_learner import OuterLoss, TaskLearner
from gmeta.models.meta.learner.task_view import Part, TaskBatch, TaskView
from gmeta.models.training.optimizer.loss_scale import LossScale

UNSCALED = LossScale()


class OuterGradients(NamedTuple):
    """The gradients of an outer step.

    Attributes:
      loss: () the outer loss of adapted tasks.
      dense: The gradient of each trainable variable, or None.
      rows: The gradient of the rows of each table in the lookup, or None.
      view: The batch, as the loops saw it.
      measured: The outer loss with its samples and outputs, for metrics.
    """

    loss: tf.Tensor
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
      form: How the inner loop is computed; see `gmeta.models.meta.learner.forms`.
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
        measured = outer_loss(learner, view, form)
        scaled = scale.scale(measured.loss + learner.unadapted_loss(view))
    gradients = scale.unscale(tape.gradient(scaled, [*variables, *lookup.rows]))
    dense, rows = gradients[: len(variables)], gradients[len(variables) :]
    rows = [None if g is None else tf.convert_to_tensor(g) for g in rows]
    return OuterGradients(measured.loss, dense, rows, view, measured)


def reptile(
    learner: TaskLearner, batch: TaskBatch, lookup: CollectionLookup, variables: Sequence[tf.Variable]
) -> OuterGradients:
    r"""Compute Reptile's gradient, :math:`\sum_t w_t (\theta - \theta_t') / \alpha`.

    w are the tasks' weights in the loss. θ' are the weights after the inner steps on all samples of a task,
    support and query alike. With one step this is the gradient of joint training (Nichol et al., 2018,
    section 5).
    """
    view = learner.view(batch, lookup, training=True)
    adapted = learner.adapt(view, steps=learner.inner.steps, part="all", training=True).parameters
    mark_end("inner", *adapted.values())
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
    return OuterGradients(measured.loss, dense, _row_moves(view, adapted, weights), view, measured)


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

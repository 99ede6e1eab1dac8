"""The outer gradient of a batch of tasks, by the rule of each algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from gmeta.layers.adaptive.task_network import TaskNetwork
from gmeta.models.meta.learner.dual_steps import dual_outputs, steps_among_samples
from gmeta.models.meta.learner.task_groups import in_two_groups
from gmeta.models.meta.learner.task_loops import TaskLoops

if TYPE_CHECKING:
    from gmeta.layers import CollectionLookup
    from gmeta.models.meta.learner.task_view import Part, TaskBatch, TaskView

_HOOKS = ("start_weights", "task_outputs", "support_loss", "outer_loss")


class OuterGradients(NamedTuple):
    """What an outer step takes.

    Attributes:
      loss: () the outer loss.
      dense: For each trainable variable its gradient, or None.
      rows: For each table of the lookup the gradient of its rows, or None.
    """

    loss: tf.Tensor
    dense: list[tf.Tensor | None]
    rows: list[tf.Tensor | None]


def through_the_steps(model: TaskLoops, batch: TaskBatch, lookup: CollectionLookup) -> OuterGradients:
    """MAML's: the query loss of the adapted weights, differentiated through the inner steps or past them."""
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        tape.watch(lookup.rows)
        view = model.view(batch, lookup, training=True)
        loss = _outer_loss(model, view)
        scaled = model.scaled(loss)
    gradients = model.unscaled(tape.gradient(scaled, [*variables, *lookup.rows]))
    dense, rows = gradients[: len(variables)], gradients[len(variables) :]
    return OuterGradients(loss, dense, [None if g is None else tf.convert_to_tensor(g) for g in rows])


def _outer_loss(model: TaskLoops, view: TaskView) -> tf.Tensor:
    if any(getattr(type(model), hook) is not getattr(TaskLoops, hook) for hook in _HOOKS):
        # It may ask for all tasks' weights at once.
        return model.outer_loss(view, _adapt_tasks(model, view))
    part = model.outer_part
    if steps_among_samples(model):
        outputs = partial(dual_outputs, model, part=part)
    else:
        outputs = partial(_outputs, model, part=part)
    worthwhile = model.inner.steps > 1 and part == "query" and view.copies is None
    # Tracing a network of Keras takes long, and longer than two groups save. A GPU waits for launches rather
    # than for sums.
    slower = isinstance(model.network, TaskNetwork) or bool(tf.config.list_logical_devices("GPU"))
    grouped = worthwhile and not slower
    return model.measured_loss(view, part, in_two_groups(view, outputs) if grouped else outputs(view))


def _outputs(model: TaskLoops, view: TaskView, part: Part) -> tf.Tensor:
    return model.task_outputs(view, part, _adapt_tasks(model, view), training=True)


def _adapt_tasks(model: TaskLoops, view: TaskView) -> dict[str, tf.Tensor]:
    weights = model.adapted(view, steps=model.inner.steps, training=True).parameters
    model.mark("inner", *weights.values())
    return weights


def reptile(model: TaskLoops, batch: TaskBatch, lookup: CollectionLookup) -> OuterGradients:
    r"""Reptile's: :math:`\sum_t w_t (\theta - \theta_t') / \alpha`, with the tasks' weights in the loss.

    θ' is where the inner steps on all samples of a task led, support and query alike. With one step it is the
    gradient of joint training (Nichol et al., 2018, section 5).
    """
    view = model.view(batch, lookup, training=True)
    adapted = model.adapted(view, steps=model.inner.steps, part="all", training=True).parameters
    model.mark("inner", *adapted.values())
    loss = model.outer_loss(view, adapted)
    mask = tf.cast(view.mask("all") > 0, tf.float32)
    sizes = tf.reduce_sum(mask, axis=1)
    weights = sizes if model.reduction == "sample" else tf.cast(sizes > 0, tf.float32)
    weights = tf.math.divide_no_nan(weights, tf.reduce_sum(weights) * model.inner.learning_rate)
    moved = _move(model, adapted)
    dense = [
        tf.tensordot(weights, moved[id(variable)], 1) if id(variable) in moved else None
        for variable in model.trainable_variables
    ]
    return OuterGradients(loss, dense, _rows_moved(view, adapted, weights))


def _move(model: TaskLoops, adapted: Mapping[str, tf.Tensor]) -> dict[int, tf.Tensor]:
    """Id of a variable -> (tasks, ...): how far each task went from it, backwards."""
    return {id(v): v[tf.newaxis] - adapted[name] for name, v in model.adapted_weights().items()}


def _rows_moved(
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

"""Forms in which a training step computes its inner loop. Results are the same, to rounding.

``"plain"`` steps all tasks side by side; every learner supports it. ``"dual"`` represents the first layer's
steps by samples (`gmeta.models.meta.learner.dual_steps`). ``"grouped"`` splits the batch into tasks with few
and tasks with many support samples (`gmeta.models.meta.learner.task_groups`). ``"dual in groups"`` does both.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph.step_marks import mark_end
from gmeta.layers.adaptive.task_network import TaskNetwork
from gmeta.models.meta.learner.dual_steps import dual_outputs, why_not_dual
from gmeta.models.meta.learner.task_groups import in_two_groups
from gmeta.models.meta.learner.task_learner import OuterLoss, TaskLearner
from gmeta.models.meta.learner.task_view import TaskView

Form = Literal["plain", "dual", "grouped", "dual in groups"]


def choose_form(learner: TaskLearner, asked: Form | Literal["auto"] = "auto") -> Form:
    """Choose the form in which a learner's training steps are computed.

    Args:
      learner: The learner.
      asked: A form; ``"auto"`` chooses the quickest one that the learner and its inner loop allow.

    Raises:
      ConfigError: There is no such form, or the learner doesn't allow it; the message says why.
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


def outer_loss(learner: TaskLearner, view: TaskView, form: Form) -> OuterLoss:
    """Adapt the tasks of a batch in a form, in training, and compute the outer loss."""
    if form == "plain":
        return learner.outer_loss(view, _adapt(learner, view))
    outputs = partial(_outputs, learner, form)
    found = outputs(view) if form == "dual" else in_two_groups(view, outputs)
    return learner.loss_of(view, learner.outer_part, found)


def _outputs(learner: TaskLearner, form: Form, view: TaskView) -> tf.Tensor:
    if form == "grouped":
        return learner.task_outputs(view, learner.outer_part, _adapt(learner, view), training=True)
    return dual_outputs(learner, view, learner.outer_part)


def _adapt(learner: TaskLearner, view: TaskView) -> dict[str, tf.Tensor]:
    weights = learner.adapt(view, steps=learner.inner.steps, training=True).parameters
    mark_end("inner", *weights.values())
    return weights


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

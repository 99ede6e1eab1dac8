r"""How uncertain the outputs of adapted tasks are under ridge, and the outer loss that teaches it.

Under the posterior of its head, an output of a task is Gaussian with a mean f and a variance s². A loss with
second derivative c, divided by the prior's noise n, says that labels have the variance n / c around it. So a
label of the query that is drawn from all of this has the negative log-likelihood, up to a constant,

.. math:: \frac{1}{2} \log v + \frac{(y - f)^2}{2 v}, \quad v = s^2 + n / c

(Patacchiola et al., "Bayesian Meta-Learning for the Few-Shot Setting via Deep Kernels", NeurIPS 2020, section
3). Its least over v is where v is the mean of (y - f)², so it teaches prior and noise their scale, which the
squared error alone leaves open: that knows only their ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.meta import ridge
from gmeta.models.meta.learner.ridge_steps import (
    Head,
    RidgePrior,
    derivatives,
    linear_form,
    parabolas,
    stack_head,
)
from gmeta.models.meta.learner.task_view import Part, TaskView


class LikelihoodLoss(NamedTuple):
    """Losses of samples, and the outputs that they are of.

    Attributes:
      losses: (tasks, samples), summed over outputs.
      outputs: (tasks, samples, outputs).
    """

    losses: tf.Tensor
    outputs: tf.Tensor


def posterior_variance(
    learner: Any, view: TaskView, parameters: Mapping[str, tf.Tensor], part: Part = "query"
) -> tf.Tensor:
    """Compute how uncertain the outputs of adapted tasks are, (tasks, samples, outputs).

    It is the variance of the outputs under the posterior of the head, the noise of labels left out; for a
    logistic loss by the parabolas at the solution (Laplace's approximation).

    Args:
      learner: A learner whose inner loop is ridge.
      view: The batch.
      parameters: What the tasks' adaptation has led to.
      part: The samples to predict.
    """
    return _variance(learner, view, parameters, linear_form(learner, view, part, parameters, False))


def likelihood_loss(
    learner: Any, view: TaskView, parameters: Mapping[str, tf.Tensor], part: Part, *, adapted: bool = True
) -> LikelihoodLoss:
    """Compute the negative log-likelihoods of labels under a squared error, in training.

    Args:
      learner: A learner whose inner loop is ridge, and whose loss is a squared error.
      view: The batch.
      parameters: What the tasks' adaptation has led to.
      part: The samples, which must be others than those adapted on.
      adapted: Whether heads have the variance that their support leaves them; else they have the prior's.
    """
    prior = learner.inner_rates
    assert isinstance(prior, RidgePrior)
    head = linear_form(learner, view, part, parameters, True)
    outputs = tf.matmul(head.features, stack_head(prior, parameters)) + head.offset
    slope, curvature = derivatives(learner, view.labels(part), outputs)
    if adapted:
        variance = _variance(learner, view, parameters, head)
    else:
        variance = tf.reduce_sum(head.features**2 * prior.prior(), axis=-1, keepdims=True)
    variance += prior.noise() / curvature
    losses = (tf.math.log(variance) + (slope / curvature) ** 2 / variance) / 2
    return LikelihoodLoss(tf.reduce_sum(losses, axis=-1), outputs)


def _variance(learner: Any, view: TaskView, parameters: Mapping[str, tf.Tensor], wanted: Head) -> tf.Tensor:
    prior = learner.inner_rates
    assert isinstance(prior, RidgePrior)
    support = linear_form(learner, view, "support", parameters, False)
    _, _, weights = parabolas(learner, view, "support", support, stack_head(prior, parameters))
    variances = prior.prior()
    factors = ridge.factorize(support.features[:, tf.newaxis], variances, tf.linalg.matrix_transpose(weights))
    return tf.linalg.matrix_transpose(ridge.variance(factors, variances, wanted.features[:, tf.newaxis]))

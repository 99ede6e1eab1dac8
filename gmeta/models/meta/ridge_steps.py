"""Inner steps that solve for the head by ridge regression (`gmeta.meta.ridge`).

The head is the network's last layer, a kernel and perhaps a bias, and the network's outputs are affine in
them. A step replaces the support loss by the parabola that touches it at the present outputs, and takes the
head to the least of the sum of parabola and prior: for squared error that is the exact solution, so that one
step is all; for a logistic loss it is a step of Newton's method. Whatever else adapts takes a gradient step
first, at the present head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection
from gmeta.meta import ridge
from gmeta.meta.adaptation import Adapted
from gmeta.models.meta.task_losses import InnerRates, like_outputs
from gmeta.models.meta.task_view import Part, TaskView

_LEAST_CURVATURE = 1e-6


class RidgePrior(InnerRates):
    """The prior of a head and the noise of labels, which the outer loop learns, beside the inner rates.

    The prior's mean is the head's shared weights; `gmeta.meta.HeadPrior` says how its variances and the
    noise, by which the loss is divided, start and move.

    Args:
      inner: The inner loop.
      weights: The weights of the network that adapt, by name.
      collection: The collection with the tables.

    Attributes:
      kernel: The name of the head's kernel.
      bias: The name of its bias; None: it has none.

    Raises:
      ConfigError: The network's last layer isn't a kernel with or without a bias.
    """

    def __init__(
        self, inner: meta.InnerLoop, weights: Mapping[str, tf.Variable], collection: EmbeddingCollection
    ) -> None:
        head = list(weights)[-1].rpartition("/")[0] if weights else ""
        own = {name: value for name, value in weights.items() if name.rpartition("/")[0] == head}
        kernels = [name for name, value in own.items() if value.shape.rank == 2]
        biases = [name for name, value in own.items() if value.shape.rank == 1]
        if len(kernels) != 1 or len(own) != 1 + len(biases) or len(biases) > 1:
            raise ConfigError(
                f"inner loop: ridge solves for a last layer with a kernel and a bias, and {head or 'it'} has "
                f"{', '.join(f'{name} {value.shape}' for name, value in own.items()) or 'no weights'}: end "
                "the network with a Dense layer"
            )
        rest = {name: value for name, value in weights.items() if name not in own}
        super().__init__(inner, rest, collection)
        self.kernel, self.bias = kernels[0], next(iter(biases), None)
        width = int(own[self.kernel].shape[0])
        given = inner.prior or meta.HeadPrior()
        kernel, bias = (1 / width, 1.0) if given.variance is None else (given.variance,) * 2
        self._pace = given.pace
        self._log_prior = self._add_log("log_prior", [kernel] * width + [bias] * len(biases))
        self._log_noise = self._add_log("log_noise", given.noise)

    def _add_log(self, name: str, start: Any) -> tf.Variable:
        value = np.log(np.asarray(start, np.float32)) / self._pace
        constant = tf.keras.initializers.Constant(value)
        return self.add_weight(name=name, shape=value.shape, initializer=constant)

    @property
    def names(self) -> list[str]:
        """The names of the head's weights: the kernel's, and the bias' if there is one."""
        return [name for name in (self.kernel, self.bias) if name is not None]

    def prior(self) -> tf.Tensor:
        """Compute the prior's variances, (features,); the bias' is the last."""
        return tf.exp(self._pace * self._log_prior)

    def noise(self) -> tf.Tensor:
        """Compute the noise, ()."""
        return tf.exp(self._pace * self._log_noise)


class Head(NamedTuple):
    """The parts of outputs: features, (tasks, samples, n), times a head, (tasks, n, outputs), plus offset."""

    features: tf.Tensor
    offset: tf.Tensor


def run_ridge(
    learner: Any, view: TaskView, adapted: Adapted, steps: int, part: Part, training: bool
) -> Adapted:
    """Take ``steps`` steps: a gradient step of what adapts besides the head, then the head's solution.

    Args:
      learner: The learner, whose inner rates are a `RidgePrior`.
      view: The batch.
      adapted: Where from.
      steps: How many steps.
      part: The samples to adapt on.
      training: As in `TaskLearner.adapt`.
    """
    prior = learner.inner_rates
    assert isinstance(prior, RidgePrior)
    names = prior.names
    start = learner.start_weights(view)
    rule = learner.inner.adaptation(prior.values(), order=None if training else 1)
    moving = {*learner.adapted_weights(), *view.owners()} - set(names)
    for _ in range(steps):
        parameters = adapted.parameters
        if moving:
            fixed = {name: value for name, value in parameters.items() if name not in moving}
            others = adapted._replace(
                parameters={name: parameters[name] for name in parameters if name in moving},
                slots={name: adapted.slots[name] for name in parameters if name in moving},
            )
            moved = rule.run(
                lambda w, fixed=fixed: learner.support_loss(view, {**fixed, **w}, part, training), others, 1
            )
            parameters = {**parameters, **moved.parameters}
            adapted = adapted._replace(slots={**adapted.slots, **moved.slots})
        head = linear_form(learner, view, part, parameters, training)
        first, now = (stack_head(prior, weights) for weights in (start, parameters))
        found = first + _solve(learner, view, part, head, first, now)
        width = int(head.features.shape[-1]) - (len(names) - 1)
        parts = dict(zip(names, (found[:, :width], found[:, -1]), strict=False))
        adapted = adapted._replace(parameters={**parameters, **parts}, steps=adapted.steps + 1)
    return adapted


def linear_form(
    learner: Any, view: TaskView, part: Part, parameters: Mapping[str, tf.Tensor], training: bool
) -> Head:
    """Compute the features that the head sees, by the network's outputs with known heads in its place."""
    prior = learner.inner_rates
    assert isinstance(prior, RidgePrior)
    width = int(parameters[prior.kernel].shape[-2])
    # The columns of the heads: each feature alone, nothing, and the bias alone.
    probe = {prior.kernel: tf.eye(width, width + 2)}
    if prior.bias is not None:
        probe[prior.bias] = tf.one_hot(width + 1, width + 2)
    outputs = tf.cast(learner.task_outputs(view, part, {**parameters, **probe}, training), tf.float32)
    offset = outputs[..., width : width + 1]
    features = outputs[..., :width] - offset
    if prior.bias is not None:
        features = tf.concat([features, outputs[..., width + 1 :] - offset], axis=-1)
    return Head(features, offset)


def stack_head(prior: RidgePrior, weights: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Put the head's kernel and its bias together, ([tasks,] features, outputs)."""
    kernel, *bias = (tf.cast(weights[name], tf.float32) for name in prior.names)
    return tf.concat([kernel, *(each[..., tf.newaxis, :] for each in bias)], axis=-2)


def _solve(
    learner: Any, view: TaskView, part: Part, head: Head, first: tf.Tensor, now: tf.Tensor
) -> tf.Tensor:
    """Solve for how far the heads lie off the prior's mean, (tasks, features, outputs)."""
    prior = learner.inner_rates
    assert isinstance(prior, RidgePrior)
    slope, curvature, weights = parabolas(learner, view, part, head, now)
    residuals = tf.matmul(head.features, now - first) - slope / curvature
    weights, residuals = (tf.linalg.matrix_transpose(each) for each in (weights, residuals))
    variances = prior.prior()
    factors = ridge.factorize(head.features[:, tf.newaxis], variances, weights)
    found = ridge.solve(factors, variances, weights, residuals[..., tf.newaxis])
    return tf.linalg.matrix_transpose(found[..., 0])


def parabolas(
    learner: Any, view: TaskView, part: Part, head: Head, now: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Compute slope and curvature of samples' losses and their weights, (tasks, samples, outputs)."""
    prior = learner.inner_rates
    assert isinstance(prior, RidgePrior)
    slope, curvature = derivatives(learner, view.labels(part), tf.matmul(head.features, now) + head.offset)
    return slope, curvature, view.mask(part)[..., tf.newaxis] * curvature / prior.noise()


def derivatives(learner: Any, labels: tf.Tensor, outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute first and second derivatives of samples' losses by their outputs, (tasks, samples, outputs)."""
    if not max(_second_differences(learner, outputs.shape[-1] or 1)) > 1e-5:
        raise ConfigError(
            f"{learner.name}: ridge needs a loss that is twice differentiable, such as mse or a binary "
            "cross-entropy of logits; this one is made of straight lines"
        )
    with tf.GradientTape() as outer:
        outer.watch(outputs)
        with tf.GradientTape() as inner:
            inner.watch(outputs)
            loss = learner.loss(like_outputs(labels), outputs)
        slope = inner.gradient(loss, outputs)
    return slope, tf.maximum(outer.gradient(slope, outputs), _LEAST_CURVATURE)


def is_squared_error(learner: Any, outputs: int) -> bool:
    """Return whether the loss is a multiple of the squared error: it has one second derivative."""
    bends = _second_differences(learner, outputs)
    return min(bends) > 1e-5 and max(bends) < 1.01 * min(bends)


def _second_differences(learner: Any, outputs: int) -> list[float]:
    """Compute second differences at some outputs, for labels of 0 and of 1, over the largest loss there."""
    with tf.init_scope():  # eagerly, once a trace; no tape records in it
        labels = tf.reshape(tf.constant([0.0, 1.0]), [1, 2, 1]) + tf.zeros([1, 2, outputs])

        def loss(at: float) -> tf.Tensor:
            return learner.loss(labels, tf.zeros_like(labels) + at)

        places = [[loss(at - 0.2), loss(at), loss(at + 0.2)] for at in (0.4, 2.0)]
        bends = tf.stack([before - 2 * here + after for before, here, after in places])
        largest = tf.reduce_max(tf.abs(tf.stack(places)))
        return [float(bend) for bend in tf.reshape(bends / largest, [-1])]


# How uncertain the outputs of adapted tasks are under ridge, and the outer loss that teaches it.
#
# Under the posterior of its head, an output of a task is Gaussian with a mean f and a variance s². A loss
# with second derivative c, divided by the prior's noise n, says that labels have the variance n / c around
# it. So a label of the query that is drawn from all of this has the negative log-likelihood, up to a
# constant,
#
# .. math:: \frac{1}{2} \log v + \frac{(y - f)^2}{2 v}, \quad v = s^2 + n / c
#
# (Patacchiola et al., "Bayesian Meta-Learning for the Few-Shot Setting via Deep Kernels", NeurIPS 2020,
# section 3). Its least over v is where v is the mean of (y - f)², so it teaches prior and noise their scale,
# which the squared error alone leaves open: that knows only their ratio.


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

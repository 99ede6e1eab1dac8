r"""Ridge regression of a task's head, solved in closed form and differentiable.

A head is linear in its features: :math:`f = \Phi w + c`. Let its prior be Gaussian, :math:`w \sim N(w_0, P)`
with P diagonal. The head that a task's support makes most probable solves a linear system (Bertinetto et
al., "Meta-learning with differentiable closed-form solvers", ICLR 2019, section 3; as a Gaussian process:
Patacchiola et al., "Bayesian Meta-Learning for the Few-Shot Setting via Deep Kernels", NeurIPS 2020, section
3). Scaled by the prior, :math:`J = \sqrt{m} \Phi P^{1/2} / \sigma` for sample weights m and noise
:math:`\sigma^2`,

.. math:: w - w_0 = P^{1/2} (J^T J + I)^{-1} J^T r = P^{1/2} J^T (J J^T + I)^{-1} r,
   \quad r = \sqrt{m} (y - f_0) / \sigma

The smaller of the two systems is solved: features by features, or samples by samples. A sample of weight 0
changes nothing. Both matrices have eigenvalues of at least 1, so their Cholesky factors exist in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf


class Ridge(NamedTuple):
    """The factors of a batch of ridge regressions.

    Attributes:
      scaled: (..., samples, features) J.
      factor: The Cholesky factor of the smaller system, (..., n, n).
      by_samples: Whether that is samples by samples; a () tensor where the number of samples is open.
    """

    scaled: tf.Tensor
    factor: tf.Tensor
    by_samples: bool | tf.Tensor


def factorize(features: tf.Tensor, prior: tf.Tensor, weights: tf.Tensor) -> Ridge:
    """Factorize the smaller system of each task.

    Args:
      features: (..., samples, features).
      prior: (features,) prior variances, above 0.
      weights: (..., samples) of each sample, its weight over its noise variance; 0 for padding.
    """
    scaled = features * tf.sqrt(weights)[..., tf.newaxis] * tf.sqrt(prior)
    samples, width = scaled.shape[-2], scaled.shape[-1]
    if samples is None:
        samples = tf.shape(scaled)[-2]
    by_samples = samples < width
    matrix = _either(
        by_samples,
        lambda: tf.matmul(scaled, scaled, transpose_b=True),
        lambda: tf.matmul(scaled, scaled, transpose_a=True),
    )
    matrix += tf.eye(tf.shape(matrix)[-1], dtype=matrix.dtype)
    return Ridge(scaled, tf.linalg.cholesky(matrix), by_samples)


def solve(ridge: Ridge, prior: tf.Tensor, weights: tf.Tensor, residuals: tf.Tensor) -> tf.Tensor:
    """Solve for how far each task's head lies off the prior's mean, (..., features, outputs).

    Args:
      ridge: From `factorize`.
      prior: As there.
      weights: As there.
      residuals: (..., samples, outputs) labels less what the prior's mean predicts.
    """
    scaled, factor, by_samples = ridge
    r = residuals * tf.sqrt(weights)[..., tf.newaxis]
    found = _either(
        by_samples,
        lambda: tf.matmul(scaled, tf.linalg.cholesky_solve(factor, r), transpose_a=True),
        lambda: tf.linalg.cholesky_solve(factor, tf.matmul(scaled, r, transpose_a=True)),
    )
    return found * tf.sqrt(prior)[:, tf.newaxis]


def variance(ridge: Ridge, prior: tf.Tensor, features: tf.Tensor) -> tf.Tensor:
    r"""Compute the posterior variance of predictions, :math:`\phi P^{1/2} (J^T J + I)^{-1} P^{1/2} \phi^T`.

    Args:
      ridge: From `factorize`.
      prior: As there.
      features: (..., samples, features) of the samples to predict.

    Returns:
      (..., samples), without the noise.
    """
    scaled, factor, by_samples = ridge
    rows = features * tf.sqrt(prior)

    def through_samples() -> tf.Tensor:
        part = tf.linalg.triangular_solve(factor, tf.matmul(scaled, rows, transpose_b=True))
        return tf.reduce_sum(rows**2, axis=-1) - tf.reduce_sum(part**2, axis=-2)

    def through_features() -> tf.Tensor:
        part = tf.linalg.triangular_solve(factor, tf.linalg.matrix_transpose(rows))
        return tf.reduce_sum(part**2, axis=-2)

    return tf.maximum(_either(by_samples, through_samples, through_features), 0.0)


def _either(
    by_samples: bool | tf.Tensor, yes: Callable[[], tf.Tensor], no: Callable[[], tf.Tensor]
) -> tf.Tensor:
    """Call one of two functions, in a graph where the choice is open."""
    if isinstance(by_samples, bool):
        return yes() if by_samples else no()
    return tf.cond(by_samples, yes, no)


# A dense layer that tasks adapt, with its change stored as coefficients of the tasks' support samples.
#
# For inputs :math:`X_s`, the gradient of a dense layer's kernel is :math:`X_s^\top D` and that of its bias
# :math:`1^\top D`, where D is the gradient of its outputs. So after any number of steps from W and b along
# such gradients, or sums of them,
#
# .. math:: W_t = W + X_s^\top A_t, \quad b_t = b + 1^\top A_t, \quad
#    X W_t + b_t = X W + b + (X X_s^\top + 1) A_t
#
# where the coefficients A have one row for each support sample. A step is :math:`A \leftarrow A - \alpha D`.
# This is the dual form of a linear layer that learns by gradient descent (Aizerman et al., 1964; Irie et al.,
# "The Dual Form of Neural Networks Revisited", ICML 2022, section 3).
#
# It is fast because it never computes the tasks' own kernels, (in, out) for each task, nor any product with
# them. :math:`X W + b` is one product for all samples of all tasks, without their padding, whatever the
# number of steps. Each step then needs only a product with a samples-by-samples matrix. If there are too many
# samples for that, :math:`X (X_s^\top A)` computes the same product in another order, at the cost of a step
# with the tasks' own weights.
#
# The dual form needs inputs that don't adapt, and an optimizer whose directions are sums of gradients: plain
# descent and momentum, not Adam.


class DualDense:
    """A dense layer that many tasks adapt at once.

    Args:
      samples: (samples, in) inputs of all samples of all tasks.
      kernel: (in, out), the kernel that all tasks start from.
      bias: (out,), the bias that all tasks start from.
      support: (tasks, support samples) int64: the indices of a task's support among the samples. For padding,
        any index will do: its coefficients stay 0 as long as no loss depends on its outputs.
      order: 2; or 1, which treats as constants all values that the steps compute from the inputs.
      steps: The number of steps that will be taken.

    Example:
      >>> layer = DualDense(tf.eye(2), tf.ones([2, 1]), tf.zeros([1]), tf.constant([[0], [1]]))
      >>> moved = layer.start() - 0.5
      >>> layer.outputs(tf.constant([[1], [1]]), moved).numpy().ravel().tolist()
      [0.5, 0.0]
    """

    def __init__(
        self,
        samples: tf.Tensor,
        kernel: tf.Tensor,
        bias: tf.Tensor,
        support: tf.Tensor,
        *,
        order: int = 2,
        steps: int = 1,
    ) -> None:
        self._samples, self._kernel, self._bias = samples, kernel, bias
        self._support, self._order, self._steps = support, order, steps
        # First order doesn't differentiate anything that is computed from the support's outputs.
        known = [tf.stop_gradient(each) if order == 1 else each for each in (samples, kernel, bias)]
        self._unadapted = tf.matmul(known[0], known[1]) + known[2]
        self._inputs = tf.gather(known[0], support)
        self._units = kernel.shape[-1]
        self._gram: tf.Tensor | None = None

    def start(self) -> tf.Tensor:
        """Return the coefficients before the first step, (tasks, support samples, out) zeros."""
        shape = tf.concat([tf.shape(self._support), [self._units]], axis=0)
        return tf.ensure_shape(tf.zeros(shape, self._samples.dtype), [*self._support.shape, self._units])

    def support_outputs(self, coefficients: tf.Tensor, step: int) -> tf.Tensor:
        """Compute the support's outputs after ``step`` steps, (tasks, support samples, out).

        The gradient of a loss with respect to these outputs is the direction in which the coefficients step.
        """
        outputs = tf.gather(self._unadapted, self._support)
        if step == 0:
            return outputs
        size, width = tf.shape(self._support)[1], self._inputs.shape[-1]
        uses = self._steps - 1
        few = size * (width + uses * self._units) < 2 * uses * width * self._units
        if self._gram is None:
            empty = tf.zeros([0, 0, 0], self._samples.dtype)
            self._gram = _either_dual(few, lambda: _gram(self._inputs, self._inputs), lambda: empty)
        gram = self._gram
        return outputs + _either_dual(
            few, lambda: tf.matmul(gram, coefficients), lambda: self._change(self._inputs, coefficients)
        )

    def outputs(self, index: tf.Tensor, coefficients: tf.Tensor) -> tf.Tensor:
        """Compute the outputs for other samples of the tasks.

        Args:
          index: (tasks, n) int64, their indices among the samples.
          coefficients: The coefficients after the steps.

        Returns:
          (tasks, n, out).
        """
        inputs = tf.gather(self._samples, index)
        size, width = tf.shape(self._support)[1], inputs.shape[-1]
        rows = tf.shape(index)[1]
        few = rows * size * (width + self._units) < (rows + size) * width * self._units
        return self._unadapted_at(index, inputs) + _either_dual(
            few,
            lambda: tf.matmul(_gram(inputs, self._inputs), coefficients),
            lambda: self._change(inputs, coefficients),
        )

    def _unadapted_at(self, index: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
        if self._order == 2:
            return tf.gather(self._unadapted, index)
        flat = tf.matmul(tf.reshape(inputs, [-1, inputs.shape[-1]]), self._kernel) + self._bias
        return tf.reshape(flat, tf.concat([tf.shape(index), [self._units]], axis=0))

    def _change(self, inputs: tf.Tensor, coefficients: tf.Tensor) -> tf.Tensor:
        """Compute what the coefficients add to the outputs, through the change of the weights."""
        kernel = tf.matmul(self._inputs, coefficients, transpose_a=True)
        return tf.matmul(inputs, kernel) + tf.reduce_sum(coefficients, axis=1, keepdims=True)


def _gram(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """Compute the inner products of samples; the bias counts as one more input, which is always 1."""
    return tf.matmul(left, right, transpose_b=True) + 1


def _either_dual(
    condition: tf.Tensor, yes: Callable[[], tf.Tensor], no: Callable[[], tf.Tensor]
) -> tf.Tensor:
    """Run `tf.cond`, or choose the branch at once if the condition is known statically."""
    known = tf.get_static_value(condition)
    if known is not None:
        return yes() if known else no()
    return tf.cond(condition, yes, no)

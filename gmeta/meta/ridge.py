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

"""How much each item of a set counts that was drawn without replacement, so that sums are unbiased."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError

# The integrand is smooth in y = log t, with features as wide as 1: the trapezoid rule at this step leaves
# errors below 1e-9.
_STEP, _FIRST, _LAST = 0.1, -36.0, 7.0


def set_weights(log_probs: Any) -> tf.Tensor:
    r"""Compute the weights with which a set drawn without replacement estimates an expectation.

    For items drawn one after another by their probabilities, each once, as Gumbel top-k draws them:

    .. math::
       \mathrm{E}\left[\sum_{s \in S} w_s f(s)\right] = \sum_i p_i f(i), \quad
       w_s = p_s \frac{P(S \setminus s \text{ without } s)}{P(S)}, \quad
       P(S) = \int_0^\infty e^{-t} \prod_{s \in S} (1 - e^{-a_s t})\, dt, \quad
       a_s = \frac{p_s}{1 - \sum_{S} p}

    P(S) is the probability of the set, in whichever order it was drawn. The mean over a set with equal
    weights would count improbable items too much: no item is drawn twice, however probable it is. A weight is
    between p_s and 1; for a set of one it is 1. Compute in float64.

    Args:
      log_probs: log p, (users, group), of distinct items in each row.

    Returns:
      float32 (users, group). No gradient goes through them.

    Raises:
      ConfigError: The shape is another.

    Example:
      >>> set_weights(tf.math.log([[0.5, 0.25]])).numpy().round(4)
      array([[0.6, 0.4]], dtype=float32)

    Reference: Kool et al., "Estimating Gradients for Discrete Random Variables by Sampling without
    Replacement" (ICLR 2020), section 4.
    """
    logs = tf.stop_gradient(tf.cast(log_probs, tf.float64))
    if logs.shape.rank != 2:
        raise ConfigError(f"set_weights: log_probs must be (users, group), got {logs.shape}")
    left = tf.maximum(-tf.math.expm1(tf.reduce_logsumexp(logs, axis=1, keepdims=True)), 1e-12)
    y = tf.constant(np.arange(_FIRST, _LAST, _STEP))
    rates = (logs - tf.math.log(left))[:, :, tf.newaxis] + y
    factors = tf.math.log(-tf.math.expm1(-tf.exp(rates)))  # (users, group, points)
    density = y - tf.exp(y) + tf.reduce_sum(factors, axis=1)
    whole = tf.reduce_logsumexp(density, axis=1, keepdims=True)
    rest = tf.reduce_logsumexp(density[:, tf.newaxis] - factors, axis=2)
    return tf.cast(tf.exp(logs + rest - whole), tf.float32)

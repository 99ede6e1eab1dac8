"""How far a policy is from its reference, estimated from the policy's own samples."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def k3_divergence(log_probs: Any, reference: Any) -> tf.Tensor:
    r"""Estimate KL(π || π_ref) for each sample.

    .. math:: k_3 = \frac{\pi_\mathrm{ref}}{\pi} - \log \frac{\pi_\mathrm{ref}}{\pi} - 1 \ge 0

    Its mean over samples of π is the divergence, with less variance than that of log π / π_ref.

    Args:
      log_probs: log π of samples, floats of any shape.
      reference: log π_ref of the same.

    Example:
      >>> float(k3_divergence(tf.math.log(0.5), tf.math.log(0.25)))  # 1/2 + log 2 - 1
      0.19314718246459961

    Reference: Schulman, "Approximating KL divergence" (2020), as in DeepSeekMath, equation 4.
    """
    difference = tf.convert_to_tensor(reference) - tf.convert_to_tensor(log_probs)
    return tf.math.expm1(difference) - difference

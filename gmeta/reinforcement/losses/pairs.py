"""A loss of policies that learn from which of two items is the better one."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.arguments import finite_number
from gmeta.core.errors import ConfigError
from gmeta.reinforcement.losses.ratios import check_alike


class PairLoss(NamedTuple):
    """The losses of users.

    Attributes:
      losses: float32 (users,), each the mean over the user's pairs; 0 without a pair.
      pairs: int32 (users,): how many pairs each has.
      right: float32 (users,): in which share of them the policy has moved towards the better item.
    """

    losses: tf.Tensor
    pairs: tf.Tensor
    right: tf.Tensor


def dpo(log_probs: Any, reference: Any, rewards: Any, *, beta: float = 0.1) -> PairLoss:
    r"""Compute the losses of direct preference optimization, over all pairs of a group.

    .. math::
       l_{ij} = -\log \sigma\left(\beta \left[
           \log \frac{\pi(i)}{\pi_\mathrm{ref}(i)} - \log \frac{\pi(j)}{\pi_\mathrm{ref}(j)}
       \right]\right), \quad r_i > r_j

    A group of two is DPO as published. Probabilities are those of items, the products of their digits'.

    Args:
      log_probs: log π, (users, group, L).
      reference: log π_ref, (users, group, L). No gradient goes there.
      rewards: (users, group); items of equal rewards make no pair.
      beta: β, above 0.

    Raises:
      ConfigError: β isn't above 0, or shapes differ.

    Example:
      >>> same = tf.math.log([[[0.5], [0.5]]])
      >>> dpo(same, same, [[1.0, 0.0]]).losses.numpy().round(4)  # log 2
      array([0.6931], dtype=float32)

    Reference: Rafailov et al., "Direct Preference Optimization" (NeurIPS 2023), equation 7.
    """
    if finite_number("dpo: beta", beta) <= 0:
        raise ConfigError(f"dpo: beta must be above 0, got {beta}")
    pi, anchor = check_alike("dpo", log_probs=log_probs, reference=reference)
    moved = tf.reduce_sum(pi - tf.stop_gradient(anchor), axis=-1)
    margins = beta * (moved[:, :, tf.newaxis] - moved[:, tf.newaxis])
    rewards = tf.cast(rewards, tf.float32)
    better = tf.cast(rewards[:, :, tf.newaxis] > rewards[:, tf.newaxis], tf.float32)
    pairs = tf.reduce_sum(better, axis=[1, 2])

    def mean(values: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(tf.reduce_sum(values * better, axis=[1, 2]), pairs)

    losses, right = mean(-tf.math.log_sigmoid(margins)), mean(tf.cast(margins > 0, tf.float32))
    return PairLoss(losses, tf.cast(pairs, tf.int32), right)

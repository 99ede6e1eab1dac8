"""Rewards by the item that a user took next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gmeta.core.arguments import finite_number
from gmeta.core.errors import ConfigError
from gmeta.reinforcement.rewards.checks import Batch, column_of


@dataclass(frozen=True)
class HitReward:
    """A reward of 1 for the item that came next, and 0 for any other.

    Attributes:
      next: The batch's column of next items, ids (users,).
      name: What messages call it.

    Example:
      >>> HitReward()({"next": [4, 5]}, tf.constant([[4, 9], [6, 9]])).numpy()
      array([[1., 0.],
             [0., 0.]], dtype=float32)
    """

    next: str = "next"
    name: str = "hit"

    def __call__(self, batch: Batch, items: tf.Tensor) -> tf.Tensor:
        """Compute the rewards of items, (users, group) ids: float32 (users, group)."""
        return tf.cast(_hits(self, batch, items), tf.float32)


@dataclass(frozen=True)
class RankAwareReward:
    r"""A reward of 1 for the item that came next, and a penalty for others that are ranked high.

    .. math:: r_{i} = \begin{cases} 1 & i \text{ came next} \\
       -\alpha\, \frac{1 / \log_2(i + 2)}{\sum_j 1 / \log_2(j + 2)} & \text{else, if the group has it} \\
       0 & \text{in a group without it} \end{cases}

    i is the place in the group, from 0 on. `gmeta.reinforcement.Rollouts` orders a group by the policy's
    probabilities, the likeliest first: so of the wrong items those hurt most that the policy believes in.

    Attributes:
      penalty: α, from 0 on.
      next: The batch's column of next items, ids (users,).
      name: What messages call it.

    Raises:
      ConfigError: The penalty is negative.

    Example:
      >>> RankAwareReward()({"next": [4]}, tf.constant([[9, 4]])).numpy().round(3)  # 1 / (1 + 0.63)
      array([[-0.613,  1.   ]], dtype=float32)

    Reference: Kong et al., "MiniOneRec" (arXiv 2510.24431), section 3.3.
    """

    penalty: float = 1.0
    next: str = "next"
    name: str = "rank_aware"

    def __post_init__(self) -> None:
        if finite_number("RankAwareReward: penalty", self.penalty) < 0:
            raise ConfigError(f"RankAwareReward: penalty must be 0 or more, got {self.penalty}")

    def __call__(self, batch: Batch, items: tf.Tensor) -> tf.Tensor:
        """Compute the rewards of items, (users, group) ids: float32 (users, group)."""
        hits = _hits(self, batch, items)
        places = tf.range(tf.shape(items)[1])
        discounts = tf.math.log(2.0) / tf.math.log(tf.cast(places + 2, tf.float32))
        wrong = -self.penalty * discounts / tf.reduce_sum(discounts)
        found = tf.reduce_any(hits, axis=1, keepdims=True)
        return tf.where(hits, 1.0, tf.where(found, wrong, 0.0))


def _hits(reward: Any, batch: Batch, items: tf.Tensor) -> tf.Tensor:
    following = column_of(reward.name, batch, reward.next)
    if following.shape.rank != 1:
        raise ConfigError(
            f"reward {reward.name}: {reward.next!r} must have one item a user, (users,), got shape "
            f"{following.shape}"
        )
    return tf.equal(items, tf.cast(following, items.dtype)[:, tf.newaxis])

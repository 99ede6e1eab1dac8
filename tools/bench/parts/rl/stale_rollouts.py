"""Rollouts of a policy that lags behind, and the resulting ratios and gradients."""

from __future__ import annotations

from typing import Any

from gmeta.models import GenerativeRetriever
from gmeta.reinforcement import GRPO, PolicyTraining
from gmeta.reinforcement.policy_training import Judged
from gmeta.reinforcement.rewards import Reward
from gmeta.reinforcement.rollouts import Rollout

import tensorflow as tf


class Watched:
    """An objective that remembers the largest ratio π / π_old, over all items.

    Args:
      objective: The objective.
    """

    def __init__(self, objective: GRPO) -> None:
        self.objective, self.reports = objective, objective.reports
        self.ratio = tf.Variable(0.0, trainable=False)

    def __call__(self, rollout: Rollout, log_probs: tf.Tensor) -> Judged:
        """Compute the losses as the objective does."""
        judged = self.objective(rollout, log_probs)
        self.ratio.assign(tf.maximum(self.ratio, tf.reduce_max(judged.logs["ratio_max"])))
        return judged


class StaleTraining(PolicyTraining):
    """Training on draws of the policy of some batches ago, as from workers that lag behind.

    Args:
      policy: The policy.
      reward: The reward.
      objective: The objective.
      **settings: Arguments of `PolicyTraining`.

    Attributes:
      norm: The largest norm of the gradient so far.
    """

    def __init__(self, policy: GenerativeRetriever, reward: Reward, objective: GRPO, **settings: Any) -> None:
        super().__init__(policy, reward, objective=Watched(objective), **settings)
        behind = policy.copy_dense("behind")
        self._behind = lambda: behind  # in a closure, so that it isn't trained too
        self.norm = tf.Variable(0.0, trainable=False)

    def catch_up(self) -> None:
        """Make the policy that draws equal to the one that is trained."""
        pairs = zip(self.policy.trainable_variables, self._behind().trainable_variables, strict=True)
        for own, other in pairs:
            other.assign(own)

    def forget(self) -> None:
        """Reset the largest ratio and norm."""
        self.objective.ratio.assign(0.0)
        self.norm.assign(0.0)

    def roll_out(self, x: Any) -> Rollout:
        """Draw and reward groups, by the policy that lags."""
        return self.rollouts.draw(
            self._behind(),
            x,
            self._reward(),
            step=self.step_number // self.updates_each,
            reference=self.reference,
            user=self.user,
        )

    def compute_gradients(self, data: Any) -> Any:
        """Compute the gradients of a step, and record their norm."""
        found = super().compute_gradients(data)
        self.norm.assign(tf.maximum(self.norm, tf.linalg.global_norm(found.dense)))
        return found

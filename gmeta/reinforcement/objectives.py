"""Objectives of policy training: the settings of each method, and its loss for each user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.errors import ConfigError, finite_number
from gmeta.reinforcement.losses import (
    Baseline,
    Per,
    PolicyLoss,
    Scale,
    check_names,
    check_numbers,
    dpo,
    ecpo,
    group_advantages,
    grpo,
    k3_divergence,
)
from gmeta.reinforcement.rollouts import Rollout


class Judged(NamedTuple):
    """The losses of a batch of groups.

    Attributes:
      losses: float32 (users,).
      logs: Name -> float32 (users,), reported as a mean over users.
    """

    losses: tf.Tensor
    logs: dict[str, tf.Tensor]


@dataclass(frozen=True)
class GRPO:
    """Group-relative policy optimization (`gmeta.reinforcement.losses.grpo`).

    Attributes:
      clip: ε.
      clip_high: ε_high; None: ε.
      kl: β, the weight of the divergence from the reference; 0: none.
      per: Whether ratios and divergence are of the ``"item"`` or of each ``"digit"``.
      baseline: Of `gmeta.reinforcement.losses.group_advantages`.
      scale: Of the same.

    Raises:
      ConfigError: A number is out of its limits, or a name is unknown.
    """

    clip: float = 0.2
    clip_high: float | None = None
    kl: float = 0.02
    per: Per = "item"
    baseline: Baseline = "mean"
    scale: Scale = "std"

    def __post_init__(self) -> None:
        high = self.clip if self.clip_high is None else self.clip_high
        check_numbers(type(self).__name__, clip=self.clip, clip_high=high, kl=self.kl, per=self.per)
        check_names(type(self).__name__, baseline=self.baseline, scale=self.scale)

    @property
    def reports(self) -> tuple[str, ...]:
        """The names of the logs, where rollouts have the reference's probabilities."""
        return "kl", "tied", "clipped", "ratio_max"

    def __call__(self, rollout: Rollout, log_probs: tf.Tensor) -> Judged:
        """Compute the losses of users, from log π of the rollout's items, (users, group, L)."""
        weights = rollout.weights
        advantages = group_advantages(
            rollout.rewards, baseline=self.baseline, scale=self.scale, weights=weights
        ).values
        found = self._losses(rollout, log_probs, advantages)
        tied = tf.reduce_all(tf.equal(advantages, 0), axis=1)
        logs = {
            "clipped": tf.reduce_mean(found.clipped, axis=1),
            "ratio_max": tf.reduce_max(found.ratio, axis=1),
            "tied": tf.cast(tied, tf.float32),
        }
        if rollout.reference is not None:
            logs["kl"] = tf.reduce_sum(weights * found.divergence, axis=1)
        return Judged(tf.reduce_sum(weights * found.losses, axis=1), logs)

    def _losses(self, rollout: Rollout, log_probs: tf.Tensor, advantages: tf.Tensor) -> PolicyLoss:
        return grpo(log_probs, rollout.log_probs, advantages, rollout.reference, **self._settings)

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("clip", "clip_high", "kl", "per")}


@dataclass(frozen=True)
class ECPO(GRPO):
    """Early-clipped GRPO (`gmeta.reinforcement.losses.ecpo`).

    OneRec uses no divergence, and adds a loss on logged items: ``PolicyTraining(..., sft=...)``.

    Attributes:
      delta: δ, above 0; the others are those of `GRPO`.

    Raises:
      ConfigError: A number is out of its limits.
    """

    delta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if finite_number("ECPO: delta", self.delta) <= 0:
            raise ConfigError(f"ECPO: delta must be above 0, got {self.delta}")

    def _losses(self, rollout: Rollout, log_probs: tf.Tensor, advantages: tf.Tensor) -> PolicyLoss:
        settings = {**self._settings, "delta": self.delta}
        return ecpo(log_probs, rollout.log_probs, advantages, rollout.reference, **settings)


@dataclass(frozen=True)
class DPO:
    """Direct preference optimization over the pairs of a group (`gmeta.reinforcement.losses.dpo`).

    Attributes:
      beta: β, above 0.

    Raises:
      ConfigError: β isn't above 0.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        if finite_number("DPO: beta", self.beta) <= 0:
            raise ConfigError(f"DPO: beta must be above 0, got {self.beta}")

    @property
    def reports(self) -> tuple[str, ...]:
        """The names of the logs."""
        return "kl", "tied", "right"

    def __call__(self, rollout: Rollout, log_probs: tf.Tensor) -> Judged:
        """Compute the losses of users, from log π of the rollout's items, (users, group, L)."""
        found = dpo(log_probs, rollout.reference, rollout.rewards, beta=self.beta)
        divergence = k3_divergence(
            tf.reduce_sum(log_probs, axis=-1), tf.reduce_sum(rollout.reference, axis=-1)
        )
        logs = {
            "kl": tf.reduce_sum(rollout.weights * divergence, axis=1),
            "right": found.right,
            "tied": tf.cast(tf.equal(found.pairs, 0), tf.float32),
        }
        return Judged(found.losses, logs)

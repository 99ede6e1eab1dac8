"""Training of a policy by rewards, as a Keras model around it, and the objectives of this training.

An objective has the settings of a method, and computes its loss for each user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, finite_number, whole_number
from gmeta.core.keras import submodules
from gmeta.losses.multi_task import mean_loss
from gmeta.models import Model
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
from gmeta.reinforcement.rewards import Reward, rewards_of
from gmeta.reinforcement.rollouts import Rollout, Rollouts, only
from gmeta.training.compile_settings import only_columns
from gmeta.training.rank_steps import rank_step


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


_METHODS = ("sample", "digit_log_probs", "retrieve", "copy_dense")


class PolicyTraining(Model):
    r"""A model that trains a policy by the rewards of what it draws.

    Each batch is one rollout and some updates of it:

    .. math::
       i_1 \dots i_G \sim \pi_\mathrm{old}(\cdot \mid u), \quad r_g = R(u, i_g), \quad
       L = \frac{1}{n} \sum_u \Big[ l_u(\pi; \pi_\mathrm{old}, \pi_\mathrm{ref}, r)
           - \lambda \log \pi(\mathrm{next}_u \mid u) \Big]

    π_old is the policy before the first update of the batch; its probabilities are kept, but not its weights.
    π_ref is the policy at the time when this model was created: a copy of its dense weights, which isn't
    trained. The tables of users and items are frozen: policy, old policy and reference read the same ones
    without copies. No dropout is applied, neither in drawing nor in learning, so the ratio of a first update
    is 1.

    The means are over the users of all ranks, so N ranks learn as one would; rollouts are a function of the
    seed, the step and the user. All state is in the weights and the optimizer: a checkpoint of this model
    (`gmeta.checkpoint.ShardedCheckpoint`, ``save_weights``) holds all of it, and a resumed run continues like
    an uninterrupted one. `fit` reports ``reward``, the mean over the drawn items; ``kl``, the estimated
    divergence from the reference; ``tied``, the share of users whose group has no spread; and metrics of the
    objective. `evaluate` reports ``reward@k`` of the k likeliest items, which `retrieve` finds.

    Args:
      policy: The policy, trained before, such as a `gmeta.models.GenerativeRetriever`.
      reward: A callable on a batch and ids (users, group) that returns numbers (users, group); see
        `gmeta.reinforcement.rewards`.
      objective: `GRPO`, `ECPO` or `DPO`; None: ``GRPO()``.
      rollouts: How groups are drawn; None: ``Rollouts()``.
      updates: The number of updates per rollout.
      sft: λ, the weight of the loss on the items that users chose next, from 0 on.
      next: The batch's column of these items, ids (users,); read only if ``sft`` is above 0.
      user: The batch's column of users' ids, by which users draw and errors name them. None: they draw by
        their histories, and are named by their place.
      k: How many items `evaluate` rewards.
      beam: The beams of its search; None: the policy's.
      allow: bool (V,), which items of the policy's catalogue are allowed, in its order, such as by business
        rules: others are neither drawn nor retrieved, and probabilities are normalised over the allowed
        items. ``sft`` doesn't learn a next item that isn't allowed. None: all.

    Raises:
      ConfigError: The policy lacks a method, a setting is out of its limits, or a mask allows fewer items
        than are to be drawn or retrieved.

    Example:
      ::

        training = PolicyTraining(retriever, HitReward(), objective=ECPO(kl=0.0), sft=0.1)
        training.compile(tf.keras.optimizers.Adam(1e-4))
        training.fit(data, epochs=2)  # data: batches with a column "next"
        retriever.retrieve(batch, k=10)

    References:
      Shao et al., "DeepSeekMath" (arXiv 2402.03300), algorithm 1. Zhou et al., "OneRec Technical Report"
      (arXiv 2506.13695), section 4.3.
    """

    refused_settings: ClassVar[Mapping[str, str]] = {
        **Model.refused_settings,
        "loss": "the loss is that of objective=",
        "metrics": "rewards, divergence and what the objective reports are measured",
        "loss_weights": "there is one loss; sft= and the objective's kl= weigh its parts",
        "weighted_metrics": "users have no weights",
        "pipeline": "what a step looks up is known only once its items are drawn",
    }

    def __init__(
        self,
        policy: Any,
        reward: Reward,
        *,
        objective: GRPO | DPO | None = None,
        rollouts: Rollouts | None = None,
        updates: int = 1,
        sft: float = 0.0,
        next: str = "next",
        user: str | None = None,
        k: int = 10,
        beam: int | None = None,
        allow: Any = None,
        name: str = "policy_training",
    ) -> None:
        super().__init__(name=name)
        if lacks := [each for each in _METHODS if not hasattr(policy, each)]:
            raise ConfigError(
                f"{name}: a policy draws items and knows their probabilities, and {type(policy).__name__} "
                f"lacks {', '.join(lacks)}: give a gmeta.models.GenerativeRetriever, or define these"
            )
        if not callable(reward):
            raise ConfigError(f"{name}: reward must be a callable on (batch, items), got {reward!r}")
        self.policy: Any = policy
        # In a closure, because a Keras model in an attribute would be trained too.
        self._reward: Callable[[], Reward] = lambda: reward
        self.objective, self.rollouts = objective or GRPO(), rollouts or Rollouts()
        self.updates_each = whole_number(f"{name}: updates", updates, 1)
        self.sft, self.next, self.user = finite_number(f"{name}: sft", sft), next, user
        if sft < 0:
            raise ConfigError(f"{name}: sft must be 0 or more, got {sft}")
        self.k, self.beam = whole_number(f"{name}: k", k, 1), beam
        distinct = 1 if self.rollouts.sampling == "sample" else self.rollouts.group
        self.allow = None if allow is None else _mask(name, allow, max(self.k, distinct))
        self.reference: Any = _frozen_copy(policy)
        names = ("loss", "reward", *self.objective.reports, *(("sft_loss",) if sft else ()))
        self.means = {each: tf.keras.metrics.Mean(name=each) for each in names}
        self.rewarded = tf.keras.metrics.Mean(name=f"reward@{k}")
        self.built = True

    def compile(
        self, optimizer: Any = "rmsprop", *args: Any, accumulate_steps: int = 1, **kwargs: Any
    ) -> None:
        """Compile as `gmeta.models.Model.compile` does, but with the loss of the objective.

        Args:
          optimizer: As in Keras.
          *args: As in Keras; neither a loss nor metrics.
          accumulate_steps: As for `gmeta.models.Model.compile`; 1 if there are several updates of a rollout.
          **kwargs: As for `gmeta.models.Model.compile`; no pipeline.

        Raises:
          ConfigError: A loss, metrics, weights or a pipeline are given, or a rollout's updates would be
            accumulated; or as `gmeta.models.Model.compile`.
        """
        if accumulate_steps > 1 and self.updates_each > 1:
            raise ConfigError(
                f"{self.name}: accumulate_steps={accumulate_steps} would make one step of the "
                f"{self.updates_each} updates of a rollout, which then were all the same: leave one at 1"
            )
        super().compile(optimizer, *args, accumulate_steps=accumulate_steps, **kwargs)

    def call(self, x: Mapping[str, Any], training: bool | None = None) -> Any:
        """Compute what the policy does."""
        return self.policy(x, training=training)

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Draw and reward a group for each user of a batch, and make the updates."""
        x = {**only_columns(self.name, data)}
        x.update(self.roll_out(x).columns())
        step = super().train_step
        if self.updates_each == 1:
            return step(x)

        def update(done: tf.Tensor) -> list[tf.Tensor]:
            step(x)
            return [done + 1]

        # A loop, as each update that is traced by itself takes as long to trace as the first.
        start = [tf.constant(0)]
        tf.while_loop(lambda done: done < self.updates_each, update, start, parallel_iterations=1)
        return {name: mean.result() for name, mean in self.means.items()}

    def roll_out(self, x: Mapping[str, Any]) -> Rollout:
        """Draw and reward groups as the step at hand does."""
        return self.rollouts.draw(
            self.policy,
            x,
            self._reward(),
            step=self.step_number // self.updates_each,
            reference=self.reference,
            user=self.user,
            allow=self.allow,
        )

    def learn(self, data: Any) -> tuple[tf.Tensor, tf.Tensor, Callable[[], dict[str, tf.Tensor]]]:
        """Compute the mean loss of the batch's rollout, and the number of users."""
        rollout = Rollout.of_columns(data)
        items = rollout.items
        if self.sft:
            items = tf.concat([items, self._following(data, items)], axis=1)
        found = self.policy.digit_log_probs(data, items, **only(self.allow))
        judged = self.objective(rollout, found[:, : rollout.items.shape[1]])
        losses, values = judged.losses, dict(judged.logs)
        if self.sft:
            logs = tf.reduce_sum(found[:, -1], axis=-1)
            if self.allow is not None:  # nothing is learned of an item that isn't allowed
                logs = tf.where(tf.equal(logs, -np.inf), 0.0, logs)
            values["sft_loss"] = -logs
            losses += self.sft * values["sft_loss"]
        loss, users = mean_loss(losses), tf.size(losses)
        values |= {"loss": losses, "reward": tf.reduce_sum(rollout.weights * rollout.rewards, axis=1)}

        def measure() -> dict[str, tf.Tensor]:
            for name, mean in self.means.items():
                mean.update_state(values[name])
            return {name: mean.result() for name, mean in self.means.items()}

        return loss, users, measure

    def _following(self, x: Mapping[str, Any], items: tf.Tensor) -> tf.Tensor:
        if self.next not in x:
            raise ConfigError(
                f"{self.name}: sft={self.sft} learns {self.next!r}, which the batch lacks; it has "
                f"{', '.join(name for name in x if '/' not in name)}: add the column, or leave sft out"
            )
        return tf.cast(x[self.next], items.dtype)[:, tf.newaxis]

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Reward the likeliest items of each user of a batch."""
        x = only_columns(self.name, data)
        with rank_step(self, data) as step:
            items, _ = self.policy.retrieve(x, self.k, beam=self.beam, **only(self.allow))
            rewards = rewards_of(self._reward(), x, tf.ensure_shape(items, [None, self.k]), user=self.user)
            self.rewarded.update_state(tf.reduce_mean(rewards, axis=1))
            return step.end_forward({self.rewarded.name: self.rewarded.result()})

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """What training and evaluation report, reset at each epoch."""
        return [*self.means.values(), self.rewarded]

    def get_config(self) -> dict[str, Any]:
        """Refuse: rewards are code. Save the policy, or this model's weights.

        Raises:
          ConfigError: Always.
        """
        raise ConfigError(
            f"{self.name}: a reward is code, which no file can hold: save the policy (`policy.save`), or the "
            "state of training (`save_weights`, gmeta.checkpoint.ShardedCheckpoint)"
        )


def _mask(name: str, allow: Any, least: int) -> NDArray[np.bool_]:
    mask = np.asarray(allow)
    if mask.ndim != 1 or mask.dtype != np.bool_:
        raise ConfigError(
            f"{name}: allow must be bool (V,), one for each item of the catalogue, got {mask.dtype} "
            f"{mask.shape}"
        )
    if mask.sum() < least:
        raise ConfigError(
            f"{name}: allow permits {mask.sum()} items, but {least} are to be drawn or retrieved: "
            "allow more, or make the group and k smaller"
        )
    return mask


def _frozen_copy(policy: Any) -> Any:
    """Copy the dense weights, not to be trained; what both share stays trainable elsewhere as it was."""
    layers = [part for part in submodules(policy) if isinstance(part, tf.keras.layers.Layer)]
    before = [layer.trainable for layer in layers]
    copy = policy.copy_dense(f"{policy.name}_reference")
    copy.trainable = False
    for layer, was in zip(layers, before, strict=True):
        if layer.trainable != was:
            layer.trainable = was
    return copy

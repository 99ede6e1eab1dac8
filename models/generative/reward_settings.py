"""What a trained retriever learns on with by rewards: users and the items they took next, and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2

# isort: split
import tensorflow as tf
from histories import Histories

from gmeta.core.errors import ConfigError
from gmeta.models import GenerativeRetriever
from gmeta.reinforcement import ECPO, GRPO, PolicyTraining, Rollouts
from gmeta.reinforcement.rewards import HitReward, RankAwareReward

REWARDS = {"hit": HitReward, "rank": RankAwareReward}
OBJECTIVES = {"ecpo": ECPO, "grpo": GRPO}


@dataclass(frozen=True)
class RewardSettings:
    """Of rewards and of training by them."""

    reward: str = "hit"  # or rank
    objective: str = "ecpo"  # or grpo
    sampling: str = "beam"  # or sample, without_replacement
    group: int = 16
    updates: int = 1
    kl: float = 0.0
    sft: float = 0.1
    targets: int = 1  # how many items at the end of each training history are to be drawn, each a row
    reward_batch: int = 256
    reward_rate: float = 1e-4
    reward_minutes: float = 8.0  # of training, measures left out; "more SFT" gets as many
    reward_every: int = 0  # steps between measures; 0: a pass over the users


def next_items(train: Histories, targets: int) -> Mapping[str, Any]:
    """Cut training histories before each of their last items, but not before a first one.

    Args:
      train: Histories without what validation and test tell.
      targets: How many items of each history.

    Returns:
      ``item``: the histories so far, ``next``: the items that came then, ``user``: row numbers.
    """
    parts = []
    for last in range(1, targets + 1):
        long = tf.where(train["item"].row_lengths() > last)[:, 0]
        rows = tf.gather(train["item"], long)
        parts.append((rows[:, :-last], tf.gather(rows.values, rows.row_limits() - last), long))
    columns = zip(("item", "next", "user"), map(list, zip(*parts, strict=True)), strict=True)
    return {name: tf.concat(column, axis=0) for name, column in columns}


def make_training(policy: GenerativeRetriever, settings: RewardSettings, seed: int) -> PolicyTraining:
    """Training of a policy by rewards, compiled.

    Raises:
      ConfigError: There is no such reward or objective, or a number is out of its limits.
    """
    s = settings
    for what, name, known in (("reward", s.reward, REWARDS), ("objective", s.objective, OBJECTIVES)):
        if name not in known:
            raise ConfigError(f"{what} must be {' or '.join(known)}, got {name!r}")
    training = PolicyTraining(
        policy,
        REWARDS[s.reward](),
        objective=OBJECTIVES[s.objective](kl=s.kl),
        rollouts=Rollouts(s.group, s.sampling, seed, weights="equal"),
        updates=s.updates,
        sft=s.sft,
        user="user",
    )
    training.compile(tf.keras.optimizers.Adam(s.reward_rate))
    return training

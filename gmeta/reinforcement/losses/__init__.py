"""Losses of policies over groups of sampled items: pure functions of log-probabilities and rewards."""

from gmeta.reinforcement.losses.advantages import GroupAdvantages, group_advantages
from gmeta.reinforcement.losses.divergence import k3_divergence
from gmeta.reinforcement.losses.drawn_sets import set_weights
from gmeta.reinforcement.losses.pairs import PairLoss, dpo
from gmeta.reinforcement.losses.ratios import PolicyLoss, ecpo, grpo

__all__ = [
    "GroupAdvantages",
    "PairLoss",
    "PolicyLoss",
    "dpo",
    "ecpo",
    "group_advantages",
    "grpo",
    "k3_divergence",
    "set_weights",
]

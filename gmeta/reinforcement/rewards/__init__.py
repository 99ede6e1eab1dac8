"""Rewards: callables that take a batch and items, (users, group), and say how good each item is."""

from gmeta.reinforcement.rewards.checks import Reward, rewards_of
from gmeta.reinforcement.rewards.next_item import HitReward, RankAwareReward
from gmeta.reinforcement.rewards.of_model import ModelReward
from gmeta.reinforcement.rewards.of_simulator import SimulatorReward

__all__ = ["HitReward", "ModelReward", "RankAwareReward", "Reward", "SimulatorReward", "rewards_of"]

"""Training of policies by rewards: rollouts, rewards, losses, and a Keras model that trains by them."""

from gmeta.reinforcement import losses as losses
from gmeta.reinforcement import rewards as rewards
from gmeta.reinforcement.objectives import DPO, ECPO, GRPO, Judged
from gmeta.reinforcement.policy_training import PolicyTraining
from gmeta.reinforcement.rewards import HitReward, ModelReward, RankAwareReward, Reward, SimulatorReward
from gmeta.reinforcement.rollouts import Policy, Rollout, Rollouts

__all__ = [
    "DPO",
    "ECPO",
    "GRPO",
    "HitReward",
    "Judged",
    "ModelReward",
    "Policy",
    "PolicyTraining",
    "RankAwareReward",
    "Reward",
    "Rollout",
    "Rollouts",
    "SimulatorReward",
    "losses",
    "rewards",
]

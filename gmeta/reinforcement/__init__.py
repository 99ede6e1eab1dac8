"""Training of policies by rewards.

- `rollouts` draws groups of items, and `rewards` scores them.
- `losses` are functions of log-probabilities and rewards; `objectives` are the settings of each method.
- `policy_training` is the Keras model that trains a policy.
"""

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

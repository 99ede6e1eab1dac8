"""Training of policies by rewards.

- `rollouts` draws groups of items, and `rewards` scores them.
- `losses` are functions of log-probabilities and rewards.
- `policy_training` has the Keras model that trains a policy, and the settings of each method.
"""

from gmeta.core.imports import load_lazily
from gmeta.reinforcement import rewards as rewards
from gmeta.reinforcement.policy_training import DPO, ECPO, GRPO, PolicyTraining
from gmeta.reinforcement.rollouts import Rollouts

_MOVED = {
    "HitReward": "gmeta.reinforcement.rewards",
    "Judged": "gmeta.reinforcement.policy_training",
    "ModelReward": "gmeta.reinforcement.rewards",
    "Policy": "gmeta.reinforcement.rollouts",
    "RankAwareReward": "gmeta.reinforcement.rewards",
    "Reward": "gmeta.reinforcement.rewards",
    "Rollout": "gmeta.reinforcement.rollouts",
    "SimulatorReward": "gmeta.reinforcement.rewards",
}
"""Old name -> the module that has it now, for one release."""

__all__ = ["DPO", "ECPO", "GRPO", "PolicyTraining", "Rollouts", "rewards"]

__getattr__, __dir__ = load_lazily(__name__, {}, _MOVED)

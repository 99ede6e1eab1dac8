"""Simulated users: a law of clicks, states that move, and what a log would have of them."""

from gmeta.preprocess.synthetic.simulator.simulator_config import SimulatorConfig
from gmeta.preprocess.synthetic.simulator.user_histories import UserHistories
from gmeta.preprocess.synthetic.simulator.user_simulator import UserSimulator
from gmeta.preprocess.synthetic.simulator.user_states import UserStates

__all__ = ["SimulatorConfig", "UserHistories", "UserSimulator", "UserStates"]

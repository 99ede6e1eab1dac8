"""A reward that is true: the click probability of a simulated user."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph.conditions import refuse_unless
from gmeta.preprocess import UserSimulator, UserStates
from gmeta.reinforcement.rewards.checks import Batch, column_of


class SimulatorReward:
    """A reward that is the true probability that a user clicks on an item, in the state that the user is in.

    A group's items are alternatives: none is shown in truth, and no state moves.

    Args:
      simulator: The simulator.
      states: The states of all users that batches may have, such as those after their histories.
      user: The batch's column of users' numbers, (users,).
      clicks: Whether the reward is a click, 0 or 1, drawn by the probability: what one showing would tell.
        The draw is a function of the user, the user's step and the item, so it is the same each time.
      name: What messages call it.

    Example:
      >>> from gmeta.preprocess import UserSimulator
      >>> simulator = UserSimulator()
      >>> reward = SimulatorReward(simulator, simulator.histories(np.arange(50)).states)
      >>> reward({"user": [3, 7]}, tf.constant([[0, 1, 2], [5, 6, 7]], tf.int64)).shape
      TensorShape([2, 3])
    """

    def __init__(
        self,
        simulator: UserSimulator,
        states: UserStates,
        *,
        user: str = "user",
        clicks: bool = False,
        name: str = "simulator",
    ) -> None:
        if not len(states):
            raise ConfigError(f"reward {name}: there are no states: give those of the users to be rewarded")
        self.simulator, self.user, self.clicks, self.name = simulator, user, clicks, name
        self.states = states.take(np.argsort(states.users, kind="stable"))
        with tf.device("CPU:0"):
            self._users = tf.constant(self.states.users)

    def __call__(self, batch: Batch, items: tf.Tensor) -> tf.Tensor:
        """Compute the rewards of items, places in the catalogue (users, group): float32 (users, group).

        Raises:
          ConfigError: The batch lacks the users, or has one without a state.
        """
        users = tf.cast(column_of(self.name, batch, self.user), tf.int64)
        rows = tf.minimum(tf.searchsorted(self._users, users), len(self.states) - 1)
        known = tf.gather(self._users, rows) == users
        strange = tf.argmin(tf.cast(tf.concat([known, [False]], axis=0), tf.int32))
        told = tf.strings.join(
            [
                f"reward {self.name}: user ",
                tf.strings.as_string(tf.concat([users, [0]], axis=0)[strange]),
                f" has no state; there are {len(self.states)}: give states= of all users of the batches",
            ]
        )
        rows = refuse_unless(rows, known, told)
        size = self.simulator.config.world.items
        places = refuse_unless(
            tf.cast(items, tf.int64),
            (items >= 0) & (items < size),
            f"reward {self.name}: items must be places from 0 to {size - 1}, as the simulator has them",
        )
        found = tf.numpy_function(self._true, [rows, places], tf.float32, stateful=False)
        return tf.ensure_shape(found, items.shape)

    def _true(self, rows: Any, items: Any) -> Any:
        states = self.states.take(rows)
        if self.clicks:
            return self.simulator.would_click(states, items).astype(np.float32)
        return self.simulator.click_probability(states, items).astype(np.float32)

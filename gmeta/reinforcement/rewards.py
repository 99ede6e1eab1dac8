"""Rewards: callables that take a batch and items, (users, group), and say how good each item is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError, finite_number
from gmeta.core.graph import refuse_unless
from gmeta.models import GRM
from gmeta.ops import jagged
from gmeta.preprocess.synthetic.user_law import UserStates
from gmeta.preprocess.synthetic.user_simulator import UserSimulator

# Checks what a reward returns, so that one bad number doesn't become a bad policy.

Batch = Mapping[str, Any]
Reward = Callable[[Batch, tf.Tensor], Any]
"""Takes a batch and ids of items, (users, group); returns numbers, (users, group)."""


def name_of(reward: Reward) -> str:
    """Return what messages call a reward: its ``name``, or that of its function or class."""
    name = getattr(reward, "name", None) or getattr(reward, "__name__", None)
    return str(name or type(reward).__name__)


def rewards_of(reward: Reward, batch: Batch, items: tf.Tensor, *, user: str | None = None) -> tf.Tensor:
    """Compute rewards, and refuse those that can't be used.

    Args:
      reward: The reward.
      batch: A batch of columns, one row per user.
      items: (users, group) ids.
      user: The column of users' ids, by which messages name a user; None: a user is named by its place.

    Returns:
      float32 (users, group), without gradient.

    Raises:
      ConfigError: The rewards have another shape, or one is NaN or infinite; the message names the reward and
        the user (in a graph, if it runs within `gmeta.core.graph.name_refusals`).
    """
    name = name_of(reward)
    found = tf.cast(tf.convert_to_tensor(reward(batch, items)), tf.float32)
    if not found.shape.is_compatible_with(items.shape):
        raise ConfigError(
            f"reward {name}: rewards must be {items.shape}, one for each item of each user, got {found.shape}"
        )
    sizes = tf.shape(found), tf.shape(items)
    alike = tf.equal(tf.size(sizes[0]), 2)
    alike = tf.cond(alike, lambda: tf.reduce_all(tf.equal(*sizes)), lambda: tf.constant(False))
    told = tf.strings.join(
        [
            f"reward {name}: rewards must be one for each item of each user, ",
            tf.strings.format("{}, got {}", [sizes[1], sizes[0]]),
        ]
    )
    found = tf.cond(alike, lambda: found, lambda: tf.zeros_like(items, tf.float32))
    found = refuse_unless(tf.ensure_shape(found, items.shape), alike, told)
    good = tf.math.is_finite(found)
    rows = tf.concat([tf.reduce_all(good, axis=1), [False]], axis=0)
    row = tf.argmin(tf.cast(rows, tf.int32))  # the number of users, if every one is good
    column = None if user is None else batch[user]
    users = tf.range(tf.shape(items)[0]) if column is None else tf.convert_to_tensor(column)
    texts = users if users.dtype == tf.string else tf.strings.as_string(users)
    values = tf.concat([found, tf.zeros([1, tf.shape(found)[1]])], axis=0)[row]
    told = tf.strings.join(
        [
            f"reward {name}: the rewards of user ",
            tf.concat([texts, [""]], axis=0)[row],
            "" if user is not None else " of the batch",
            " are not finite: ",
            tf.strings.reduce_join(tf.strings.as_string(values), separator=", "),
            "; let it give every item a number",
        ]
    )
    return tf.stop_gradient(refuse_unless(found, good, told))


def column_of(name: str, batch: Batch, column: str) -> tf.Tensor:
    """Return a column of a batch that a reward needs.

    Raises:
      ConfigError: It isn't there.
    """
    if column not in batch:
        raise ConfigError(
            f"reward {name}: the batch lacks {column!r}, it has {', '.join(map(str, batch))}: add the column"
        )
    return tf.convert_to_tensor(batch[column])


# Rewards by the item that a user took next.


@dataclass(frozen=True)
class HitReward:
    """A reward of 1 for the item that came next, and 0 for any other.

    Attributes:
      next: The batch's column of next items, ids (users,).
      name: What messages call it.

    Example:
      >>> HitReward()({"next": [4, 5]}, tf.constant([[4, 9], [6, 9]])).numpy()
      array([[1., 0.],
             [0., 0.]], dtype=float32)
    """

    next: str = "next"
    name: str = "hit"

    def __call__(self, batch: Batch, items: tf.Tensor) -> tf.Tensor:
        """Compute the rewards of items, (users, group) ids: float32 (users, group)."""
        return tf.cast(_hits(self, batch, items), tf.float32)


@dataclass(frozen=True)
class RankAwareReward:
    r"""A reward of 1 for the item that came next, and a penalty for others that are ranked high.

    .. math:: r_{i} = \begin{cases} 1 & i \text{ came next} \\
       -\alpha\, \frac{1 / \log_2(i + 2)}{\sum_j 1 / \log_2(j + 2)} & \text{else, if the group has it} \\
       0 & \text{in a group without it} \end{cases}

    i is the place in the group, from 0 on. `gmeta.reinforcement.Rollouts` orders a group by the policy's
    probabilities, the likeliest first: so of the wrong items those hurt most that the policy believes in.

    Attributes:
      penalty: α, from 0 on.
      next: The batch's column of next items, ids (users,).
      name: What messages call it.

    Raises:
      ConfigError: The penalty is negative.

    Example:
      >>> RankAwareReward()({"next": [4]}, tf.constant([[9, 4]])).numpy().round(3)  # 1 / (1 + 0.63)
      array([[-0.613,  1.   ]], dtype=float32)

    Reference: Kong et al., "MiniOneRec" (arXiv 2510.24431), section 3.3.
    """

    penalty: float = 1.0
    next: str = "next"
    name: str = "rank_aware"

    def __post_init__(self) -> None:
        if finite_number("RankAwareReward: penalty", self.penalty) < 0:
            raise ConfigError(f"RankAwareReward: penalty must be 0 or more, got {self.penalty}")

    def __call__(self, batch: Batch, items: tf.Tensor) -> tf.Tensor:
        """Compute the rewards of items, (users, group) ids: float32 (users, group)."""
        hits = _hits(self, batch, items)
        places = tf.range(tf.shape(items)[1])
        discounts = tf.math.log(2.0) / tf.math.log(tf.cast(places + 2, tf.float32))
        wrong = -self.penalty * discounts / tf.reduce_sum(discounts)
        found = tf.reduce_any(hits, axis=1, keepdims=True)
        return tf.where(hits, 1.0, tf.where(found, wrong, 0.0))


def _hits(reward: Any, batch: Batch, items: tf.Tensor) -> tf.Tensor:
    following = column_of(reward.name, batch, reward.next)
    if following.shape.rank != 1:
        raise ConfigError(
            f"reward {reward.name}: {reward.next!r} must have one item per user, (users,), got shape "
            f"{following.shape}"
        )
    return tf.equal(items, tf.cast(following, items.dtype)[:, tf.newaxis])


# A reward from a trained model of users' responses to shown items.


class ModelReward:
    """A reward that is a `GRM`'s probability of a click, a purchase, or another of its tasks.

    The items of a group are a user's exposures, and none sees another. The histories and contexts are the
    batch's columns of the names that the model was made with. Exposures take place one unit of time after
    the last event, so that a model that sees earlier events sees it; or at the time that a column has.

    Args:
      model: The trained model. It isn't trained further.
      head: The task or product.
      item: The name of the item feature, which the model has among its targets.
      attributes: Other features of the targets -> their values for every item, (V,), by the item's id.
      time: The batch's column of the exposures' times, (users,), if not just after the last event. Only
        for a model that reads times.
      name: What messages call it.

    Raises:
      ConfigError: The model has no such head, or needs features of an exposure that nothing gives.

    Example:
      ::

        reward = ModelReward(ranker, "ctr", attributes={"category": categories})
        training = PolicyTraining(policy, reward)
    """

    def __init__(
        self,
        model: GRM,
        head: str = "ctr",
        *,
        item: str = "item",
        attributes: Mapping[str, Any] | None = None,
        time: str | None = None,
        name: str | None = None,
    ) -> None:
        self.model, self.head, self.item, self.time = model, head, item, time
        self.name = name or f"{model.name}/{head}"
        heads = [*model.heads.tasks, *model.heads.products]
        if head not in heads:
            raise ConfigError(
                f"reward {self.name}: {model.name} has the heads {', '.join(heads)}, got {head!r}"
            )
        with tf.device("CPU:0"):
            self.attributes = {name: tf.constant(of) for name, of in (attributes or {}).items()}
        needed = [each for each in model.columns.targets if each != item]
        scenario = model.columns.scenario
        if scenario is not None and scenario not in model.columns.contexts:
            needed.append(scenario)
        for what, names in (
            ("needs", [each for each in needed if each not in self.attributes]),
            ("has no use for", [each for each in self.attributes if each not in needed]),
        ):
            if names:
                raise ConfigError(
                    f"reward {self.name}: {model.name} {what} {', '.join(names)} of an exposure: attributes= "
                    f"must have {', '.join(needed) or 'nothing'}"
                )
        if item not in model.columns.targets:
            raise ConfigError(
                f"reward {self.name}: item={item!r} is not among the targets of {model.name}: "
                f"{', '.join(model.columns.targets)}"
            )
        if time is not None and model.columns.time is None:
            raise ConfigError(f"reward {self.name}: {model.name} reads no times: leave time= out")

    def __call__(self, batch: Batch, items: tf.Tensor) -> tf.Tensor:
        """Compute the probabilities of items, (users, group) ids: float32 (users, group).

        Raises:
          ConfigError: The batch lacks a column.
        """
        columns = self.model.columns
        history = {name: self._column(batch, name) for name in (*columns.history, *self._times)}
        targets = {self.item: items, **{name: tf.gather(of, items) for name, of in self.attributes.items()}}
        for name in self._times:
            then = batch[self.time] if self.time else self._last(name, history[name]) + 1
            targets[name] = tf.broadcast_to(then[:, tf.newaxis], tf.shape(items))
        logits, _ = self.model.logits(
            {
                "contexts": {name: self._column(batch, name) for name in columns.contexts},
                "history": history,
                "targets": {name: _as_ragged(column) for name, column in targets.items()},
            },
            False,
        )
        return tf.reshape(tf.sigmoid(tf.cast(logits[self.head], tf.float32)), tf.shape(items))

    def _last(self, name: str, column: Any) -> tf.Tensor:
        sequences = jagged.as_jagged(column)
        if sequences is None:
            raise ConfigError(
                f"reward {self.name}: {name!r} must be ragged, one row per user, got {type(column).__name__}"
            )
        return jagged.last(sequences)

    @property
    def _times(self) -> list[str]:
        time = self.model.columns.time
        return [] if time is None else [time]

    def _column(self, batch: Batch, name: str) -> Any:
        if name not in batch:
            raise ConfigError(
                f"reward {self.name}: the batch lacks {name!r}, which {self.model.name} reads; it has "
                f"{', '.join(map(str, batch))}"
            )
        return batch[name]


def _as_ragged(column: tf.Tensor) -> tf.RaggedTensor:
    users, group = tf.unstack(tf.shape(column, tf.int64))
    return tf.RaggedTensor.from_row_splits(
        tf.reshape(column, [-1]), group * tf.range(users + 1), validate=False
    )


# A reward that is exact: the click probability of a simulated user.


class SimulatorReward:
    """A reward that is the true probability that a user clicks on an item, in the state that the user is in.

    A group's items are alternatives: none is actually shown, and no state changes.

    Args:
      simulator: The simulator.
      states: The states of all users that batches may have, such as those after their histories.
      user: The batch's column of users' numbers, (users,).
      clicks: Whether the reward is a click, 0 or 1, drawn by the probability, as one showing would give it.
        The draw is a function of the user, the user's step and the item, so it is the same each time.
      name: What messages call it.

    Example:
      >>> from gmeta.preprocess.synthetic.user_simulator import UserSimulator
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


__all__ = ["HitReward", "ModelReward", "RankAwareReward", "Reward", "SimulatorReward", "rewards_of"]

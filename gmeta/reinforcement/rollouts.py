"""Rollouts: groups of items that a policy draws for users, with their probabilities and rewards.

Which sampling gives unbiased gradients?

===================  ===============================================================================
sample               Independent draws, so an item may come twice. The mean over a group of
                     (r - b) ∇ log π is an unbiased estimate of the gradient of the expected reward if
                     the baseline b doesn't depend on the item: with ``baseline="others"`` or ``"none"``
                     exactly, with ``"mean"`` up to the factor 1 - 1/G. Division by the deviation of the
                     group (``scale="std"``), as GRPO has it, gives each user's gradient another scale.
without_replacement  Distinct items, so more of the catalogue is seen. With ``weights="importance"`` each item
                     has the weight of `gmeta.reinforcement.losses.set_weights`, with which sums are
                     unbiased for ``baseline="none"``; the weighted mean of the group as the baseline adds
                     a bias of the order of 1/G, which is the price of less variance. With
                     ``weights="equal"`` the gradient is biased towards improbable items: it isn't that of
                     the expected reward of one item, whose best policy has a single item, but makes a set
                     of distinct items better. Use it if a list of several items is wanted.
beam                 The likeliest items, the same each time. Not an estimate at all: an item that isn't
                     among the beams is never tried, whatever its reward, and the mean over the group isn't
                     that over the policy. It sharpens what the policy puts first already, as MiniOneRec
                     does; rewards that are rarely above zero, such as hits, need it.
===================  ===============================================================================

Tests check the first two against the exact gradient of a small catalogue, and that the third is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.ops import hash_text
from gmeta.reinforcement.losses import set_weights
from gmeta.reinforcement.rewards import Reward, rewards_of

# The interface of policies.

Batch = Mapping[str, Any]
Sampling = Literal["sample", "without_replacement", "beam"]


@runtime_checkable
class Policy(Protocol):
    """A model that draws items and knows their probabilities, such as `gmeta.models.GenerativeRetriever`.

    It is a `tf.keras.Model`. A batch is a dict of columns, one row per user. ``allow`` is bool (V,), which
    items of the policy's catalogue are allowed, in its order; probabilities are normalised over them. None:
    all. A policy that is trained without masks needs no such argument.
    """

    name: str

    def sample(
        self,
        x: Batch,
        group: int,
        *,
        seed: Any,
        step: Any,
        method: Sampling = "sample",
        keys: Any = None,
        allow: Any = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Draw ids of items, (users, group), as a function of the seed, the step and the users' keys.

        Returns the logs of their probabilities too, (users, group).
        """

    def digit_log_probs(
        self, x: Batch, items: tf.Tensor, training: bool = False, *, allow: Any = None
    ) -> tf.Tensor:
        """Compute the logs of the probabilities of the digits of items, (users, group, L).

        Those of an item that isn't allowed sum to -inf, without gradient.
        """

    def retrieve(
        self, x: Batch, k: int, *, beam: int | None = None, allow: Any = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Find the k likeliest items, (users, k) ids, and the logs of their probabilities."""

    def copy_dense(self, name: str) -> Policy:
        """Create a policy that shares this one's tables and has copies of the other weights."""


Weights = Literal["importance", "equal"]
_COLUMN = "rollout/"


class Rollout(NamedTuple):
    """The groups of a batch; in each the likeliest item comes first.

    Attributes:
      items: (users, group) ids.
      log_probs: float32 (users, group, L), of the policy that drew them.
      weights: float32 (users, group): how much each item counts in the mean over its group.
      rewards: float32 (users, group).
      reference: float32 (users, group, L), of the reference; None: there is none.
    """

    items: tf.Tensor
    log_probs: tf.Tensor
    weights: tf.Tensor
    rewards: tf.Tensor
    reference: tf.Tensor | None

    def columns(self) -> dict[str, tf.Tensor]:
        """Return the rollout as columns of a batch."""
        parts = self._asdict()
        return {_COLUMN + name: part for name, part in parts.items() if part is not None}

    @classmethod
    def of_columns(cls, x: Mapping[str, Any]) -> Rollout:
        """Return the rollout that is among the columns of a batch."""
        return cls(*(x.get(_COLUMN + name) for name in cls._fields))


@dataclass(frozen=True)
class Rollouts:
    """How a policy draws groups, as a pure function of the seed, the step and the user.

    Nothing is kept between steps, so a resumed run draws what the interrupted one would have, and N ranks
    draw what one would.

    Attributes:
      group: G, how many items each user gets, >= 2.
      sampling: ``"sample"``, ``"without_replacement"`` or ``"beam"``; the module's docstring compares them.
      seed: The seed of the draws.
      weights: The weights of items that are drawn without replacement: ``"importance"`` or ``"equal"``. With
        other samplings all weights are equal.

    Raises:
      ConfigError: A setting has another value.

    Example:
      ::

        rollout = Rollouts(group=16).draw(policy, batch, HitReward(), step=0)
        rollout.rewards.shape  # (users, 16)
    """

    group: int = 16
    sampling: Sampling = "sample"
    seed: int = 0
    weights: Weights = "importance"

    def __post_init__(self) -> None:
        whole_number("Rollouts: group", self.group, 2)
        whole_number("Rollouts: seed", self.seed)
        if self.sampling not in get_args(Sampling):
            raise ConfigError(
                f"Rollouts: sampling must be one of {', '.join(get_args(Sampling))}, got {self.sampling!r}"
            )

        if self.weights not in get_args(Weights):
            raise ConfigError(f"Rollouts: weights must be 'importance' or 'equal', got {self.weights!r}")

    def draw(
        self,
        policy: Policy,
        x: Batch,
        reward: Reward,
        *,
        step: Any,
        reference: Policy | None = None,
        user: str | None = None,
        allow: Any = None,
    ) -> Rollout:
        """Draw a group for each user, and reward it.

        Args:
          policy: The policy, at whose weights the items are drawn and ``log_probs`` computed.
          x: A batch.
          reward: The reward.
          step: The step of the training, from 0 on; an integer or a tensor.
          reference: The reference, which shares the policy's tables.
          user: The column of users' ids, integers or texts, by which users draw and errors name them. None:
            users draw by their histories, so users of the same history draw the same.
          allow: bool (V,), which items of the policy's catalogue may be drawn, in its order; probabilities
            are normalised over them. None: all. If items are to be distinct, at least a group must be
            allowed.

        Raises:
          ConfigError: The reward can't be used; see `rewards_of`. Or the batch lacks the users.
        """
        keys = None if user is None else _keys(x, user)
        how: Any = {"seed": self.seed, "step": step, "method": self.sampling, "keys": keys}
        items, _ = policy.sample(x, self.group, **how, **only(allow))
        items = tf.ensure_shape(items, [None, self.group])
        log_probs = policy.digit_log_probs(x, items, **only(allow))
        order = tf.argsort(tf.reduce_sum(log_probs, axis=-1), axis=1, direction="DESCENDING", stable=True)
        items, log_probs = (tf.gather(each, order, batch_dims=1) for each in (items, log_probs))
        weights = tf.fill(tf.shape(items), 1 / self.group)
        if self.sampling == "without_replacement" and self.weights == "importance":
            weights = set_weights(tf.reduce_sum(log_probs, axis=-1))
        anchor = None if reference is None else reference.digit_log_probs(x, items, **only(allow))
        return Rollout(
            items=items,
            log_probs=tf.stop_gradient(log_probs),
            weights=weights,
            rewards=rewards_of(reward, x, items, user=user),
            reference=None if anchor is None else tf.stop_gradient(anchor),
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that recreate this object."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def only(allow: Any) -> dict[str, Any]:
    """Return the argument of a policy's methods that names the allowed items, if not all are."""
    return {} if allow is None else {"allow": allow}


def _keys(x: Batch, user: str) -> tf.Tensor:
    if user not in x:
        raise ConfigError(
            f"Rollouts: the batch lacks {user!r}, it has {', '.join(map(str, x))}: add the users"
        )
    users = tf.convert_to_tensor(x[user])
    return hash_text(users) if users.dtype == tf.string else tf.cast(users, tf.int64)

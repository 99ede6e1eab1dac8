"""How much better each item of a group is than the group."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError

Baseline = Literal["mean", "others", "none"]
Scale = Literal["std", "none"]
_ROUNDING = 1e-6


class GroupAdvantages(NamedTuple):
    """The advantages of groups.

    Attributes:
      values: float32 (users, group).
      tied: () int32: how many groups have no spread, and so teach nothing.
    """

    values: tf.Tensor
    tied: tf.Tensor


def group_advantages(
    rewards: Any, *, baseline: Baseline = "mean", scale: Scale = "std", weights: Any = None
) -> GroupAdvantages:
    r"""Compute advantages relative to the group.

    .. math:: A_i = \frac{r_i - b_i}{\sigma}, \quad
       \sigma^2 = \tfrac{1}{G} \textstyle\sum_j (r_j - \bar r)^2

    ========  ==================================================================================
    baseline  b_i
    ========  ==================================================================================
    mean      the mean of the group, as GRPO has it
    others    the mean of the other items: G / (G - 1) times the former, and unbiased
    none      0
    ========  ==================================================================================

    A group whose rewards differ by at most 1e-6, or 1e-6 of the largest, gets zeros, whatever the baseline.

    Args:
      rewards: (users, group) numbers.
      baseline: As above.
      scale: ``"std"`` divides by σ, the deviation of the group; ``"none"`` doesn't (Liu et al., Dr. GRPO).
      weights: (users, group), how much each item counts in the group's mean and deviation, such as those of
        `set_weights`; None: all alike.

    Raises:
      ConfigError: The baseline or scale is unknown, or there is no group.

    Example:
      >>> group_advantages([[1.0, 3.0], [2.0, 2.0]]).values.numpy()
      array([[-1.,  1.],
             [ 0.,  0.]], dtype=float32)

    References:
      Shao et al., "DeepSeekMath" (arXiv 2402.03300), section 4.1.2. Liu et al., "Understanding R1-Zero-Like
      Training" (arXiv 2503.20783), section 3.1.
    """
    check_names("group_advantages", baseline=baseline, scale=scale)
    rewards = tf.cast(rewards, tf.float32)
    if rewards.shape.rank != 2 or rewards.shape[1] is None or rewards.shape[1] < 2:
        raise ConfigError(
            f"group_advantages: rewards must be (users, group), group >= 2, got {rewards.shape}"
        )
    shares = tf.ones_like(rewards) if weights is None else tf.cast(weights, tf.float32)
    shares /= tf.reduce_sum(shares, axis=1, keepdims=True)
    mean = tf.reduce_sum(shares * rewards, axis=1, keepdims=True)
    spread = tf.sqrt(tf.reduce_sum(shares * tf.square(rewards - mean), axis=1, keepdims=True))
    most, least = (of(rewards, axis=1, keepdims=True) for of in (tf.reduce_max, tf.reduce_min))
    tied = most - least <= _ROUNDING * tf.maximum(1.0, tf.maximum(most, -least))
    size = float(rewards.shape[1])
    values = {
        "mean": lambda: rewards - mean,
        "others": lambda: (rewards - mean) / tf.maximum(1 - shares, 1 / (8 * size)),
        "none": lambda: rewards,
    }[baseline]()
    if scale == "std":
        values /= tf.where(tied, 1.0, spread)
    return GroupAdvantages(
        tf.where(tied, tf.zeros_like(values), values), tf.reduce_sum(tf.cast(tied, tf.int32))
    )


def check_names(name: str, *, baseline: str, scale: str) -> None:
    """Check a baseline and a scale.

    Raises:
      ConfigError: One is unknown.
    """
    for what, given, known in (("baseline", baseline, Baseline), ("scale", scale, Scale)):
        if given not in get_args(known):
            raise ConfigError(f"{name}: {what} must be one of {', '.join(get_args(known))}, got {given!r}")

"""Losses of policies over groups of sampled items: pure functions of log-probabilities and rewards."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError, finite_number

# The advantage of each item over its group.

Baseline = Literal["mean", "others", "none"]
Scale = Literal["std", "none"]
_ROUNDING = 1e-6


class GroupAdvantages(NamedTuple):
    """The advantages of groups.

    Attributes:
      values: float32 (users, group).
      tied: () int32: the number of groups without spread, which have no gradient.
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
    mean      the mean of the group, as in GRPO
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


# The divergence of a policy from its reference, estimated from the policy's own samples.


def k3_divergence(log_probs: Any, reference: Any) -> tf.Tensor:
    r"""Estimate KL(π || π_ref) for each sample.

    .. math:: k_3 = \frac{\pi_\mathrm{ref}}{\pi} - \log \frac{\pi_\mathrm{ref}}{\pi} - 1 \ge 0

    Its mean over samples of π is the divergence, with less variance than that of log π / π_ref.

    Args:
      log_probs: log π of samples, floats of any shape.
      reference: log π_ref of the same.

    Example:
      >>> float(k3_divergence(tf.math.log(0.5), tf.math.log(0.25)))  # 1/2 + log 2 - 1
      0.19314718246459961

    Reference: Schulman, "Approximating KL divergence" (2020), as in DeepSeekMath, equation 4.
    """
    difference = tf.convert_to_tensor(reference) - tf.convert_to_tensor(log_probs)
    return tf.math.expm1(difference) - difference


# The weights with which sums over items that are drawn without replacement are unbiased.


# The integrand is smooth in y = log t, with features as wide as 1: the trapezoid rule at this step leaves
# errors below 1e-9.
_STEP, _FIRST, _LAST = 0.1, -36.0, 7.0


def set_weights(log_probs: Any) -> tf.Tensor:
    r"""Compute the weights with which a set drawn without replacement estimates an expectation.

    For items drawn one after another by their probabilities, each once, as Gumbel top-k draws them:

    .. math::
       \mathrm{E}\left[\sum_{s \in S} w_s f(s)\right] = \sum_i p_i f(i), \quad
       w_s = p_s \frac{P(S \setminus s \text{ without } s)}{P(S)}, \quad
       P(S) = \int_0^\infty e^{-t} \prod_{s \in S} (1 - e^{-a_s t})\, dt, \quad
       a_s = \frac{p_s}{1 - \sum_{S} p}

    P(S) is the probability of the set, in any order of drawing. A mean with equal weights would overweight
    improbable items, because no item is drawn twice, however probable it is. A weight is between p_s and 1;
    for a set of one it is 1. The computation is in float64.

    Args:
      log_probs: log p, (users, group), of distinct items in each row.

    Returns:
      float32 (users, group), without gradient.

    Raises:
      ConfigError: The shape is another.

    Example:
      >>> set_weights(tf.math.log([[0.5, 0.25]])).numpy().round(4)
      array([[0.6, 0.4]], dtype=float32)

    Reference: Kool et al., "Estimating Gradients for Discrete Random Variables by Sampling without
    Replacement" (ICLR 2020), section 4.
    """
    logs = tf.stop_gradient(tf.cast(log_probs, tf.float64))
    if logs.shape.rank != 2:
        raise ConfigError(f"set_weights: log_probs must be (users, group), got {logs.shape}")
    left = tf.maximum(-tf.math.expm1(tf.reduce_logsumexp(logs, axis=1, keepdims=True)), 1e-12)
    y = tf.constant(np.arange(_FIRST, _LAST, _STEP))
    rates = (logs - tf.math.log(left))[:, :, tf.newaxis] + y
    factors = tf.math.log(-tf.math.expm1(-tf.exp(rates)))  # (users, group, points)
    density = y - tf.exp(y) + tf.reduce_sum(factors, axis=1)
    whole = tf.reduce_logsumexp(density, axis=1, keepdims=True)
    rest = tf.reduce_logsumexp(density[:, tf.newaxis] - factors, axis=2)
    return tf.cast(tf.exp(logs + rest - whole), tf.float32)


# Losses that compare a policy with the policy that drew the samples.

Per = Literal["item", "digit"]


class PolicyLoss(NamedTuple):
    """The losses of sampled items.

    Attributes:
      losses: float32 (users, group), the divergence with them.
      divergence: float32 (users, group): the estimate of the KL divergence of the whole item; 0 without a
        reference.
      clipped: float32 (users, group): the share of ratios at which the loss is flat.
      ratio: float32 (users, group): the ratio of the whole item, π / π_old.
    """

    losses: tf.Tensor
    divergence: tf.Tensor
    clipped: tf.Tensor
    ratio: tf.Tensor


def grpo(
    log_probs: Any,
    old: Any,
    advantages: Any,
    reference: Any = None,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    kl: float = 0.0,
    per: Per = "item",
) -> PolicyLoss:
    r"""Compute the losses of group-relative policy optimization.

    .. math::
       l_i = -\min(\rho_i A_i, \mathrm{clip}(\rho_i, 1 - \epsilon, 1 + \epsilon_\mathrm{high}) A_i)
             + \beta\, k_3(\pi, \pi_\mathrm{ref}), \quad
       \rho_i = \frac{\pi(i)}{\pi_\mathrm{old}(i)}

    Per item, ρ and the divergence are of the item's probability, the product of its digits'. Per digit, each
    digit has its own, and l_i is the mean over the digits, as in GRPO over the tokens of a text. The caller
    takes the means over groups and users.

    Args:
      log_probs: log π, (users, group, L).
      old: log π_old, (users, group, L), of the policy that drew the items. No gradient goes there.
      advantages: (users, group).
      reference: log π_ref, (users, group, L); None: there is none.
      clip: ε, from 0 on, below 1.
      clip_high: ε_high, from 0 on; None: ε. A greater one lets improbable items gain more (DAPO).
      kl: β, from 0 on.
      per: ``"item"`` or ``"digit"``.

    Raises:
      ConfigError: A number is out of its limits, shapes differ, or ``kl`` has no reference.

    Example:
      >>> found = grpo(tf.math.log([[[0.5]]]), tf.math.log([[[0.25]]]), [[1.0]])  # a ratio of 2, clipped
      >>> found.losses.numpy(), found.clipped.numpy()
      (array([[-1.2]], dtype=float32), array([[1.]], dtype=float32))

    References:
      Shao et al., "DeepSeekMath" (arXiv 2402.03300), equations 3 and 4. Yu et al., "DAPO" (arXiv 2503.14476),
      section 3.1.
    """
    return _losses("grpo", log_probs, old, advantages, reference, clip, clip_high, kl, per, None)


def ecpo(
    log_probs: Any,
    old: Any,
    advantages: Any,
    reference: Any = None,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    delta: float = 0.1,
    kl: float = 0.0,
    per: Per = "item",
) -> PolicyLoss:
    r"""Compute the losses of early-clipped GRPO.

    They are those of `grpo`, except that where A_i < 0 the old policy is bounded from below:

    .. math::
       \pi'_\mathrm{old}(i) = \max\left(\pi_\mathrm{old}(i),
           \frac{\mathrm{sg}(\pi(i))}{1 + \epsilon_\mathrm{high} + \delta}\right)

    So the ratio is at most 1 + ε_high + δ. Without the bound, an item that was worse than its group but has
    become more probable since it was drawn has an unbounded ratio and gradient, because the minimum clips
    only from below there. Where A_i >= 0 the bound would change no gradient: a ratio above 1 + ε_high is
    clipped anyway.

    Args:
      log_probs: As for `grpo`.
      old: As for `grpo`.
      advantages: As for `grpo`.
      reference: As for `grpo`.
      clip: As for `grpo`.
      clip_high: As for `grpo`.
      delta: δ, above 0.
      kl: As for `grpo`.
      per: As for `grpo`; by digit each digit is bounded.

    Raises:
      ConfigError: As `grpo`.

    Example:
      >>> found = ecpo(tf.math.log([[[0.5]]]), tf.math.log([[[0.05]]]), [[-1.0]])  # of GRPO 10
      >>> found.losses.numpy().round(4)
      array([[1.3]], dtype=float32)

    Reference: OneRec technical report (arXiv 2506.13695), section 4.3.1.
    """
    if finite_number("ecpo: delta", delta) <= 0:
        raise ConfigError(f"ecpo: delta must be above 0, got {delta}")
    return _losses("ecpo", log_probs, old, advantages, reference, clip, clip_high, kl, per, delta)


def _losses(
    name: str,
    log_probs: Any,
    old: Any,
    advantages: Any,
    reference: Any,
    clip: float,
    clip_high: float | None,
    kl: float,
    per: Per,
    delta: float | None,
) -> PolicyLoss:
    high = clip if clip_high is None else clip_high
    check_numbers(name, clip=clip, clip_high=high, kl=kl, per=per)
    if kl and reference is None:
        raise ConfigError(f"{name}: kl={kl} needs the reference's log-probabilities: give them, or kl=0")
    pi, then = check_alike(name, log_probs=log_probs, old=old)
    anchor = pi if reference is None else check_alike(name, log_probs=pi, reference=reference)[1]
    if per == "item":
        pi, then, anchor = (tf.reduce_sum(each, axis=-1, keepdims=True) for each in (pi, then, anchor))
    then, anchor = tf.stop_gradient(then), tf.stop_gradient(anchor)
    weights = tf.cast(advantages, tf.float32)[..., tf.newaxis]
    used = then
    if delta is not None:
        bounded = tf.maximum(then, tf.stop_gradient(pi) - tf.math.log1p(high + delta))
        used = tf.where(weights < 0, bounded, then)
    ratio = tf.exp(pi - used)
    clipped = tf.clip_by_value(ratio, 1 - clip, 1 + high)
    gains = tf.minimum(ratio * weights, clipped * weights)
    divergence = tf.zeros_like(pi) if reference is None else k3_divergence(pi, anchor)
    losses = kl * divergence - gains if kl else -gains
    flat = tf.where(weights < 0, ratio < 1 - clip, ratio > 1 + high) & (weights != 0)
    return PolicyLoss(
        losses=tf.reduce_mean(losses, axis=-1),
        divergence=tf.reduce_sum(divergence, axis=-1),
        clipped=tf.reduce_mean(tf.cast(flat, tf.float32), axis=-1),
        ratio=tf.exp(tf.reduce_sum(pi - then, axis=-1)),
    )


def check_numbers(name: str, *, clip: float, clip_high: float, kl: float, per: str) -> None:
    """Check the settings of a loss.

    Raises:
      ConfigError: One is out of its limits.
    """
    if not 0 <= finite_number(f"{name}: clip", clip) < 1:
        raise ConfigError(f"{name}: clip must be from 0 on and below 1, got {clip}")
    for what, value in (("clip_high", clip_high), ("kl", kl)):
        if finite_number(f"{name}: {what}", value) < 0:
            raise ConfigError(f"{name}: {what} must be 0 or more, got {value}")
    if per not in get_args(Per):
        raise ConfigError(f"{name}: per must be 'item' or 'digit', got {per!r}")


def check_alike(name: str, **given: Any) -> list[tf.Tensor]:
    """Return log-probabilities as float32 tensors.

    Raises:
      ConfigError: They aren't (users, group, L), or have different shapes.
    """
    tensors = {what: tf.cast(value, tf.float32) for what, value in given.items()}
    first = next(iter(tensors.values()))
    for what, tensor in tensors.items():
        if tensor.shape.rank != 3 or not tensor.shape.is_compatible_with(first.shape):
            shapes = ", ".join(f"{each} {value.shape}" for each, value in tensors.items())
            raise ConfigError(f"{name}: {what} must be (users, group, digits), all alike, got {shapes}")
    return list(tensors.values())


# A loss of policies that learn from pairs of a better and a worse item.


class PairLoss(NamedTuple):
    """The losses of users.

    Attributes:
      losses: float32 (users,), each the mean over the user's pairs; 0 without a pair.
      pairs: int32 (users,): the number of pairs of each.
      right: float32 (users,): the share of pairs in which the policy has moved towards the better item.
    """

    losses: tf.Tensor
    pairs: tf.Tensor
    right: tf.Tensor


def dpo(log_probs: Any, reference: Any, rewards: Any, *, beta: float = 0.1) -> PairLoss:
    r"""Compute the losses of direct preference optimization, over all pairs of a group.

    .. math::
       l_{ij} = -\log \sigma\left(\beta \left[
           \log \frac{\pi(i)}{\pi_\mathrm{ref}(i)} - \log \frac{\pi(j)}{\pi_\mathrm{ref}(j)}
       \right]\right), \quad r_i > r_j

    A group of two is DPO as published. Probabilities are those of items, the products of their digits'.

    Args:
      log_probs: log π, (users, group, L).
      reference: log π_ref, (users, group, L). No gradient goes there.
      rewards: (users, group); items of equal rewards make no pair.
      beta: β, above 0.

    Raises:
      ConfigError: β isn't above 0, or shapes differ.

    Example:
      >>> same = tf.math.log([[[0.5], [0.5]]])
      >>> dpo(same, same, [[1.0, 0.0]]).losses.numpy().round(4)  # log 2
      array([0.6931], dtype=float32)

    Reference: Rafailov et al., "Direct Preference Optimization" (NeurIPS 2023), equation 7.
    """
    if finite_number("dpo: beta", beta) <= 0:
        raise ConfigError(f"dpo: beta must be above 0, got {beta}")
    pi, anchor = check_alike("dpo", log_probs=log_probs, reference=reference)
    moved = tf.reduce_sum(pi - tf.stop_gradient(anchor), axis=-1)
    margins = beta * (moved[:, :, tf.newaxis] - moved[:, tf.newaxis])
    rewards = tf.cast(rewards, tf.float32)
    better = tf.cast(rewards[:, :, tf.newaxis] > rewards[:, tf.newaxis], tf.float32)
    pairs = tf.reduce_sum(better, axis=[1, 2])

    def mean(values: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(tf.reduce_sum(values * better, axis=[1, 2]), pairs)

    losses, right = mean(-tf.math.log_sigmoid(margins)), mean(tf.cast(margins > 0, tf.float32))
    return PairLoss(losses, tf.cast(pairs, tf.int32), right)


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

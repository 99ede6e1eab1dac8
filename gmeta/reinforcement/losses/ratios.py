"""Losses of policies that compare themselves with the policy that drew the samples."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import tensorflow as tf

from gmeta.core.arguments import finite_number
from gmeta.core.errors import ConfigError
from gmeta.reinforcement.losses.divergence import k3_divergence

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

    By item, ρ and the divergence are of the item's probability, the product of its digits'. By digit each
    digit has its own, and l_i is the mean over the digits, as GRPO has it for the tokens of a text. The means
    over groups and users are the caller's.

    Args:
      log_probs: log π, (users, group, L).
      old: log π_old, (users, group, L), of the policy that drew the items. No gradient goes there.
      advantages: (users, group).
      reference: log π_ref, (users, group, L); None: there is none.
      clip: ε, from 0 on, below 1.
      clip_high: ε_high, from 0 on; None: ε. A greater one leaves more room to what was improbable (DAPO).
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

    They are those of `grpo`, but where A_i < 0 the old policy is bounded from below:

    .. math::
       \pi'_\mathrm{old}(i) = \max\left(\pi_\mathrm{old}(i),
           \frac{\mathrm{sg}(\pi(i))}{1 + \epsilon_\mathrm{high} + \delta}\right)

    So the ratio stays at most 1 + ε_high + δ. Without it the ratio of an item that has become more probable
    since it was drawn, and was worse than its group, is unbounded, and so is its gradient, as the minimum
    clips only from below there. Where A_i >= 0 the bound would change no gradient: a ratio above 1 + ε_high
    is clipped anyway.

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

"""The cost of training on a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gmeta.core.arguments import whole_number
from gmeta.core.errors import ConfigError
from gmeta.io.balance.step_fit import fit_steps

Costs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SequenceCost:
    r"""The cost of a sequence of L tokens.

    .. math:: F(L) = a L + b L^2

    Projections and feed-forward layers make up the linear part, attention the quadratic one. Balancing by
    tokens alone (``SequenceCost()``) gives a rank with a few long sequences more work than a rank with many
    short ones.

    Attributes:
      linear: a, per token.
      quadratic: b, per pair of tokens.

    Raises:
      ConfigError: A number is below 0, or both are 0.

    Example:
      >>> SequenceCost.of_hstu(dim=512).of([100, 200])
      array([2.72384e+08, 5.65248e+08])

    References:
      MTGenRec, section 3.4 and appendix B.5.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        if min(self.linear, self.quadratic) < 0 or max(self.linear, self.quadratic) == 0:
            raise ConfigError(
                f"SequenceCost: linear={self.linear} and quadratic={self.quadratic} must be at least 0, and "
                "one of them above"
            )

    @classmethod
    def of_hstu(cls, dim: int, blocks: int = 1, *, causal: bool = True) -> SequenceCost:
        r"""Count the floating-point operations of HSTU's blocks in the forward pass, for one sequence.

        .. math:: F(L) = B \left(10 d^2 L + \{4, 2\} \, d L^2\right)

        A multiplication and its addition are two operations. The projections to U, V, Q and K and the output
        projection take :math:`10 d^2` a token; the two products of attention take :math:`4 d` for each pair
        of tokens, :math:`4 d L^2` over all pairs. The number of heads doesn't matter: d is their joint width.
        The backward pass takes twice as much again.

        A causal mask leaves :math:`L (L + 1) / 2` pairs, of which :math:`L^2 / 2` are counted: half of the
        full square, as in publications. The part not counted, half of each token's pair with itself, would
        add :math:`2 d L`, which is :math:`1 / (5 d)` of the projections, 0.04 % at d = 512. A kernel that
        skips masked pairs computes half of the square; one that multiplies the whole square and masks the
        result computes all of it.

        Args:
          dim: The width d of the tokens.
          blocks: The number of blocks B; a factor, which changes no balance.
          causal: False counts the full square.

        Raises:
          ConfigError: A number is below 1.

        Example:
          >>> f"{SequenceCost.of_hstu(dim=1024, blocks=22, causal=False).of(410):.3g}"
          '1.1e+11'

        References:
          Zhai et al., "Actions Speak Louder than Words" (ICML 2024), section 3; MTGenRec, appendix B.5.
        """
        dim, blocks = whole_number("of_hstu: dim", dim, 1), whole_number("of_hstu: blocks", blocks, 1)
        return cls(linear=10.0 * dim * dim * blocks, quadratic=(2.0 if causal else 4.0) * dim * blocks)

    @classmethod
    def of_steps(cls, batches: Sequence[npt.ArrayLike], seconds: npt.ArrayLike) -> SequenceCost:
        r"""Fit the cost of a sequence to the seconds that steps have taken.

        .. math::
           \min_{a, b, c \ge 0} \sum_i \Big|t_i - c - a \sum_{L \in B_i} L - b \sum_{L \in B_i} L^2\Big|

        A device does the operations of attention at another rate than those of large matrix products, so
        operations counted (`of_hstu`) and time can disagree about b / a, and batches of equal operations then
        take unequal time. F is in seconds here: a a token, b a pair of tokens. So is the target of a
        `gmeta.io.Balance`. The constant c, what every step takes whatever its batch, isn't kept: all ranks
        have it alike, so it changes no balance.

        A fit is as good as its batches: let tokens and squared lengths vary apart from each other, by batches
        of short and of long sequences besides those drawn from data, and some of half the size. Time each
        batch several times, after one that isn't counted, and give the median. A late step or two among the
        times then change little, since it is distances that are summed, not their squares. Times must be of
        the ranks' own computing: without waiting for other ranks or for data.

        Args:
          batches: The lengths of each batch's sequences, in tokens.
          seconds: (batches,), what the step on each batch took.

        Raises:
          ConfigError: There are fewer than 3 batches, or not one time for each; a time isn't finite or above
            0; a length isn't finite or is below 0; tokens and squared lengths don't vary apart from each
            other, as in batches that are all alike; or steps don't take longer with either of them.

        Example:
          >>> batches = [[100] * 80, [200] * 40, [400] * 20, [100] * 40]
          >>> cost = SequenceCost.of_steps(batches, [0.026, 0.034, 0.05, 0.018])
          >>> f"{cost.linear:.1e} s a token, {cost.quadratic:.1e} s a pair"
          '1.0e-06 s a token, 1.0e-08 s a pair'

        References:
          MTGenRec, section 3.4 (the cost that it balances); Bloomfield and Steiger, "Least Absolute
          Deviations" (1983), chapter 1 (why late steps count little).
        """
        linear, quadratic = fit_steps(batches, seconds)
        return cls(linear, quadratic)

    def of(self, lengths: npt.ArrayLike) -> Costs:
        """Compute the costs of sequences of these lengths, as float64 of the same shape."""
        length = np.asarray(lengths, np.float64)
        return self.linear * length + self.quadratic * length * length

    def length(self, cost: float) -> float:
        r"""Compute the length, a real number, of a sequence of this cost: the inverse of `of`.

        .. math:: L = \frac{2 F}{a + \sqrt{a^2 + 4 b F}}

        Args:
          cost: F, at least 0.

        Raises:
          ConfigError: The cost is below 0, or isn't a number.

        Example:
          >>> SequenceCost(2.0, 0.5).length(16.0)
          4.0
        """
        if not cost >= 0:
            raise ConfigError(f"SequenceCost: the cost of a sequence is at least 0, got {cost}")
        root = float(np.sqrt(self.linear**2 + 4 * self.quadratic * cost))
        return 2 * cost / (self.linear + root) if root else 0.0

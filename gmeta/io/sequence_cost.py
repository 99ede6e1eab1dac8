"""What a sequence costs to train on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gmeta.core.errors import ConfigError

Costs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SequenceCost:
    r"""The cost of a sequence of L tokens.

    .. math:: F(L) = a L + b L^2

    Projections and feed-forward layers make the linear part, attention the quadratic one. Balancing by tokens
    alone (``SequenceCost()``) leaves a rank with a few long sequences more to do than one with many short
    ones.

    Attributes:
      linear: a, per token.
      quadratic: b, per pair of tokens.

    Raises:
      ConfigError: A number below 0, or both 0.

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
    def of_hstu(cls, dim: int) -> SequenceCost:
        r"""Floating-point operations of an HSTU block in the forward pass.

        .. math:: F(L) = 10 d^2 L + 2 d L^2

        The projections to U, V, Q and K and the one back take :math:`10 d^2` a token, and the two products of
        causal attention :math:`4 d` for each of :math:`L^2 / 2` pairs. More blocks and the backward pass are
        factors, which change no balance.

        Args:
          dim: The width d of the tokens.
        """
        return cls(linear=10.0 * dim * dim, quadratic=2.0 * dim)

    def of(self, lengths: npt.ArrayLike) -> Costs:
        """The costs of sequences of these lengths, of their shape, float64."""
        length = np.asarray(lengths, np.float64)
        return self.linear * length + self.quadratic * length * length

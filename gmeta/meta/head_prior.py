"""The settings of the prior with which ridge regression solves for a head."""

from __future__ import annotations

from dataclasses import dataclass

from gmeta.core.arguments import finite_number
from gmeta.core.errors import ConfigError


@dataclass(frozen=True)
class HeadPrior:
    r"""How the learned prior of ``InnerLoop("ridge")`` starts, and how fast it moves.

    A variance is :math:`v = e^{p \theta}`, and so is the noise; the outer loop learns :math:`\theta`, which
    begins where v is :math:`v_0`. Adam moves a number by about its rate in a step, so p says how fast
    variances move beside weights.

    Attributes:
      variance: :math:`v_0` of all features; None: 1 / features for the kernel, 1 for the bias.
      noise: :math:`v_0` of the noise, by which the support loss is divided.
      pace: p.
      likelihood: Whether the outer loss of a squared error is the negative log-likelihood of the query's
        labels under the variances that ridge predicts (`gmeta.models.meta.learner.ridge_variance`). Then
        variances are true to scale, which a squared error alone doesn't teach; what is predicted hardly
        changes. A logistic loss is a negative log-likelihood as it is, and stays. Training reports this loss,
        and evaluation the squared error.
      unadapted: The weight, beside 1, that the outer loss gives to the same samples as predicted before
        adaptation. The loss after adaptation alone hardly teaches the prior's mean: support samples correct
        any mean whose variance is large. With a weight of 0, predictions for tasks without support samples
        are therefore arbitrary. Training reports the loss after adaptation.

    Raises:
      ConfigError: ``variance``, ``noise`` or ``pace`` isn't above 0, ``unadapted`` is below 0, or
        ``likelihood`` isn't True or False.

    Example:
      >>> HeadPrior(variance=1.0, pace=0.2).noise
      1.0
    """

    variance: float | None = None
    noise: float = 1.0
    pace: float = 1.0
    likelihood: bool = False
    unadapted: float = 0.03

    def __post_init__(self) -> None:
        for name in ("variance", "noise", "pace"):
            value = getattr(self, name)
            if value is not None and finite_number(f"head prior: {name}", value) <= 0:
                raise ConfigError(f"head prior: {name} must be above 0, got {value}")
        if finite_number("head prior: unadapted", self.unadapted) < 0:
            raise ConfigError(f"head prior: unadapted must be at least 0, got {self.unadapted}")
        if not isinstance(self.likelihood, bool):
            raise ConfigError(f"head prior: likelihood must be True or False, got {self.likelihood!r}")

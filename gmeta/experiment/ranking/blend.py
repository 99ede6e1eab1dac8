"""The blend: a regression on the scores of models and baselines, fitted to validation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize

from gmeta.experiment.baselines.task_rows import Floats
from gmeta.experiment.plan.ranking_config import RankingConfig
from gmeta.experiment.ranking.baselines import Scorer
from gmeta.experiment.ranking.bilinear import Bilinear, Drift
from gmeta.experiment.ranking.examples import Examples
from gmeta.experiment.ranking.models import ModelScorer
from gmeta.experiment.ranking.networks import SequenceModel

_FLAT = 1e-6  # the least deviation, relative to the mean or to 1, of an informative score
_PENALTY = 10.0  # in rows


@dataclass(frozen=True)
class Blend:
    r"""A weighted sum of scores, calibrated.

    .. math:: s = w_0 + \sum_m w_m \frac{f_m - \mu_m}{\sigma_m}, \quad
       w = \arg\min_w \sum_r \ell(y_r, s_r) + \frac{\lambda}{2} |w_{1 \dots} - \bar w|^2

    f are scores, and the sum is over the rows of validation: with the log loss, s are logits, and with half
    the squared error of labels in units of their deviation, labels. No test row is used. With one score this
    is a calibration: it changes the scale of scores, and the order of rows only if the scores are worse than
    none.

    Attributes:
      names: The scorers, by name.
      weights: (names,).
      intercept: :math:`w_0`.
      means: (names,) μ.
      deviations: (names,) σ.
    """

    names: Sequence[str]
    weights: Floats
    intercept: float
    means: Floats
    deviations: Floats

    @classmethod
    def fit(cls, scores: Mapping[str, Floats], labels: Floats, *, binary: bool) -> Blend:
        """Fit the weights.

        Args:
          scores: Name -> (rows,) the scores of validation.
          labels: (rows,).
          binary: Whether labels are 0 and 1, and scores logits.

        Example:
          >>> found = Blend.fit({"a": np.array([-1.0, 1.0, 3.0])}, np.array([1.0, 2.0, 3.0]), binary=False)
          >>> bool(found.weights[0] > 0)
          True
        """
        every = np.stack([*scores.values()], axis=1)
        means, deviations = every.mean(axis=0), every.std(axis=0)
        # A score that hardly varies in validation is uninformative there, but may vary elsewhere.
        flat = ~(deviations > _FLAT * np.maximum(np.abs(means), 1.0))
        deviations = np.where(flat, 1.0, deviations)
        x = np.where(flat, 0.0, (every - means) / deviations)
        unit = 1.0 if binary else max(float(labels.std()), 1e-9)
        centre = 0.0 if binary else float(labels.mean())
        targets = labels if binary else (labels - centre) / unit

        def loss(weights: Floats) -> tuple[float, Floats]:
            found = weights[0] + x @ weights[1:]
            if binary:
                value = float(np.logaddexp(0.0, np.where(targets > 0, -found, found)).sum())
                slope = 1 / (1 + np.exp(-found)) - targets
            else:
                slope = found - targets
                value = 0.5 * float(slope @ slope)
            away = np.where(flat, 0.0, weights[1:] - weights[1:][~flat].mean() if not flat.all() else 0.0)
            value += 0.5 * _PENALTY * float(away @ away)
            return value, np.concatenate([[slope.sum()], x.T @ slope + _PENALTY * away])

        best = optimize.minimize(loss, np.zeros(1 + x.shape[1]), jac=True, method="L-BFGS-B").x
        best[1:][flat] = 0.0
        return cls(tuple(scores), best[1:] * unit, centre + float(best[0]) * unit, means, deviations)

    def weigh(self, scores: Mapping[str, Floats]) -> Floats:
        """Weigh scores, name -> (rows,)."""
        found: Any = self.intercept
        for name, weight, mean, deviation in self.terms():
            found = found + weight * (scores[name] - mean) / deviation
        return np.asarray(found, np.float64)

    def of(self, scorers: Mapping[str, Scorer]) -> Blended:
        """Return the blend of these scorers."""
        return Blended(self, {name: scorers[name] for name in self.names})

    def terms(self) -> Iterator[tuple[str, float, float, float]]:
        """Yield each name with its weight, mean and deviation."""
        numbers = (each.tolist() for each in (self.weights, self.means, self.deviations))
        return zip(self.names, *numbers, strict=True)

    def describe(self) -> str:
        """Return the weights as part of a sentence, the greatest first."""
        order = np.argsort(-np.abs(self.weights))
        return ", ".join(f"{self.names[each]} {self.weights[each]:+.2f}" for each in order)

    def to_json(self) -> dict[str, Any]:
        """Return the blend as JSON values."""
        numbers = {name: getattr(self, name).tolist() for name in ("weights", "means", "deviations")}
        return {"names": [*self.names], "intercept": self.intercept, **numbers}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Blend:
        """Return the blend that `to_json` described."""
        weights, means, deviations = (
            np.asarray(values[name], np.float64) for name in ("weights", "means", "deviations")
        )
        return cls(tuple(values["names"]), weights, float(values["intercept"]), means, deviations)


@dataclass(frozen=True)
class Blended:
    """A blend with the scorers that it weighs: itself a `gmeta.experiment.ranking.baselines.Scorer`."""

    blend: Blend
    scorers: Mapping[str, Scorer]

    def scores(self, asked: Examples) -> Floats:
        """Weigh the scores of each row."""
        return self.blend.weigh({name: each.scores(asked) for name, each in self.scorers.items()})


def columns_of(scorer: Scorer, config: RankingConfig) -> set[str]:
    """Return the columns of a row that a scorer reads; for a blend, those of its members."""
    if isinstance(scorer, Blended):
        return set().union(*(columns_of(each, config) for each in scorer.scorers.values()))
    if isinstance(scorer, Drift):
        return {scorer.user, config.time} | columns_of(scorer.base, config)
    if isinstance(scorer, Bilinear):
        return {name for name in (scorer.user, scorer.item) if name is not None}
    found = {*config.features, *config.numbers}
    if isinstance(scorer, ModelScorer) and isinstance(scorer.model, SequenceModel):
        found |= {name for name in (config.user, config.time) if name}
    return found

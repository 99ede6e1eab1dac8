"""The blend: a softmax regression on the scores of models and baselines, fitted to validation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, sparse

from gmeta.experiment.baselines.task_rows import Floats
from gmeta.experiment.next_item.counting import Scorer, Scores
from gmeta.experiment.next_item.histories import Asked, Histories

SEEN = "seen"
"""The feature that is 1 for items of the history."""

MOST_USERS, MOST_NEGATIVES = 4096, 2048
_PENALTY = 1e-3


@dataclass(frozen=True)
class Blend:
    r"""Scores that are a weighted sum of others' scores.

    .. math:: s_j = \sum_m w_m \frac{f_{mj} - \mu_m}{\sigma_m}, \quad
       w = \arg\min_w -\frac{1}{n} \sum_u \log \frac{e^{s_{t_u}}}{e^{s_{t_u}} + \sum_{j \in N_u} e^{s_j}}
       + \lambda \|w\|^2

    f are the scores of models and baselines, and one more that is 1 for items of the history. t are the items
    that followed in validation, and N are items drawn evenly from the catalogue, or all if there are few. So
    the weights are those with which the right item is likeliest; no test item takes part.

    Attributes:
      names: The scorers, by name, and `SEEN`.
      weights: (names,).
      means: (names,) μ.
      deviations: (names,) σ.
    """

    names: Sequence[str]
    weights: Floats
    means: Floats
    deviations: Floats

    @classmethod
    def fit(cls, scorers: Mapping[str, Scorer], asked: Asked, items: int, seed: int = 0) -> Blend:
        """Fit the weights to validation.

        Args:
          scorers: Name -> scorer.
          asked: The validation part; if it has more than `MOST_USERS`, so many are drawn.
          items: The size of the catalogue.
          seed: Of the draws.
        """
        random = np.random.default_rng(seed)
        if len(asked) > MOST_USERS:
            asked = asked.choose(np.sort(random.permutation(len(asked))[:MOST_USERS]))
        known = asked.targets.items >= 0
        owner, targets = asked.targets.owner[known], asked.targets.items[known]
        drawn = (
            np.arange(items)
            if items <= MOST_NEGATIVES
            else np.sort(random.permutation(items)[:MOST_NEGATIVES])
        )
        of_drawn, of_targets = [], []
        for name in (*scorers, SEEN):
            own, right = [], []
            # Scores of few users at once, of which only the drawn items are kept.
            for begin in range(0, len(asked), 256):
                part = asked.histories.choose(slice(begin, begin + 256))
                scores = _seen(part, items) if name == SEEN else scorers[name].scores(part)
                mine = (owner >= begin) & (owner < begin + 256)
                own.append(np.asarray(scores[:, drawn], np.float32))
                right.append(np.asarray(scores[owner[mine] - begin, targets[mine]], np.float32))
            of_drawn.append(np.concatenate(own))
            of_targets.append(np.concatenate(right))
        negatives, positives = np.stack(of_drawn, axis=-1), np.stack(of_targets, axis=-1)
        means, deviations = negatives.mean(axis=(0, 1)), np.maximum(negatives.std(axis=(0, 1)), 1e-6)
        negatives, positives = (negatives - means) / deviations, (positives - means) / deviations
        itself = drawn[np.newaxis] == targets[:, np.newaxis]

        def loss(weights: Floats) -> tuple[float, Floats]:
            value, gradient = _PENALTY * float(weights @ weights), 2 * _PENALTY * weights
            for begin in range(0, len(owner), 1024):
                some = slice(begin, begin + 1024)
                of_others = negatives[owner[some]]
                logits = np.where(itself[some], -np.inf, of_others @ weights)
                right = positives[some] @ weights
                highest = np.maximum(logits.max(axis=1), right)
                others, own = np.exp(logits - highest[:, np.newaxis]), np.exp(right - highest)
                total = others.sum(axis=1) + own
                value += float((np.log(total) + highest - right).sum()) / len(owner)
                shares = others / total[:, np.newaxis]
                expected = np.einsum("un,unm->m", shares, of_others)
                expected += ((own / total)[:, np.newaxis] * positives[some]).sum(axis=0)
                gradient = gradient + (expected - positives[some].sum(axis=0)) / len(owner)
            return value, gradient

        start = np.zeros(len(scorers) + 1)
        best = optimize.minimize(loss, start, jac=True, method="L-BFGS-B").x if len(owner) else start
        return cls((*scorers, SEEN), best, means.astype(np.float64), deviations.astype(np.float64))

    def of(self, scorers: Mapping[str, Scorer]) -> Scorer:
        """Return the blend of these scorers."""
        return Blended(self, scorers)

    def rows(self) -> Iterator[tuple[str, float, float, float]]:
        """Yield each name with its weight, mean and deviation; `SEEN` comes last."""
        numbers = (each.tolist() for each in (self.weights, self.means, self.deviations))
        return zip(self.names, *numbers, strict=True)

    def describe(self) -> str:
        """Return the weights as part of a sentence, the greatest first."""
        order = np.argsort(-np.abs(self.weights))
        return ", ".join(f"{self.names[each]} {self.weights[each]:+.2f}" for each in order)

    def to_json(self) -> dict[str, Any]:
        """Return the blend as JSON values."""
        numbers = {name: getattr(self, name).tolist() for name in ("weights", "means", "deviations")}
        return {"names": [*self.names], **numbers}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Blend:
        """Return the blend that `to_json` described."""
        numbers = [np.asarray(values[name], np.float64) for name in ("weights", "means", "deviations")]
        return cls(tuple(values["names"]), *numbers)


@dataclass(frozen=True)
class Blended:
    """A blend and what it weighs."""

    blend: Blend
    scorers: Mapping[str, Scorer]

    def scores(self, histories: Histories) -> Scores:
        """Weigh the scores for each history."""
        found: Any = 0.0
        for name, weight, mean, deviation in self.blend.rows():
            if name == SEEN:
                found[histories.owner, histories.items] += np.float32(weight / deviation)
            else:
                own = self.scorers[name].scores(histories) - np.float32(mean)
                found = found + np.float32(weight / deviation) * own
        return np.asarray(found, np.float32)


def _seen(histories: Histories, items: int) -> Scores:
    ones = np.ones(len(histories.items), np.float32)
    found = sparse.csr_matrix((ones, (histories.owner, histories.items)), (len(histories), items)).toarray()
    return np.minimum(found, 1.0)

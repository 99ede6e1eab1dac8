"""The blend: a softmax regression on the scores of models and baselines, fitted to validation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, sparse

from gmeta.experiment.baselines.task_rows import Floats, Ints
from gmeta.experiment.next_item.counting import Scorer, Scores
from gmeta.experiment.next_item.histories import Asked, Histories
from gmeta.experiment.next_item.ranked import Key, top, without_seen

SEEN = "seen"
"""The feature that is 1 for items of the history."""

MOST_USERS, MOST_NEGATIVES = 4096, 2048
FIRST = 50
"""Of sets, negatives are the items that some scorer has among its first so many."""

_PENALTY, _PENALTY_OF_SETS = 1e-3, 1e-2
_USERS = 256


@dataclass(frozen=True)
class Blend:
    r"""Scores that are a weighted sum of others' scores.

    .. math:: s_j = \sum_m w_m \frac{f_{mj} - \mu_m}{\sigma_m}, \quad
       w = \arg\min_w -\frac{1}{n} \sum_u \log \frac{e^{s_{t_u}}}{e^{s_{t_u}} + \sum_{j \in N_u} e^{s_j}}
       + \lambda \|w\|^2

    f are the scores of models and baselines, and one more that is 1 for items of the history. t are the
    target items of validation, and N are items drawn uniformly from the catalogue, or all items if there are
    few. So the weights maximise the likelihood of the right item; no test item is used.

    Where a user's items are a set, N are items that are neither the user's nor targets, and that some scorer
    ranks among its first `FIRST`: their order matters, but hardly affects a likelihood over the whole
    catalogue. Targets that no scorer ranks there don't count, and all users have the same weight.

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
    def fit(
        cls, scorers: Mapping[str, Scorer], asked: Asked, items: int, seed: int = 0, *, sets: bool = False
    ) -> Blend:
        """Fit the weights to the validation part.

        Args:
          scorers: Name -> scorer.
          asked: The validation part; at most `MOST_USERS` of its users are drawn.
          items: The size of the catalogue.
          seed: The seed of the draws.
          sets: Whether a user's items are a set.
        """
        random = np.random.default_rng(seed)
        if len(asked) > MOST_USERS:
            asked = asked.choose(np.sort(random.permutation(len(asked))[:MOST_USERS]))
        drawn = (
            np.arange(items)
            if items <= MOST_NEGATIVES
            else np.sort(random.permutation(items)[:MOST_NEGATIVES])
        )
        names = (*scorers, SEEN)
        parts = []
        for begin in range(0, len(asked), _USERS):  # few users at once; most scores are dropped
            part = asked.choose(slice(begin, begin + _USERS))
            scores = [
                with_floor(np.asarray(each.scores(part.histories), np.float32)) for each in scorers.values()
            ]
            kept = _first(scores, part) if sets else np.broadcast_to(drawn, (len(part), len(drawn)))
            scores.append(_seen(part.histories, items))
            parts.append(_Examples.of(scores, part, kept))
        found = _Examples.concatenate(parts, sets)
        means, deviations = found.standardize()
        start = np.zeros(len(names))
        loss = functools.partial(found.loss, penalty=_PENALTY_OF_SETS if sets else _PENALTY)
        best = optimize.minimize(loss, start, jac=True, method="L-BFGS-B").x if len(found.owner) else start
        return cls(names, best, means, deviations)

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
    """A blend and the scorers that it weighs."""

    blend: Blend
    scorers: Mapping[str, Scorer]

    def scores(self, histories: Histories) -> Scores:
        """Weigh the scores for each history."""
        return self.weigh(histories, lambda scorer: scorer.scores(histories))

    def weigh(self, histories: Histories, scores: Callable[[Scorer], Scores]) -> Scores:
        """Weigh the scores that a function returns for each scorer."""
        found: Any = 0.0
        for name, weight, mean, deviation in self.blend.rows():
            if name == SEEN:
                found[histories.owner, histories.items] += np.float32(weight / deviation)
            else:
                own = with_floor(scores(self.scorers[name])) - np.float32(mean)
                found = found + np.float32(weight / deviation) * own
        return np.asarray(found, np.float32)


def with_floor(scores: Scores) -> Scores:
    """Replace -inf, the score of items that a search misses, by the user's lowest other score."""
    absent = np.isneginf(scores)
    if not absent.any():
        return scores
    lowest = np.where(absent, np.inf, scores).min(axis=1, keepdims=True)
    return np.where(absent, np.where(np.isposinf(lowest), np.float32(0), lowest), scores)


def scores_of_all(scorers: Mapping[Key, Scorer], histories: Histories) -> Iterator[tuple[Key, Scores]]:
    """Yield the scores of each scorer; compute only once the scores that several blends use."""
    known: dict[int, Scores] = {}

    def scores(scorer: Scorer) -> Scores:
        if id(scorer) not in known:
            known[id(scorer)] = scorer.scores(histories)
        return known[id(scorer)]

    for key, scorer in scorers.items():
        yield key, scorer.weigh(histories, scores) if isinstance(scorer, Blended) else scores(scorer)


def _seen(histories: Histories, items: int) -> Scores:
    ones = np.ones(len(histories.items), np.float32)
    found = sparse.csr_matrix((ones, (histories.owner, histories.items)), (len(histories), items)).toarray()
    return np.minimum(found, 1.0)


@dataclass
class _Examples:
    """The data to fit weights to: the scores of right items, and of each user's negatives.

    Attributes:
      negatives: (users, width, names).
      numbers: (users, width) the negatives' items; -1 where there is none.
      owner: (targets,) the user of each right item.
      targets: (targets,) the items.
      positives: (targets, names).
      shares: (targets,) the weight of each; their sum is 1.
    """

    negatives: NDArray[np.floating[Any]]
    numbers: Ints
    owner: Ints
    targets: Ints
    positives: NDArray[np.floating[Any]]
    shares: Floats

    @classmethod
    def of(cls, scores: Sequence[Scores], part: Asked, kept: Ints) -> _Examples:
        """Return the examples of some users, with the negatives ``kept``, (users, width), padded with -1."""
        known = part.targets.items >= 0
        owner, targets = part.targets.owner[known], part.targets.items[known]
        chosen = np.maximum(kept, 0)
        negatives = np.stack([np.take_along_axis(each, chosen, axis=1) for each in scores], axis=-1)
        positives = np.stack([each[owner, targets] for each in scores], axis=-1)
        return cls(negatives, kept, owner, targets, positives, np.ones(len(owner)))

    @classmethod
    def concatenate(cls, parts: Sequence[_Examples], sets: bool) -> _Examples:
        """Join parts; with sets, a user's right items aren't negatives, and users have equal weights."""
        width = max(each.numbers.shape[1] for each in parts)
        rest = [width - each.numbers.shape[1] for each in parts]
        begins = np.cumsum([0, *(len(each.numbers) for each in parts)])
        found = cls(
            np.concatenate(
                [
                    np.pad(each.negatives, [(0, 0), (0, n), (0, 0)])
                    for each, n in zip(parts, rest, strict=True)
                ]
            ),
            np.concatenate(
                [
                    np.pad(each.numbers, [(0, 0), (0, n)], constant_values=-1)
                    for each, n in zip(parts, rest, strict=True)
                ]
            ),
            np.concatenate([each.owner + begin for each, begin in zip(parts, begins[:-1], strict=True)]),
            np.concatenate([each.targets for each in parts]),
            np.concatenate([each.positives for each in parts]),
            np.concatenate([each.shares for each in parts]),
        )
        if sets:
            itself = found.numbers[found.owner] == found.targets[:, np.newaxis]
            within = itself.any(axis=1)
            found.numbers[found.owner[within], itself[within].argmax(axis=1)] = -1
            found.owner, found.targets = found.owner[within], found.targets[within]
            found.positives = found.positives[within]
            count = np.bincount(found.owner, minlength=len(found.numbers))
            found.shares = 1 / count[found.owner]
        found.shares = found.shares / max(found.shares.sum(), 1)
        return found

    def standardize(self) -> tuple[Floats, Floats]:
        """Scale the negatives' scores to mean 0 and deviation 1; return the original means and deviations."""
        there = self.negatives[self.numbers >= 0]
        if not len(there):
            there = np.zeros((1, self.negatives.shape[-1]))
        means, deviations = there.mean(axis=0), np.maximum(there.std(axis=0), 1e-6)
        self.negatives = (self.negatives - means) / deviations
        self.positives = (self.positives - means) / deviations
        return means.astype(np.float64), deviations.astype(np.float64)

    def loss(self, weights: Floats, penalty: float) -> tuple[float, Floats]:
        """Compute the objective that `Blend` minimizes, and its gradient."""
        value, gradient = penalty * float(weights @ weights), 2 * penalty * weights
        for begin in range(0, len(self.owner), 1024):
            some = slice(begin, begin + 1024)
            of_others, numbers = self.negatives[self.owner[some]], self.numbers[self.owner[some]]
            absent = (numbers == self.targets[some, np.newaxis]) | (numbers < 0)
            logits = np.where(absent, -np.inf, of_others @ weights)
            right = self.positives[some] @ weights
            highest = np.maximum(logits.max(axis=1), right)
            others, own = np.exp(logits - highest[:, np.newaxis]), np.exp(right - highest)
            total, share = others.sum(axis=1) + own, self.shares[some]
            value += float((share * (np.log(total) + highest - right)).sum())
            expected = np.einsum("un,unm->um", others / total[:, np.newaxis], of_others)
            expected += (own / total)[:, np.newaxis] * self.positives[some]
            gradient = gradient + share @ (expected - self.positives[some])
        return value, gradient


def _first(scores: Sequence[Scores], part: Asked) -> Ints:
    """Return the items that some scorer ranks among its first for a user who doesn't have them.

    Returns:
      (users, width) numbers, padded with -1.
    """
    chosen = np.zeros(scores[0].shape, bool)
    for each in scores:
        best = top(without_seen(each, part.histories), FIRST)
        rows = np.broadcast_to(np.arange(len(best))[:, np.newaxis], best.shape)
        chosen[rows[best >= 0], best[best >= 0]] = True
    order = np.argsort(~chosen, axis=1, kind="stable")[:, : int(chosen.sum(axis=1).max())]
    return np.where(np.take_along_axis(chosen, order, axis=1), order, -1)

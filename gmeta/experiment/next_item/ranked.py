"""Metrics of ranked catalogues: the ranks of the target items, user by user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import sparse, stats

from gmeta.experiment.baselines.task_rows import Floats, Ints
from gmeta.experiment.next_item.counting import Pairs, Scorer, Scores, sets_of
from gmeta.experiment.next_item.histories import Asked, Histories

_CELLS, _CELLS_OF_ALL = 1 << 24, 1 << 27  # scores in memory at once, of one scorer and of all
_TIE = 1 - 1e-6  # sums that differ by less are ties, because the difference is rounding
Key = TypeVar("Key")
OF_USERS = ("hr", "recall", "precision", "ndcg", "map")
"""Metrics at k that each user has; a table has their means."""


def blocks(asked: Asked, items: int, width: int = 1) -> Iterator[tuple[slice, Asked]]:
    """Yield the users in blocks whose scores, of ``width`` scorers, fit in memory."""
    size = max(min(_CELLS, _CELLS_OF_ALL // width) // max(items, 1), 1)
    for begin in range(0, len(asked), size):
        chosen = slice(begin, begin + size)
        yield chosen, asked.choose(chosen)


def without_seen(scores: Scores, histories: Histories) -> Scores:
    """Return the scores with -inf for the items of the histories."""
    found = np.array(scores, np.float32)
    found[histories.owner, histories.items] = -np.inf
    return found


@dataclass(frozen=True)
class Ranked:
    """The ranks of targets, and the items shown.

    Attributes:
      ranks: (targets,) the rank of each target among all items, from 1; ties count against it. An item that
        isn't in the catalogue, or that is left out as seen, has the rank ``inf``.
      owner: (targets,) the place of each target's user.
      users: The number of users.
      shown: (users, k) the items that each user would be shown.
    """

    ranks: Floats
    owner: Ints
    users: int
    shown: Ints

    def of_users(self, k: int) -> dict[str, Floats]:
        r"""Compute the metrics at k of each user, (users,).

        With T targets, of which h are among the first k, at the ranks r: ``hr`` is 1 if h > 0, ``recall`` is
        h / T, ``precision`` is h / k, ``ndcg`` is :math:`\sum_r 1/\log_2(r+1)` divided by that of the best
        order, and ``map`` is the mean over min(T, k) of the precision at each hit. ``mrr`` is 1 / r of the
        first target.
        """
        count = np.bincount(self.owner, minlength=self.users)
        hit = self.ranks <= k
        hits = np.bincount(self.owner, hit, minlength=self.users)
        gains = np.bincount(self.owner, np.where(hit, 1 / np.log2(self.ranks + 1), 0.0), minlength=self.users)
        best = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(2, k + 2)))])
        order = np.lexsort((self.ranks, self.owner))
        begin = np.searchsorted(self.owner[order], np.arange(self.users))
        nth = np.arange(len(order)) - np.repeat(begin, count) + 1
        precisions = np.bincount(
            self.owner[order], np.where(hit[order], nth / self.ranks[order], 0.0), minlength=self.users
        )
        first = np.full(self.users, np.inf)
        np.minimum.at(first, self.owner, self.ranks)
        asked = np.maximum(count, 1)
        return {
            "hr": (hits > 0).astype(np.float64),
            "recall": hits / asked,
            "precision": hits / k,
            "ndcg": gains / best[np.minimum(asked, k)],
            "map": precisions / np.minimum(asked, k),
            "mrr": 1 / first,
        }

    def metrics(self, ks: Sequence[int], counts: Ints) -> dict[str, float]:
        """Compute all metrics of a table.

        Args:
          ks: The numbers of items shown.
          counts: (items,) how often each item occurs in training.

        Returns:
          The means of `of_users`, as ``"hr@10"`` and so on, and ``"mrr"``; for the items shown at the
          greatest k, ``"coverage"``: the share of the catalogue that is shown to any user; ``"novelty"``: the
          mean of -log2 of their shares of training events; ``"popular"``: the share that is among the tenth
          of items with the most events.
        """
        found: dict[str, float] = {}
        for k in ks:
            own = self.of_users(k)
            found |= {f"{name}@{k}": float(own[name].mean()) for name in OF_USERS}
            found["mrr"] = float(own["mrr"].mean())
        shown = self.shown[:, : max(ks)].ravel()
        shown = shown[shown >= 0]
        share = (counts + 1) / (counts.sum() + len(counts))
        popular = np.zeros(len(counts), bool)
        popular[np.argsort(-counts, kind="stable")[: max(len(counts) // 10, 1)]] = True
        return found | {
            "coverage": len(np.unique(shown)) / len(counts),
            "novelty": float(-np.log2(share[shown]).mean()) if len(shown) else np.nan,
            "popular": float(popular[shown].mean()) if len(shown) else np.nan,
        }


def rank(scorer: Scorer, asked: Asked, items: int, *, seen: bool, shown: int) -> Ranked:
    """Rank the catalogue for each user, and find the targets.

    Args:
      scorer: The scorer.
      asked: Histories and targets.
      items: The size of the catalogue.
      seen: Whether items of the history are ranked too.
      shown: How many items are shown.
    """
    return rank_all(
        lambda histories: [(0, scorer.scores(histories))], asked, items, seen=[seen], shown=shown
    )[seen][0]


def rank_all(
    scores: Callable[[Histories], Iterable[tuple[Key, Scores]]],
    asked: Asked,
    items: int,
    *,
    seen: Sequence[bool],
    shown: int,
    width: int = 1,
) -> dict[bool, dict[Key, Ranked]]:
    """Rank the catalogue as `rank` does, by several scorers, with and without seen items.

    Args:
      scores: Returns the scores of some histories by each scorer, as
        `gmeta.experiment.next_item.blend.scores_of_all` does.
      asked: Histories and targets.
      items: The size of the catalogue.
      seen: Whether items of the history are ranked too: one value or both.
      shown: How many items are shown.
      width: The number of scorers, which share the memory of scores.

    Returns:
      An element of ``seen`` -> the scorer's key -> the ranks.
    """
    ranks: dict[tuple[bool, Key], list[Floats]] = {}
    tops: dict[tuple[bool, Key], list[Ints]] = {}
    for _, part in blocks(asked, items, width):
        for key, found in scores(part.histories):
            for each in seen:
                own = np.asarray(found, np.float32) if each else without_seen(found, part.histories)
                ranks.setdefault((each, key), []).append(_places(own, part.targets))
                tops.setdefault((each, key), []).append(top(own, shown))
    ranked: dict[bool, dict[Key, Ranked]] = {each: {} for each in seen}
    for (each, key), places in ranks.items():
        ranked[each][key] = Ranked(
            np.concatenate(places), asked.targets.owner, len(asked), np.concatenate(tops[each, key])
        )
    return ranked


def _places(scores: Scores, targets: Histories) -> Floats:
    """Return the rank of each target among its user's scores; `inf` if its score isn't finite."""
    owner = targets.owner
    own = np.where(targets.items >= 0, scores[owner, np.maximum(targets.items, 0)], -np.inf)
    found = np.full(len(own), np.inf)
    for place in np.flatnonzero(own > -np.inf):
        found[place] = np.count_nonzero(scores[owner[place]] >= own[place])
    return found


def ndcg(scorer: Scorer, asked: Asked, items: int, *, seen: bool, k: int) -> float:
    """Compute the mean NDCG at k, with fewer steps than `rank` where scores are sparse."""
    if isinstance(scorer, Pairs) and scorer.log and sparse.issparse(scorer.matrix):
        parts = [_sparse_places(scorer, part, seen) for _, part in blocks(asked, items)]
        nothing = np.zeros((len(asked), 0), np.int64)
        ranked = Ranked(np.concatenate(parts), asked.targets.owner, len(asked), nothing)
    else:
        ranked = rank(scorer, asked, items, seen=seen, shown=0)
    return float(ranked.of_users(k)["ndcg"].mean())


def _sparse_places(scorer: Pairs, part: Asked, seen: bool) -> Floats:
    """Return `_places` of a part from the nonzero sums; an item whose sum is 0 has the last rank."""
    sums = scorer.sums(part.histories)
    owner, targets = part.targets.owner, part.targets.items
    known = targets >= 0
    last = np.full(len(part), sums.shape[1])
    if not seen:
        own = sets_of(part.histories, sums.shape[1])
        known[known] = _at(own, owner[known], targets[known]) == 0
        last -= np.diff(own.indptr)
        sums = sums - sums.multiply(own)
    found = np.full(len(targets), np.inf)
    values = _at(sums, owner[known], targets[known])
    for place, value in zip(np.flatnonzero(known), values, strict=True):
        row = owner[place]
        others = sums.data[sums.indptr[row] : sums.indptr[row + 1]]
        found[place] = np.count_nonzero(others >= value * _TIE) if value > 0 else last[row]
    return found


def _at(matrix: Any, rows: Ints, columns: Ints) -> Floats:
    """Return elements of a sparse matrix; for no elements, SciPy returns another type."""
    return np.asarray(matrix[rows, columns]).ravel() if len(rows) else np.zeros(0)


def top(scores: Scores, k: int) -> Ints:
    """Return the k items with the highest scores, (users, k), the highest first, padded with -1."""
    k = min(k, scores.shape[1])
    if not k:
        return np.zeros((len(scores), 0), np.int64)
    chosen = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    own = np.take_along_axis(scores, chosen, axis=1)
    order = np.lexsort((chosen, -own), axis=1)
    found = np.take_along_axis(chosen, order, axis=1)
    return np.where(np.take_along_axis(own, order, axis=1) > -np.inf, found, -1)


def interval(
    one: NDArray[np.float64], other: NDArray[np.float64], draws: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Return the mean difference of two methods over the same users, and its 95% interval by bootstrap.

    Args:
      one: (users,) a metric of each user, or (seeds, users).
      other: Likewise.
      draws: How many samples of users are drawn.
      seed: The seed of the draws.
    """
    difference = np.atleast_2d(one).mean(axis=0) - np.atleast_2d(other).mean(axis=0)
    mean = float(difference.mean())
    if len(difference) < 2:
        return mean, -np.inf, np.inf
    found = stats.bootstrap(
        (difference,),
        np.mean,
        n_resamples=draws,
        batch=max(_CELLS // len(difference), 1),
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return mean, float(found.low), float(found.high)

"""Metrics of ranked catalogues: where the items that are asked for stand, user by user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from gmeta.experiment.baselines.task_rows import Floats, Ints
from gmeta.experiment.next_item.counting import Scorer, Scores
from gmeta.experiment.next_item.histories import Asked, Histories

_CELLS = 1 << 24  # scores at once
OF_USERS = ("hr", "recall", "precision", "ndcg", "map")
"""Metrics at k that each user has; a table has their means."""


def blocks(asked: Asked, items: int) -> Iterator[tuple[slice, Asked]]:
    """Yield the users in blocks whose scores fit in memory."""
    size = max(_CELLS // max(items, 1), 1)
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
    """Where targets stand, and what is shown.

    Attributes:
      ranks: (targets,) the rank of each target among all items, from 1; ties count against it. An item that
        the catalogue lacks, or that is left out as seen, has the rank ``inf``.
      owner: (targets,) the place of each target's user.
      users: How many users were asked.
      shown: (users, k) the items that each user would be shown.
    """

    ranks: Floats
    owner: Ints
    users: int
    shown: Ints

    def of_users(self, k: int) -> dict[str, Floats]:
        r"""Compute the metrics at k of each user, (users,).

        With T targets, of which h are among the first k, at the ranks r: ``hr`` is 1 if h > 0, ``recall`` is
        h / T, ``precision`` h / k, ``ndcg`` is :math:`\sum_r 1/\log_2(r+1)` over that of the best order, and
        ``map`` the mean over min(T, k) of the precision at each hit. ``mrr`` is 1 / r of the first target.
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
          The means of `of_users`, as ``"hr@10"`` and so on, and ``"mrr"``; of the items shown at the greatest
          k, ``"coverage"``: the share of the catalogue that is shown to anyone; ``"novelty"``: the mean of
          -log2 of their shares of training events; ``"popular"``: the share that is among the tenth of items
          with most events.
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
      scorer: What gives scores.
      asked: Histories and targets.
      items: The size of the catalogue.
      seen: Whether items of the history are ranked too.
      shown: How many items are shown.
    """
    ranks, tops = [], []
    for _, part in blocks(asked, items):
        scores = np.asarray(scorer.scores(part.histories), np.float32)
        if not seen:
            scores = without_seen(scores, part.histories)
        tops.append(top(scores, shown))
        owner, targets = part.targets.owner, part.targets.items
        own = np.where(targets >= 0, scores[owner, np.maximum(targets, 0)], -np.inf)
        found = np.full(len(targets), np.inf)
        for place in np.flatnonzero(own > -np.inf):
            found[place] = np.count_nonzero(scores[owner[place]] >= own[place])
        ranks.append(found)
    return Ranked(np.concatenate(ranks), asked.targets.owner, len(asked), np.concatenate(tops))


def top(scores: Scores, k: int) -> Ints:
    """Return the k items with the highest scores, (users, k), the highest first; -1 where none is left."""
    k = min(k, scores.shape[1])
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
      seed: Of the draws.
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

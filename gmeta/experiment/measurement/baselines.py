r"""Baselines without a network: an item's mean label, and the sum of mean, item bias and user bias.

:math:`\mu` is the mean of all training labels. Item i has :math:`n_i` training labels, and task t has
:math:`n_t` support labels:

.. math:: b_i = \frac{\sum_{r \in i} (y_r - \mu)}{n_i + d_i}, \quad
   b_t = \frac{\sum_{r \in S_t} (y_r - \mu - b_i)}{n_t + d_t}, \quad \hat y = \mu + b_i + b_t

The damping d pulls the mean of a few rows towards the mean of all. A new task is known only by its support
set. The baselines see this set, as the methods do when they take their steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.experiment.measurement.cold_start import Floats

ITEM_DAMPING, TASK_DAMPING = 10.0, 5.0


@dataclass(frozen=True)
class ItemMeans:
    """Label statistics of the items in the training rows.

    Attributes:
      mean: The mean of all labels.
      items: (items,) their ids, in ascending order.
      sums: (items,) sums of their labels.
      counts: (items,) how many labels they have.
    """

    mean: float
    items: NDArray[np.int64]
    sums: Floats
    counts: Floats

    @classmethod
    def of(cls, batches: Iterable[Mapping[str, Any]], item: str | None, positive: float | None) -> ItemMeans:
        """Compute the statistics of all rows in the given batches of tasks.

        Args:
          batches: Batches as `gmeta.io.tasks` yields them.
          item: The column of items; None: all rows belong to one item.
          positive: A label of at least this value counts as 1, any other as 0. None: labels stay as they are.
        """
        items, labels = [np.zeros(0, np.int64)], [np.zeros(0)]
        for batch in batches:
            labels.append(_labels(batch, positive))
            items.append(_items(batch, item))
        known, position = np.unique(np.concatenate(items), return_inverse=True)
        values = np.concatenate(labels)
        sums, counts = np.bincount(position, weights=values), np.bincount(position)
        return cls(float(values.mean()), known, sums.astype(np.float64), counts.astype(np.float64))

    def of_items(self, items: NDArray[np.int64], damping: float = 0.0) -> Floats:
        """Return the damped mean of each item; an item without labels gets the mean of all labels."""
        found = np.minimum(np.searchsorted(self.items, items), len(self.items) - 1)
        known = self.items[found] == items
        damped = (self.sums[found] + damping * self.mean) / (self.counts[found] + damping)
        return np.where(known, damped, self.mean)


def item_means(
    means: ItemMeans, batches: Iterable[Mapping[str, Any]], item: str | None, damping: float = 0.0
) -> Floats:
    """Return the mean of each query row's item, task after task."""
    return np.concatenate([means.of_items(_items(batch, item)[_query(batch)], damping) for batch in batches])


def biases(
    means: ItemMeans, batches: Iterable[Mapping[str, Any]], item: str | None, positive: float | None
) -> Floats:
    """Return mean + item bias + task bias for each query row, task after task."""
    parts = []
    for batch in batches:
        of_item = means.of_items(_items(batch, item), ITEM_DAMPING)
        rest = _labels(batch, positive) - of_item
        mask, index = batch["support"]["mask"].numpy() > 0, batch["support"]["index"].numpy()
        own = np.where(mask, rest[index] if rest.size else 0.0, 0.0).sum(1) / (mask.sum(1) + TASK_DAMPING)
        query = batch["query"]["mask"].numpy() > 0
        parts.append(of_item[_query(batch)] + np.repeat(own, query.sum(axis=1)))
    return np.concatenate(parts)


def as_logits(rates: Floats, least: float = 1e-3) -> Floats:
    """Convert rates to logits, clipped to ``least`` and ``1 - least``: few rows make no event certain."""
    cut = np.clip(rates, least, 1 - least)
    return np.log(cut) - np.log1p(-cut)


def _labels(batch: Mapping[str, Any], positive: float | None) -> Floats:
    labels = batch["label"].numpy().astype(np.float64)
    return labels if positive is None else (labels >= positive).astype(np.float64)


def _items(batch: Mapping[str, Any], item: str | None) -> NDArray[np.int64]:
    if item is None:
        return np.zeros(len(batch["label"]), np.int64)
    return np.asarray(batch["features"][item])


def _query(batch: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return the indices of the query rows, task after task."""
    return np.asarray(batch["query"]["index"].numpy()[batch["query"]["mask"].numpy() > 0])

"""Ranks exposures by two counts: a category's share of a history, and how often an item was clicked."""

from __future__ import annotations

from typing import NamedTuple

from gmeta.metrics import UserGAUC

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

_WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
_PRIOR = 20.0  # exposures of the mean item that are added to every item's own
LABELS = {"ctr": "click", "ctcvr": "buy"}
Floats = NDArray[np.float64]


class _Counted(NamedTuple):
    """A split's exposures: users, log shares of the exposures' categories, items, and labels."""

    users: NDArray[np.int64]
    shares: Floats
    items: NDArray[np.int64]
    labels: dict[str, NDArray[np.float32]]


def rank_by_counts(
    train: tf.data.Dataset, validation: tf.data.Dataset, test: tf.data.Dataset
) -> dict[str, float]:
    """Return the GAUC on validation and test users, as in a row of `parts.exposure_rankers.train`.

    The score is ``log CTR(item) + a log((n(category) + 1) / (n + categories))``; a is the best weight on the
    validation users.
    """
    known, chosen, measured = (_count(split) for split in (train, validation, test))
    found: dict[str, float] = {}
    for task, label in LABELS.items():
        rates = _rates(known.items, known.labels[label])
        _, weight = max((_gauc(chosen, rates, weight, label), weight) for weight in _WEIGHTS)
        found[f"validation_gauc_{task}"] = _gauc(chosen, rates, weight, label)
        found[f"gauc_{task}"] = _gauc(measured, rates, weight, label)
        found[f"weight_{task}"] = weight
    return found


def _count(batches: tf.data.Dataset) -> _Counted:
    users, shares, items = [], [], []
    labels: dict[str, list[NDArray[np.float32]]] = {label: [] for label in LABELS.values()}
    for batch in batches:
        history, targets = batch["history"]["category"], batch["targets"]
        wanted, of = targets["category"].values.numpy(), targets["category"].value_rowids().numpy()
        events, event_of = history.values.numpy(), history.value_rowids().numpy()
        width = int(max(events.max(initial=0), wanted.max(initial=0))) + 1
        rows = int(history.nrows())
        counts = np.bincount(event_of * width + events, minlength=rows * width).reshape(rows, width)
        shares.append(np.log((counts[of, wanted] + 1) / (counts.sum(axis=1) + width)[of]))
        users.append(batch["task"].numpy()[of])
        items.append(targets["item"].values.numpy())
        for label, own in labels.items():
            own.append(batch["labels"][label].values.numpy())
    joined = {label: np.concatenate(own) for label, own in labels.items()}
    return _Counted(np.concatenate(users), np.concatenate(shares), np.concatenate(items), joined)


def _rates(items: NDArray[np.int64], label: NDArray[np.float32]) -> Floats:
    """(items + 1,) the log of each item's click rate; the last one is the mean's, for items never shown."""
    mean = max(float(label.mean()), 1e-6)
    shown = np.bincount(items, minlength=items.max() + 2)
    return np.log((np.bincount(items, label, len(shown)) + _PRIOR * mean) / (shown + _PRIOR))


def _gauc(of: _Counted, rates: Floats, weight: float, label: str) -> float:
    scores = rates[np.minimum(of.items, len(rates) - 1)] + weight * of.shares
    metric = UserGAUC()
    metric.update_state(of.labels[label], scores.astype(np.float32), of.users)
    return float(metric.result())

"""Batches of the GRM's benchmark: users whose sequences have a long tail, ids by Zipf's law."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gmeta.io import SequenceCost

import numpy as np
import tensorflow as tf
from parts.balance_lengths import Lengths, balanced, lengths
from parts.exchange.ids import FEATURE_BITS, ZipfIds

CONTEXTS, EVENT, SHOWN = (
    ("user", "city"),
    ("item", "shop", "category", "action"),
    ("item", "shop", "category"),
)
VOCABULARIES = {
    "user": 10_000_000,
    "city": 400,
    "item": 10_000_000,
    "shop": 1_000_000,
    "category": 10_000,
    "action": 8,
}
_GAP = 6 * 3600.0  # seconds between two events, on average
_CLICKED, _BOUGHT = 0.1, 0.2  # of the exposures, and of the clicks

Batch = dict[str, Any]


class Users:
    """Draws batches of users.

    Ids are read from pools that are drawn once: a batch has a piece of each feature's pool, from a random
    place.

    Args:
      seed: The seed; each rank has its own.
      exposures: The exposures of a user, which end its sequence; contexts begin it.
      pool: The number of ids of a feature in the pool; a batch has no more tokens.
      most: The largest vocabulary; a limit for small sizes.
    """

    def __init__(self, seed: int, exposures: int, pool: int, most: int) -> None:
        self._random = np.random.default_rng([2, seed])
        self._exposures = exposures
        draw = ZipfIds(tuple(min(size, most) for size in VOCABULARIES.values()), seed)
        low = (1 << FEATURE_BITS) - 1
        self._pools = dict(zip(VOCABULARIES, (keys & low for keys in draw.batch(pool)), strict=True))

    def batch(self, tokens: Lengths) -> Batch:
        """Draw a batch of users with these numbers of tokens, as `gmeta.models.GRM` reads it."""
        shown = np.full(len(tokens), self._exposures)
        history = tokens - len(CONTEXTS) - shown
        last = np.arange((history + shown).sum()) - np.repeat(
            np.cumsum(history + shown) - shown, history + shown
        )
        times = np.cumsum(self._random.exponential(_GAP, len(last))).astype(np.int64)
        clicked = self._random.random(shown.sum()) < _CLICKED
        bought = clicked & (self._random.random(shown.sum()) < _BOUGHT)
        with tf.device("CPU:0"):  # where a reader's batches are
            return {
                "task": tf.constant(self._random.integers(0, 1 << 40, len(tokens))),
                "contexts": {name: tf.constant(self._ids(name, len(tokens))) for name in CONTEXTS},
                "history": {
                    **{name: _ragged(self._ids(name, history.sum()), history) for name in EVENT},
                    "time": _ragged(times[last < 0], history),
                },
                "targets": {
                    **{name: _ragged(self._ids(name, shown.sum()), shown) for name in SHOWN},
                    "time": _ragged(times[last >= 0], shown),
                },
                "labels": {
                    name: _ragged(found.astype(np.float32), shown)
                    for name, found in (("click", clicked), ("buy", bought))
                },
            }

    def _ids(self, name: str, count: int) -> np.ndarray:
        pool = self._pools[name]
        if count > len(pool):
            raise ValueError(f"a batch has {count} ids of {name!r}, and the pool {len(pool)}")
        first = self._random.integers(0, len(pool) - count + 1)
        return pool[first : first + count]


def pairwise(batch: Batch) -> Batch:
    """Make a user of each exposure of a batch, with a copy of its user's contexts and history."""
    shown = batch["targets"]["item"].row_lengths()
    with tf.device("CPU:0"):
        of_user = tf.repeat(tf.range(tf.size(shown, tf.int64)), shown)
        one = tf.ones_like(of_user)
        alone = {
            part: {name: tf.RaggedTensor.from_row_lengths(column.values, one) for name, column in own.items()}
            for part, own in batch.items()
            if part in ("targets", "labels")
        }
        copied = {name: batch[name] for name in ("task", "contexts", "history")}
        return {**tf.nest.map_structure(lambda column: tf.gather(column, of_user), copied), **alone}


def draw(seed: list[int], users: int, settings: Mapping[str, Any]) -> Lengths:
    """Draw users' lengths in tokens: each has at least its contexts, an event and its exposures."""
    drawn = lengths(np.random.default_rng(seed), users, settings["mean"], settings["longest"])
    return drawn.clip(len(CONTEXTS) + settings["exposures"] + 1, None)


def lengths_of(
    rank: int, settings: Mapping[str, Any], costs: Mapping[str, SequenceCost] | None = None
) -> dict[str, list[Lengths]]:
    """Way -> the lengths of a rank's batches: ``fixed`` and ``balanced``, of equal mean tokens.

    Args:
      rank: The rank's number; each has its own sequences.
      settings: ``sequences`` of a batch, ``mean`` and ``longest`` of the lengths, ``exposures`` of a user,
        and the number of ``batches``.
      costs: Further ways -> the cost of a sequence; their batches have about equal cost.
    """
    sequences, count = settings["sequences"], settings["batches"]
    own = draw([1, rank], sequences * (count + 10), settings)
    many = draw([0], 100_000, settings)
    fixed = list(own[: count * sequences].reshape(count, sequences))
    ways = {"balanced": SequenceCost(), **(costs or {})}
    return {
        "fixed": fixed,
        **{way: balanced(own, by, float(by.of(many).mean()) * sequences, count) for way, by in ways.items()},
    }


def _ragged(values: np.ndarray, of: Lengths) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_lengths(values, of)

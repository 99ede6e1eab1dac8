"""The operations of the soak: operation number n is a pure function of (seed, n).

So a table that was killed and restored at operation m continues with operation m, and must reach the state of
a reference that ran them all once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gmeta.ops as ops
from gmeta import initializers, optimizers, policies
from gmeta.policies.row_lifetimes import Admission, Eviction
from support.reference.table import ReferenceHashTable

import numpy as np

LEARNING_RATE = 0.5
"""With small whole gradients, sums of SGD are exact, in whatever order."""

_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd, so a bijection of 64-bit words
_EXTREMES = np.array([-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 2, 2**63 - 1])


@dataclass(frozen=True)
class Profile:
    """A table, and whether it must equal the reference to the last bit or within rounding."""

    name: str
    dim: int
    optimizer: optimizers.SparseOptimizer
    initializer: initializers.Initializer
    admission: Admission | None = None
    eviction: Eviction | None = None
    precision: policies.TwoPrecisions | None = None
    exact: bool = True

    def settings(self) -> dict[str, Any]:
        """The arguments of `HashTable` and of `ReferenceHashTable` alike."""
        names = ("dim", "optimizer", "initializer", "admission", "eviction", "precision")
        return {name: getattr(self, name) for name in names}


_SGD, _ONES = optimizers.SGD(LEARNING_RATE), initializers.Constant(1.0)
_MOMENTUM = optimizers.Momentum(LEARNING_RATE, momentum=0.5)
WHOLE = (
    Profile("plain", 8, _SGD, initializers.Uniform(-1, 1)),
    Profile("count+lru", 3, _SGD, _ONES, policies.CountAdmission(2), policies.LRU(max_rows=6000)),
    Profile(
        "bloom+ttl",
        3,
        _SGD,
        _ONES,
        policies.CountAdmission(2, policies.Bloom(4000)),
        policies.TTL(steps=40, every=7),
    ),
    Profile("mixed", 5, _MOMENTUM, initializers.Uniform(-1, 1), precision=policies.TwoPrecisions(8)),
    Profile("adam", 4, optimizers.Adam(0.01), initializers.Normal(0, 1), exact=False),
)
"""Tables that `tf.train.Checkpoint` saves."""
SHARDED = (
    Profile("plain", 8, _SGD, _ONES),
    Profile(
        "chance+lfu", 3, _SGD, _ONES, policies.ProbabilityAdmission(0.4), policies.LFU(max_bytes=400_000)
    ),
    Profile("norm", 3, _SGD, _ONES, eviction=policies.MinNorm(threshold=1.0, every=9)),
    Profile("count", 3, _SGD, _ONES, policies.CountAdmission(3)),
    Profile(
        "bloom+lru",
        3,
        _SGD,
        _ONES,
        policies.CountAdmission(2, policies.Bloom(4000)),
        policies.LRU(max_rows=6000),
    ),
    Profile(
        *("mixed+lru", 5, _MOMENTUM, initializers.Uniform(-1, 1)),
        eviction=policies.LRU(max_bytes=400_000),
        precision=policies.TwoPrecisions(4),
    ),
    Profile("adagrad", 4, optimizers.Adagrad(0.1), initializers.Normal(0, 1), exact=False),
)
"""Tables in sharded checkpoints, full and incremental."""


class Trace:
    """The operations on one table.

    Args:
      seed: The seed of the trace; the table's name distinguishes tables.
      profile: The table.
    """

    def __init__(self, seed: int, profile: Profile) -> None:
        self._seed = [seed, *profile.name.encode()]
        self._dim = profile.dim

    def apply(self, number: int, table: ops.HashTable | ReferenceHashTable) -> None:
        """Run operation ``number``."""
        random = np.random.default_rng([*self._seed, number])
        kind = random.choice(["train", "read", "update", "remove", "evict"], p=[0.7, 0.1, 0.1, 0.08, 0.02])
        if kind == "evict":
            table.evict()
            return
        ids = self._ids(random, number)
        if kind == "remove":
            table.remove(ids[: 1 + len(ids) // 8])
            return
        if kind != "update":
            table.lookup(ids, insert=kind == "train")
        if kind != "read":  # keys occur several times, and some have no row
            # Towards zero as often as away from it, so that norms stay small.
            gradients = random.integers(-2, 3, (len(ids), self._dim)).astype(np.float32)
            self._update(table, ids, gradients)

    @staticmethod
    def _update(table: ops.HashTable | ReferenceHashTable, ids: Any, gradients: Any) -> None:
        rate = table.optimizer.learning_rate
        table.apply_gradients(ids, gradients, rate)

    def _ids(self, random: np.random.Generator, number: int) -> np.ndarray:
        """Hot ids, ids from a growing range, and the limits of int64."""
        size = int(2 ** random.uniform(3, 9.5))
        hot = random.integers(0, 300, size)
        wide = random.integers(0, 500 + 30 * number, size)
        ids = np.where(random.random(size) < 0.4, hot, wide).astype(np.uint64)
        ids = (ids * _SPREAD).view(np.int64)
        return np.where(random.random(size) < 0.01, random.choice(_EXTREMES, size), ids)

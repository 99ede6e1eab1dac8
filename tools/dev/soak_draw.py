"""The soak's tables: fixed ones, and some whose policies the seed draws.

The fixed ones test each policy; the drawn ones test unforeseen combinations. Their settings make all
arithmetic exact, so that they too must equal the reference to the last bit.
"""

from __future__ import annotations

from gmeta import initializers, optimizers, policies
from gmeta.policies.row_lifetimes import Admission, Always, Eviction

import numpy as np
from soak_trace import LEARNING_RATE, SHARDED, WHOLE, Profile

DRAWN = 2
"""Drawn tables of a rig."""


def rigs(seed: int) -> dict[str, tuple[Profile, ...]]:
    """Rig -> its tables: those that `tf.train.Checkpoint` carries, and those of sharded checkpoints."""
    fixed = {"whole": WHOLE, "sharded": SHARDED}
    return {
        rig: (*profiles, *(_draw(seed, rig, number) for number in range(DRAWN)))
        for rig, profiles in fixed.items()
    }


def _draw(seed: int, rig: str, number: int) -> Profile:
    random = np.random.default_rng([seed, number, *rig.encode()])
    eviction = _eviction(random)
    by_norm = isinstance(eviction, policies.MinNorm)  # exact sums of squares need weights of few bits
    momentum = random.random() < 0.4 and not by_norm
    return Profile(
        f"drawn{number}",
        dim=int(random.integers(1, 17)),
        # Halves, so that a product is exact whether or not it is fused with the sum that uses it.
        optimizer=optimizers.Momentum(LEARNING_RATE, momentum=0.5)
        if momentum
        else optimizers.SGD(LEARNING_RATE),
        initializer=initializers.Constant(1.0)
        if by_norm or random.random() < 0.5
        else initializers.Uniform(-1, 1),
        admission=_admission(random),
        eviction=eviction,
        precision=policies.TwoPrecisions(int(random.integers(2, 20))) if random.random() < 0.6 else None,
    )


def _admission(random: np.random.Generator) -> Admission:
    match random.choice(["always", "chance", "count", "bloom"]):
        case "count":
            return policies.CountAdmission(int(random.integers(2, 5)))
        case "bloom":
            bloom = policies.Bloom(int(random.integers(500, 8000)), float(random.choice([0.01, 0.1])))
            return policies.CountAdmission(int(random.integers(2, 5)), bloom)
        case "chance":
            return policies.ProbabilityAdmission(float(random.uniform(0.1, 0.9)))
    return Always()


def _eviction(random: np.random.Generator) -> Eviction | None:
    rows, size = int(random.integers(500, 10_000)), int(random.integers(100_000, 1_000_000))
    bound = {"max_rows": rows} if random.random() < 0.5 else {"max_bytes": size}
    some = bound if random.random() < 0.5 else {}
    every = int(random.integers(1, 30))
    match random.choice(["none", "lru", "lfu", "ttl", "norm"]):
        case "lru":
            return policies.LRU(**bound)
        case "lfu":
            return policies.LFU(**bound)
        case "ttl":
            return policies.TTL(steps=int(random.integers(10, 100)), every=every, **some)
        case "norm":
            return policies.MinNorm(threshold=float(random.uniform(0.5, 3.0)), every=every, **some)
    return None

"""Lengths of sequences with a long tail, and batches of them."""

from __future__ import annotations

from itertools import accumulate, islice, pairwise

from gmeta.io import SequenceCost
from support.reference.balance import prefix_batches

import numpy as np
import numpy.typing as npt

MEAN, SIGMA, LONGEST = 570, 0.9, 3000

Lengths = npt.NDArray[np.int64]


def lengths(rng: np.random.Generator, count: int, mean: float = MEAN, longest: int = LONGEST) -> Lengths:
    """Draw lengths of sequences that have this mean when they are cut at the longest."""
    normal = np.random.default_rng(0).standard_normal(100_000)
    low, high = 0.0, np.log(longest)
    for _ in range(40):
        middle = (low + high) / 2
        found = np.exp(middle + SIGMA * normal).clip(1, longest).mean()
        low, high = (middle, high) if found < mean else (low, middle)
    return rng.lognormal(low, SIGMA, count).clip(1, longest).astype(np.int64)


def balanced(one: Lengths, by: SequenceCost, target: float, steps: int) -> list[Lengths]:
    """The first batches that `prefix_batches` cuts from a rank's sequences by a cost."""
    cuts = prefix_batches(zip(by.of(one).tolist(), one.tolist(), strict=True), target=target)
    ends = accumulate(islice(cuts, steps), initial=0)
    return [one[begin:end] for begin, end in pairwise(ends)]

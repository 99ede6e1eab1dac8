"""How evenly batches of sequences are shared out to ranks.

    gmeta bench grm --json FILE

A simulation: each rank reads sequences of its own, with lengths of a long tail (lognormal of sigma 0.9, cut
to a mean of 570 and at most 3,000), and all wait for the one that has most to do. The figure is the largest
cost of a rank's batch over the mean of the ranks', averaged over steps, in floating-point operations of HSTU;
1 is even.

fixed        batches of a fixed number of sequences
alg1_tokens  MTGenRec's algorithm 1, batches of about equally many tokens
alg1_flops   the same, of about equal cost
kk           fixed batches whose sequences are dealt out anew over all ranks (Karmarkar and Karp)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, islice, pairwise

import numpy as np
import numpy.typing as npt
from gmeta.io.balancing import karmarkar_karp, prefix_batches
from gmeta.io.sequence_cost import SequenceCost
from harness import Result, parser, report

MEAN, SIGMA, LONGEST = 570, 0.9, 3000
CASES = [  # width, sequences in a rank's batch, ranks
    (512, 480, 8),
    (512, 480, 64),
    (1024, 80, 8),
    (1024, 80, 64),
]
KK_STEPS = 3  # a second each; they hardly differ

Lengths = npt.NDArray[np.int64]


def lengths(rng: np.random.Generator, count: int) -> Lengths:
    """Of sequences whose mean, cut at the longest, is `MEAN`."""
    normal = np.random.default_rng(0).standard_normal(100_000)
    low, high = 0.0, np.log(LONGEST)
    for _ in range(40):
        middle = (low + high) / 2
        mean = np.exp(middle + SIGMA * normal).clip(1, LONGEST).mean()
        low, high = (middle, high) if mean < MEAN else (low, middle)
    return rng.lognormal(low, SIGMA, count).clip(1, LONGEST).astype(np.int64)


def unevenness(costs: npt.NDArray[np.float64]) -> float:
    """(ranks, steps): the largest over the mean, averaged over steps."""
    return float((costs.max(axis=0) / costs.mean(axis=0)).mean())


def balanced(
    of_ranks: list[Lengths], batch: int, steps: int, cost: SequenceCost, by: SequenceCost
) -> npt.NDArray[np.float64]:
    """(ranks, steps): what batches cost that `prefix_batches` has cut by another cost."""
    target = float(np.mean([by.of(one).mean() for one in of_ranks])) * batch
    rows = []
    for one in of_ranks:
        cuts = prefix_batches(zip(by.of(one).tolist(), one.tolist(), strict=True), target=target)
        ends = accumulate(islice(cuts, steps), initial=0)
        rows.append([cost.of(one[begin:end]).sum() for begin, end in pairwise(ends)])
    return np.array(rows)


def measure(dim: int, batch: int, ranks: int, steps: int) -> dict[str, float]:
    """Way -> unevenness."""
    cost, rng = SequenceCost.of_hstu(dim), np.random.default_rng(1)
    of_ranks = [lengths(rng, batch * (steps + 10)) for _ in range(ranks)]
    fixed = np.array([cost.of(one[: steps * batch].reshape(steps, batch)).sum(axis=1) for one in of_ranks])
    dealt = []
    for step in range(min(steps, KK_STEPS)):
        all_costs = np.concatenate([cost.of(one[step * batch : (step + 1) * batch]) for one in of_ranks])
        dealt.append([all_costs[mine].sum() for mine in karmarkar_karp(all_costs, ranks)])
    ways: dict[str, Callable[[], npt.NDArray[np.float64]]] = {
        "fixed": lambda: fixed,
        "alg1_tokens": lambda: balanced(of_ranks, batch, steps, cost, SequenceCost()),
        "alg1_flops": lambda: balanced(of_ranks, batch, steps, cost, cost),
        "kk": lambda: np.array(dealt).T,
    }
    return {way: unevenness(make()) for way, make in ways.items()}


def main() -> None:
    """Simulate all cases."""
    given = parser(__doc__).parse_args()
    results = []
    for dim, batch, ranks in [(8, 16, 4)] if given.smoke else CASES:
        found = measure(dim, batch, ranks, steps=5 if given.smoke else 60)
        for way, value in found.items():
            name = f"grm/balance/{way}/d{dim}/ranks{ranks}"
            peer = () if way == "fixed" else ("fixed batches", found["fixed"])
            results.append(Result(name, value, "max/mean", *peer))
    report("Balance of batches over ranks", results, given.json)


if __name__ == "__main__":
    main()

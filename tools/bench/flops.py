"""The floating-point operations of a sequence in HSTU's published sizes, by its length.

python tools/bench/flops.py --json FILE

Computed, not timed: the formula of `gmeta.io.SequenceCost.of_hstu`, by which batches are
balanced too. Of L blocks of width d, the forward pass of a sequence of S tokens takes

    L (10 S d^2 + 4 S^2 d)

operations, a multiplication and its addition being two. The heads share the width, so their number changes
nothing; a training step takes three times as much.

projections     10 S d^2: from the tokens to U, V, Q and K, and back
attention       4 S^2 d: Q K^T and A V, over the full square
total           the two together
attention_causal, total_causal
                the same with the half of the square that a causal mask leaves, 2 S^2 d. Exactly it is
                S (S + 1) / 2 pairs; the difference, 2 S d, is 1 / (5 d) of the projections
length_of       the tokens of a sequence that takes this many operations, by the full square and by the half
"""

from __future__ import annotations

from gmeta.io import SequenceCost

from harness import Result, parser, report

SIZES = [(512, 3, 2, 4e9), (1024, 22, 4, 110e9)]
"""Width, blocks, heads, and the published operations of a sequence."""

LENGTHS = (100, 200, 400, 600, 1000, 3000)


def of_size(dim: int, blocks: int, heads: int, published: float, lengths: tuple[int, ...]) -> list[Result]:
    """The operations of sequences of these lengths, and the length that takes the published operations."""
    full, half = (SequenceCost.of_hstu(dim, blocks, causal=causal) for causal in (False, True))
    parts = {
        "projections": SequenceCost(full.linear),
        "attention": SequenceCost(0.0, full.quadratic),
        "total": full,
        "attention_causal": SequenceCost(0.0, half.quadratic),
        "total_causal": half,
    }
    name = f"flops/hstu/d{dim}/blocks{blocks}/heads{heads}"
    results = [
        Result(f"{name}/len{length}/{part}", float(cost.of(length)) / 1e9, "GFLOP")
        for length in lengths
        for part, cost in parts.items()
    ]
    for way, cost in (("total", full), ("total_causal", half)):
        results.append(
            Result(f"{name}/length_of/{published / 1e9:g}GFLOP/{way}", cost.length(published), "tokens")
        )
    return results


def main() -> None:
    """Both sizes."""
    given = parser(__doc__).parse_args()
    lengths = LENGTHS[:1] if given.smoke else LENGTHS
    results = [result for size in SIZES for result in of_size(*size, lengths)]
    report("Floating-point operations of HSTU, forward, one sequence", results, given.json)


if __name__ == "__main__":
    main()

"""The longest step while a table grows: what a batch of new keys waits for at most.

    gmeta bench growth --json FILE
    gmeta bench growth --rows 10000000 --dim 16

An empty table takes batches of 65,536 keys that it has never seen until it holds the rows. Every batch is
timed on its own. Batches do the same work but for the growth of the key index, so what the longest has above
the median is what growth costs a step at most: 50 ms is what it should stay below. The peer is a Python dict
of the keys alone, which grows all at once.

pause     the longest batch less the median one
longest   the longest batch
median    the median batch
ratio     longest / median

A shared machine has pauses of its own, so each figure is the best of the rounds; the largest pause of any
round stands beside them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import gmeta.ops as ops
import numpy as np
import tensorflow as tf
from gmeta import initializers, optimizers
from harness import Result, parser, report

BATCH = 65_536
ROUNDS = 3
"""Of seconds each, over which the longest of all batches is taken anyway."""


def new_keys(rows: int, seed: int) -> Iterator[np.ndarray]:
    """Batches of distinct keys that are spread over all of int64."""
    start = np.random.default_rng(seed).integers(2**63, dtype=np.uint64)
    for first in range(0, rows, BATCH):
        count = min(BATCH, rows - first)
        # An odd factor makes a bijection of 64-bit words; the golden ratio spreads neighbours.
        numbers = start + np.arange(first, first + count, dtype=np.uint64)
        yield (numbers * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def batch_seconds(insert: Callable[[object], object], batches: Iterator[object]) -> list[float]:
    """Time every batch; the first, which makes the op's kernel, is left out."""
    seconds = []
    for batch in batches:
        start = time.perf_counter()
        insert(batch)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def grow_table(rows: int, dim: int, seed: int) -> list[float]:
    """Fill an empty table with rows of random numbers."""
    table = ops.HashTable(dim, optimizers.Adam(), initializers.Normal())
    seconds = batch_seconds(
        lambda keys: table.lookup_keys(keys), (tf.constant(keys) for keys in new_keys(rows, seed))
    )
    assert int(table.size()) == rows
    return seconds


def grow_dict(rows: int, seed: int) -> list[float]:
    """Fill an empty dict, which has no rows: what growth all at once looks like."""
    held: dict[int, None] = {}
    return batch_seconds(
        lambda keys: held.update(dict.fromkeys(keys)), (keys.tolist() for keys in new_keys(rows, seed))
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=10_000_000)
    options.add_argument("--dim", type=int, default=16)
    options.set_defaults(rounds=ROUNDS)
    given = options.parse_args()
    rows = min(given.rows, 500_000) if given.smoke else given.rows
    runs = [(grow_table(rows, given.dim, seed), grow_dict(rows, seed)) for seed in range(given.rounds)]

    def best(figure: Callable[[list[float]], float]) -> tuple[float, float]:
        return min(figure(table) for table, _ in runs), min(figure(peer) for _, peer in runs)

    def pause(seconds: list[float]) -> float:
        return 1000 * (max(seconds) - statistics.median(seconds))

    figures: dict[str, tuple[str, Callable[[list[float]], float]]] = {
        "pause": ("ms", pause),
        "longest": ("ms", lambda seconds: 1000 * max(seconds)),
        "median": ("ms", lambda seconds: 1000 * statistics.median(seconds)),
        "ratio": ("longest/median", lambda seconds: max(seconds) / statistics.median(seconds)),
    }
    case = f"dim{given.dim}/rows{rows / 10**6:g}M"
    results = [
        Result(f"growth/{name}/{case}", ours, unit, "Python dict, keys alone", peers)
        for name, (unit, figure) in figures.items()
        for ours, peers in [best(figure)]
    ]
    results.append(Result(f"growth/largest_pause/{case}", max(pause(table) for table, _ in runs), "ms"))
    report("The longest step while a table grows", results, given.json, batch=BATCH)


if __name__ == "__main__":
    main()

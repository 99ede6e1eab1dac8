"""The loss of accuracy of 16 bits, rounded to nearest and at random, compared with float32.

    python tools/bench/precisions.py --json FILE

Rows learn a mean: each step gives each row the gradient of half the squared distance to a target with noise.
With a small learning rate, a step is smaller than half a unit of a 16-bit number's last place. Rounded to
nearest, it is lost; rounded at random, steps add up.

error   the root mean square distance of the weights to their targets after the last step, as a share of that
        at the start: the mean over seeds, and ``spread``, the standard deviation over them
update  keys per second of `HashTable.apply_gradients`
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import gmeta.ops as ops
from gmeta import initializers, optimizers
from gmeta.policies import TwoPrecisions

import numpy as np
import tensorflow as tf
from harness import Result, interleave, parser, report

NEVER = 2**32 - 1
PRECISIONS = {
    "float32": None,
    "stochastic": TwoPrecisions(NEVER),
    "nearest": TwoPrecisions(NEVER, rounding="nearest"),
}
OPTIMIZERS = {"sgd": optimizers.SGD(2e-4), "adagrad": optimizers.Adagrad(0.02), "adam": optimizers.Adam(2e-4)}
NOISE = 0.1
SEEDS = 3


def error(precision: str, optimizer: str, seed: int, rows: int, dim: int, steps: int) -> float:
    """Train a table, and return the remaining share of the distance to the targets."""
    random = np.random.default_rng(seed)
    targets = random.uniform(0.5, 1.0, (rows, dim)).astype(np.float32)
    table = ops.HashTable(
        dim, OPTIMIZERS[optimizer], initializers.Zeros(), seed, precision=PRECISIONS[precision]
    )
    keys = tf.range(rows, dtype=tf.int64)
    for _ in range(steps):
        weights = table.lookup_keys(keys)
        noise = random.standard_normal((rows, dim), np.float32)
        table.apply_gradients(keys, weights - targets + NOISE * noise)
    left = table.lookup_keys(keys, insert=False).numpy() - targets
    return float(np.sqrt(np.mean(left**2) / np.mean(targets**2)))


def errors(optimizer: str, rows: int, dim: int, steps: int) -> list[Result]:
    """Measure the remaining distance of each precision."""
    results: list[Result] = []
    for precision in PRECISIONS:
        found = [error(precision, optimizer, seed, rows, dim, steps) for seed in range(SEEDS)]
        name = f"precisions/error/{optimizer}/{precision}"
        beside = ("float32", results[0].value) if results else (None, None)
        results.append(Result(name, statistics.mean(found), "of the start", *beside))
        results.append(Result(f"{name}/spread", statistics.stdev(found), "of the start"))
    return results


def rates(optimizer: str, rows: int, dim: int, rounds: int) -> list[Result]:
    """Measure updates."""
    keys = tf.range(rows, dtype=tf.int64)
    gradients = tf.random.stateless_normal([rows, dim], [1, 2])

    def update(precision: TwoPrecisions | None) -> Callable[[int], object]:
        table = ops.HashTable(dim, OPTIMIZERS[optimizer], precision=precision)
        table.lookup_keys(keys)
        return lambda _: table.apply_gradients(keys, gradients)

    seconds = interleave({name: update(precision) for name, precision in PRECISIONS.items()}, rounds=rounds)
    return [
        Result(
            f"precisions/update/{optimizer}/{name}/dim{dim}",
            rows / seconds[name],
            "keys/s",
            "nearest",
            rows / seconds["nearest"],
        )
        for name in ("float32", "stochastic")
    ]


def main() -> None:
    """Measure errors and rates."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=5000)
    given = options.parse_args()
    rows, dim, steps = (20, 4, 50) if given.smoke else (200, 16, given.steps)
    results = [r for optimizer in OPTIMIZERS for r in errors(optimizer, rows, dim, steps)]
    wide = (1000, 16) if given.smoke else (50_000, 64)
    results += [r for optimizer in OPTIMIZERS for r in rates(optimizer, *wide, given.rounds)]
    report(
        "Rows in 16 bits beside float32", results, given.json, rows=rows, dim=dim, steps=steps, seeds=SEEDS
    )


if __name__ == "__main__":
    main()

"""What an open snapshot of a table costs the steps that run while it is open.

    python tools/bench/snapshot.py --json FILE

Three equal tables with Adam; each round uses the same 65,536 keys in all of them, which no earlier round
used: one without a snapshot; one with a snapshot, which copies each row when it first changes; and one whose
snapshot has already copied all these rows. The rates are keys per second of the call.

lookup   rows of existing keys, as training looks them up (it records their use)
update   fused Adam, one call
take     milliseconds to take a snapshot, and to restore it after the rounds
"""

from __future__ import annotations

import time
from collections.abc import Callable

import gmeta.ops as ops
from gmeta import initializers, optimizers
from gmeta.ops.table.restored_rows import TableSnapshot

import numpy as np
import tensorflow as tf
from harness import ROUNDS, WARM_UP, Result, interleave, parser, report

BATCH = 65_536
NONE, FIRST, AGAIN = "no snapshot", "new_rows", "known_rows"


def make_table(rows: int, dim: int) -> ops.HashTable:
    """Make a table that holds keys 0 to ``rows``, with Adam's moments."""
    table = ops.HashTable(
        dim, optimizer=optimizers.Adam(1e-3), initializer=initializers.Uniform(), name="bench"
    )
    table.reserve(rows)
    for keys in np.array_split(np.arange(rows), max(1, rows // BATCH)):
        table.lookup_keys(tf.constant(keys))
    return table


def measure(operation: str, rows: int, dim: int, rounds: int) -> list[Result]:
    """Measure rates with and without a snapshot, and the time of the snapshot itself."""
    order = np.random.default_rng(0).permutation(rows)
    batches = [tf.constant(part) for part in np.array_split(order, rounds + WARM_UP)]
    batches = [batch[:BATCH] for batch in batches]
    gradients = tf.random.stateless_normal([BATCH, dim], [1, 2])

    def call(table: ops.HashTable) -> Callable[[int], object]:
        if operation == "lookup":
            return lambda k: table.lookup_keys(batches[k])
        return lambda k: table.apply_gradients(batches[k], gradients[: len(batches[k])])

    tables = {name: make_table(rows, dim) for name in (NONE, FIRST, AGAIN)}
    begin = time.perf_counter()
    first = TableSnapshot(tables[FIRST])
    taken = time.perf_counter() - begin
    again = TableSnapshot(tables[AGAIN])
    for k in range(len(batches)):
        call(tables[AGAIN])(k)
    seconds = interleave({name: call(table) for name, table in tables.items()}, rounds=rounds)
    case, count = f"dim{dim}/rows{rows / 10**6:g}M", len(batches[0])
    rate = count / seconds[NONE]
    results = [
        Result(f"snapshot/{operation}/{name}/{case}", count / seconds[name], "keys/s", NONE, rate)
        for name in (FIRST, AGAIN)
    ]
    begin = time.perf_counter()
    first.restore()
    back = time.perf_counter() - begin
    del again
    return [
        *results,
        Result(f"snapshot/{operation}/take/{case}", 1000 * taken, "ms"),
        Result(f"snapshot/{operation}/restore/{case}", 1000 * back, "ms"),
    ]


def main() -> None:
    """Measure lookups and updates."""
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--dim", type=int, default=64)
    options.set_defaults(rounds=ROUNDS)
    given = options.parse_args()
    rows = min(given.rows, 20_000) if given.smoke else given.rows
    results = [r for name in ("lookup", "update") for r in measure(name, rows, given.dim, given.rounds)]
    report("Steps while a snapshot is open", results, given.json, batch=BATCH)


if __name__ == "__main__":
    main()

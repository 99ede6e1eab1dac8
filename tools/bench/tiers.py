"""Tables with rows on a drive: training steps beside tables in memory and RocksDB, and the drive's own rate.

    python tools/bench/tiers.py --json FILE

A table with Adam holds --rows rows; memory has room for a share of them. A step looks up the distinct ids of
a batch, which are drawn by Zipf's law over shuffled ids, and updates their rows. All contenders take the same
batches in turn, on one host, after as many untimed ones, which fill their caches.

cpu/step/cacheN         milliseconds of a step with N% of the rows in memory; peer: RocksDB with an equally
                        large cache, which only reads and writes the records, without an optimizer or a log
cpu/memory/cacheN       the time of a step over that of the table in memory
hits/zipfS/cacheN       percent of a batch's distinct ids that memory held; the peer is Che's approximation of
                        a least-recently-used cache
drive/reads             random reads of 4 KiB a second, 32 at once, past the page cache
drive/rows              rows a second that are read from the drive while it has half of all rows and every
                        batch is uniform, in percent of drive/reads
drive/write             bytes written to the drive for each byte of the rows that moved there

rocksdict isn't a dependency; without it RocksDB is left out: pip install rocksdict==0.3.29
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2
from gmeta.ops import HashTable
from gmeta.policies import Tiers

import numpy as np
import tensorflow as tf
from harness import WARM_UP, Result, parser, report
from parts.tiers.drive import Drive, written_bytes
from parts.tiers.figure import plot
from parts.tiers.tables import new_table
from parts.tiers.zipf import Ids, batches, che


def train(table: HashTable, ids: Ids, gradients: tf.Tensor) -> None:
    """Take a step."""
    table.lookup_keys(ids)
    table.apply_gradients(ids, gradients[: len(ids)])


def steps(given: Namespace, folder: Path, cache: int, skew: float) -> list[Result]:
    """Measure steps with a share of the rows in memory."""
    record = 8 + 12 * given.dim
    memory = given.rows * record * cache // 100
    tiered = new_table(given.rows, given.dim, Tiers(memory, str(folder / "rows")))
    whole = new_table(given.rows, given.dim)
    gradients = tf.ones([given.batch, given.dim])
    contenders = {"tiered": lambda ids: train(tiered, ids, gradients)}
    contenders["memory"] = lambda ids: train(whole, ids, gradients)
    if importlib.util.find_spec("rocksdict"):
        from parts.tiers.rocksdb_rows import RocksDB

        database = RocksDB(folder / f"rocksdb-{cache}-{skew}", record, memory)
        database.fill(np.arange(given.rows))
        contenders["rocksdb"] = database.step
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    drawn, asked, brought = batches(given.rows, given.batch, skew, 0), 0, 0
    for number in range(given.warm + given.rounds):
        ids = next(drawn)
        before = int(tiered.statistics().brought)
        for name, step in contenders.items():
            start = time.perf_counter()
            step(ids)
            if number >= given.warm:
                seconds[name].append(time.perf_counter() - start)
        if number >= given.warm:
            asked += len(ids)
            brought += int(tiered.statistics().brought) - before
    took = {name: 1e3 * statistics.median(each) for name, each in seconds.items()}
    about = f"zipf{skew:g}/cache{cache}"
    hits = 100 * che(given.rows, given.rows * cache // 100, skew, given.batch).hits
    return [
        Result(f"tiers/cpu/step/{about}", took["tiered"], "ms", "RocksDB", took.get("rocksdb")),
        Result(f"tiers/cpu/memory/{about}", took["tiered"] / took["memory"], "times a table in memory"),
        Result(f"tiers/hits/{about}", 100 - 100 * brought / asked, "%", "Che's approximation", hits),
    ]


def drive(given: Namespace, folder: Path) -> list[Result]:
    """Measure the drive, and the rows that are read from it."""
    record = 8 + 12 * given.dim
    raw = Drive(folder, given.rows * record)
    table = new_table(given.rows, given.dim, Tiers(given.rows * record // 2, str(folder / "rows")))
    gradients = tf.ones([given.batch, given.dim])
    reads, rows, drawn = [], [], batches(given.rows, given.batch, 0.0, 1)
    before, moved = written_bytes(), int(table.statistics().spilled)
    for _ in range(given.warm):
        train(table, next(drawn), gradients)
    for number in range(WARM_UP + given.rounds):
        reads.append(raw.reads(given.batch))
        ids = next(drawn)
        came = int(table.statistics().brought)
        start = time.perf_counter()
        table.peek(ids)  # brings rows, and moves others to the drive
        took = time.perf_counter() - start
        rows.append((int(table.statistics().brought) - came) / took)
        train(table, ids, gradients)
        if number < WARM_UP:
            reads.clear()
            rows.clear()
    amplified = (written_bytes() - before) / ((int(table.statistics().spilled) - moved) * record)
    rate = statistics.median(reads)
    return [
        Result("tiers/drive/reads", rate, "reads/s"),
        Result("tiers/drive/rows", 100 * statistics.median(rows) / rate, "% of the reads"),
        Result("tiers/drive/write", amplified, "bytes a byte"),
    ]


def main() -> None:
    """Measure all shares and skews."""
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=1_000_000, help="rows of a table (default: %(default)s)")
    options.add_argument("--dim", type=int, default=64, help="(default: %(default)s)")
    options.add_argument("--batch", type=int, default=65_536, help="ids of a batch (default: %(default)s)")
    options.add_argument("--warm", type=int, default=40, help="steps that fill caches (default: %(default)s)")
    options.add_argument("--caches", type=int, nargs="+", default=[1, 10, 20], help="%% of the rows")
    options.add_argument("--skews", type=float, nargs="+", default=[0.9, 1.05, 1.2], help="of Zipf's law")
    options.add_argument(
        "--folder", type=Path, help="a folder on the drive to measure (default: a temporary one)"
    )
    options.add_argument("--plot", type=Path, help="draw hits and steps into this PNG")
    given = options.parse_args()
    if given.smoke:
        given.__dict__ |= {"rows": 4_000, "batch": 500, "warm": 3, "caches": [10], "skews": [1.05]}
    results: list[Result] = []
    for cache in given.caches:
        for skew in given.skews:
            with tempfile.TemporaryDirectory(dir=given.folder) as name:
                results += steps(given, Path(name), cache, skew)
    if given.plot:
        plot(given.plot, results, given.caches, given.skews)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        results += drive(given, Path(name))
    facts = {name: getattr(given, name) for name in ("rows", "dim", "batch", "warm")}
    report("Tiers", results, given.json, **facts)


if __name__ == "__main__":
    main()

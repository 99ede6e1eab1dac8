"""The longest step while a table grows: the longest wait of a batch of new keys.

    python tools/bench/growth.py --json FILE
    python tools/bench/growth.py --rows 10000000 --dim 16
    python tools/bench/growth.py --device gpu --rows 100000000 --json FILE
    python tools/bench/growth.py --device gpu --rows 100000000 --hbm-rows 10000000 --json FILE

An empty table looks up batches of 65,536 new keys until it holds the rows. Every batch is timed separately.
Batches do the same work except for the growth of the key index, so the longest less the median is the most
that growth costs a step: it should stay below 50 ms. The peer is a Python dict of the keys alone, which grows
all at once.

pause     the longest batch less the median one
longest   the longest batch
median    the median batch
ratio     longest / median

With --device gpu the table is in a GPU's memory, by the library's C interface. A batch is
timed by the host's clock, until the GPU is done, and by CUDA events ("by_events"). With --hbm-rows the table
has that many rows in the GPU's memory, and the others in host memory (Tiers).

A shared machine has pauses of its own, so each figure is the best of the rounds; the largest pause of any
round is reported beside them.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from harness import Result, parser, report  # noqa: E402

BATCH = 65_536
ROUNDS = 3
"""Rounds take seconds each, and report the longest of all batches anyway."""


def new_keys(rows: int, seed: int) -> Iterator[np.ndarray]:
    """Batches of distinct keys that are spread over all of int64."""
    start = np.random.default_rng(seed).integers(2**63, dtype=np.uint64)
    for first in range(0, rows, BATCH):
        count = min(BATCH, rows - first)
        # An odd factor makes a bijection of 64-bit words; the golden ratio spreads neighbours.
        numbers = start + np.arange(first, first + count, dtype=np.uint64)
        yield (numbers * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def batch_seconds(insert: Callable[[object], object], batches: Iterator[object]) -> list[float]:
    """Time every batch except the first, which makes the op's kernel."""
    seconds = []
    for batch in batches:
        start = time.perf_counter()
        insert(batch)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def grow_table(rows: int, dim: int, seed: int) -> list[float]:
    """Fill an empty table with rows of random numbers."""
    import gmeta.ops as ops
    from gmeta import initializers, optimizers

    import tensorflow as tf

    table = ops.HashTable(dim, optimizers.Adam(), initializers.Normal())
    seconds = batch_seconds(
        lambda keys: table.lookup_keys(keys), (tf.constant(keys) for keys in new_keys(rows, seed))
    )
    assert int(table.size()) == rows
    return seconds


def grow_gpu_table(rows: int, dim: int, seed: int, hbm_rows: int) -> tuple[list[float], list[float]]:
    """Fill an empty table on a GPU; return seconds of the batches by the host's clock and by events."""
    from gmeta.optimizers import Adam
    from support.gpu.cuda_library import DeviceArray, Event, Stream, synchronize
    from support.gpu.gpu_table import GpuTable

    normal = SimpleNamespace(kind="normal", parameters=(0.0, 0.05))
    table = GpuTable(dim, Adam(), normal, seed, hbm_rows=hbm_rows)
    out, stream = DeviceArray((BATCH, dim), np.float32), Stream()
    start, end = Event(), Event()
    of_host, of_events = [], []
    for batch in new_keys(rows, seed):
        keys = DeviceArray.of(batch, np.int64)
        synchronize()
        before = time.perf_counter()
        start.record(stream)
        distinct = ctypes.c_int32(1)
        table.call("lookup_or_insert", keys.pointer, len(batch), distinct, out.pointer, stream.handle)
        end.record(stream)
        of_events.append(end.seconds_since(start))
        of_host.append(time.perf_counter() - before)
    assert table.size() == rows
    return of_host[1:], of_events[1:]


def grow_dict(rows: int, seed: int) -> list[float]:
    """Fill an empty dict, which has no rows and grows all at once."""
    held: dict[int, None] = {}
    return batch_seconds(
        lambda keys: held.update(dict.fromkeys(keys)), (keys.tolist() for keys in new_keys(rows, seed))
    )


def pause(seconds: list[float]) -> float:
    return 1000 * (max(seconds) - statistics.median(seconds))


FIGURES: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "pause": ("ms", pause),
    "longest": ("ms", lambda seconds: 1000 * max(seconds)),
    "median": ("ms", lambda seconds: 1000 * statistics.median(seconds)),
    "ratio": ("longest/median", lambda seconds: max(seconds) / statistics.median(seconds)),
}


def measure_gpu(rows: int, dim: int, rounds: int, hbm_rows: int) -> list[Result]:
    """Measure a table on the GPU."""
    grow_gpu_table(min(rows, 4_000_000), dim, rounds, hbm_rows)  # loads the kernels
    runs = [grow_gpu_table(rows, dim, seed, hbm_rows) for seed in range(rounds)]
    case = f"gpu/dim{dim}/rows{rows / 10**6:g}M" + (f"/hbm{hbm_rows / 10**6:g}M" if hbm_rows else "")
    results = []
    for clock, suffix in enumerate(("", "/by_events")):
        all_seconds = [run[clock] for run in runs]
        for name, (unit, figure) in FIGURES.items():
            results.append(Result(f"growth/{name}/{case}{suffix}", min(map(figure, all_seconds)), unit))
        largest = max(map(pause, all_seconds))
        results.append(Result(f"growth/largest_pause/{case}{suffix}", largest, "ms"))
    return results


def measure_cpu(rows: int, dim: int, rounds: int) -> list[Result]:
    """Measure a table in host memory beside a dict."""
    runs = [(grow_table(rows, dim, seed), grow_dict(rows, seed)) for seed in range(rounds)]
    case = f"dim{dim}/rows{rows / 10**6:g}M"
    results = []
    for name, (unit, figure) in FIGURES.items():
        ours, peers = (min(map(figure, seconds)) for seconds in zip(*runs, strict=True))
        results.append(Result(f"growth/{name}/{case}", ours, unit, "Python dict, keys alone", peers))
    results.append(Result(f"growth/largest_pause/{case}", max(pause(table) for table, _ in runs), "ms"))
    return results


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=10_000_000)
    options.add_argument("--dim", type=int, default=16)
    options.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    options.add_argument(
        "--hbm-rows", type=int, default=0, help="with --device gpu: rows in GPU memory; 0: all"
    )
    options.set_defaults(rounds=ROUNDS)
    given = options.parse_args()
    rows = min(given.rows, 500_000) if given.smoke else given.rows
    if given.device == "gpu":
        from support.gpu.cuda_library import why_missing

        absent = why_missing()
        if absent is not None:
            report(f"Not measured: {absent}", [Result("growth/gpus", 0, "GPUs")], given.json)
            return
    if given.device == "gpu":
        results = measure_gpu(rows, given.dim, given.rounds, given.hbm_rows)
    elif given.hbm_rows:
        options.error("--hbm-rows is for a table on a GPU: add --device gpu")
    else:
        results = measure_cpu(rows, given.dim, given.rounds)
    report("The longest step while a table grows", results, given.json, batch=BATCH)


if __name__ == "__main__":
    main()

"""The rate at which features are joined, from each store.

    python tools/bench/features.py --json FILE

Keys are Zipf(1.05) over the items of a table with an int64, a float32 and a list of about four int64; a
request asks for the features of 4,000 keys as of one time. HBase is a Thrift server of its interface file in
a process of its own on this machine, with tables in memory and in Python: it measures what the client and the
wire cost, not HBase.

multi_get  rows a second of repeated requests, without a cache
cached     the same, when the cache has all rows
join       rows a second of `join_features` in a dataset, in-memory tables
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2
from gmeta.core.schema import Column
from gmeta.io import ArrowSource, HBaseSource, RocksDBSource, join_features
from gmeta.io.features import FetchPolicy

import numpy as np
import pyarrow as pa
import tensorflow as tf
from harness import Result, interleave, parser, report

COLUMNS = [Column("shop"), Column("price", "float32"), Column("tags", is_list=True)]
NAMES = [column.name for column in COLUMNS]
SERVER = """
import sys
from support.hbase_server import HBaseServer
with HBaseServer() as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""


@contextmanager
def server() -> Iterator[int]:
    """The port of a Thrift server in another process."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait()


def rows(items: int) -> Any:
    """The features of all items, a RecordBatch."""
    rng = np.random.default_rng(0)
    tags = [rng.integers(0, 1000, count).tolist() for count in rng.poisson(4, items)]
    arrays = [rng.integers(0, 1000, items), rng.random(items, np.float32), tags]
    return pa.RecordBatch.from_arrays(
        [pa.array(arrays[0]), pa.array(arrays[1]), pa.array(arrays[2], pa.list_(pa.int64()))], names=NAMES
    )


def requests(items: int, keys: int, count: int) -> list[np.ndarray]:
    """Keys of this many requests, the frequent ones spread over the table."""
    rng = np.random.default_rng(1)
    places = rng.permutation(items)
    weights = 1.0 / np.arange(1, items + 1) ** 1.05
    edges = np.cumsum(weights / weights.sum())
    return [places[np.searchsorted(edges, rng.random(keys)).clip(max=items - 1)] for _ in range(count)]


def main() -> None:
    """All stores in turn."""
    given = parser(__doc__).parse_args()
    items, keys = (500, 100) if given.smoke else (100_000, 4000)
    table, asked = rows(items), requests(items, keys, 8)
    policy = FetchPolicy(cache_rows=0, timeout=None)
    kept = FetchPolicy(cache_rows=items, timeout=None)
    whole = pa.table({"key": np.arange(items), **dict(zip(NAMES, table.columns, strict=True))})
    with tempfile.TemporaryDirectory() as folder, server() as port:
        with RocksDBSource(Path(folder) / "rocksdb", writable=True) as writer:
            writer.create_table("item", COLUMNS)
            writer.put("item", np.arange(items), table, 0)
        hbase = HBaseSource("127.0.0.1", port, tables={"item": COLUMNS}, policy=policy)
        hbase.create_table("item", versions=1)
        hbase.put("item", np.arange(items), table, 0)
        rocksdb = RocksDBSource(Path(folder) / "rocksdb", policy=policy)
        arrow = ArrowSource({"item": whole}, policy=policy)
        cached = ArrowSource({"item": whole}, policy=kept)
        dataset = tf.data.Dataset.from_tensor_slices({"columns": {"item": np.stack(asked)}})
        joined = join_features(dataset, arrow, "item", key="item", columns=NAMES)

        def get(source: Any) -> Any:
            return lambda number: source.multi_get("item", asked[number % len(asked)], NAMES, as_of=1)

        for one in asked:
            cached.multi_get("item", one, NAMES, as_of=1)
        contenders = {
            "multi_get/arrow": get(arrow),
            "multi_get/rocksdb": get(rocksdb),
            "multi_get/hbase": get(hbase),
            "cached": get(cached),
            "join/arrow": lambda _: [None for _ in joined],
        }
        seconds = interleave(contenders, rounds=given.rounds)
        rocksdb.close()
    results = []
    for name, taken in seconds.items():
        count = keys * (len(asked) if name.startswith("join") else 1)
        results.append(Result(f"features/{name}/keys{keys}/items{items}", count / taken, "rows/s"))
    report("Features by key", results, given.json, distinct=float(np.mean([len(set(a)) for a in asked])))


if __name__ == "__main__":
    main()

"""How fast tables of events are prepared as a data set.

    python tools/bench/prepare.py --json FILE

The table has a user, a time, ten columns of whole numbers and seven of floats, 60 rows a user, in random
order. Times run from the file to the finished folder, including digest, manifest and fsync.

end_to_end   rows a second of `gmeta.preprocess.prepare`, by layout and format of the input; limited has
             --memory-limit 1GB, with batches of 20 rows
spark        rows a second of the same with `prepare_on_spark` on all cores of this
             machine, from Parquet, in a warm session; with --spark
stage        rows a second of the parts of the same runs: reading and normalising, sorting with cutting and
             encoding, writing shards
peers        in_memory: the plan's functions one after another in NumPy, all rows in memory, the same bytes;
             python_example: sorting in NumPy, then tf.train.Example and TFRecordWriter in Python, on a sample
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gmeta.preprocess import PrepareConfig, TableSpec, prepare
from gmeta.preprocess.cluster.spark_engine import spark_session
from gmeta.preprocess.config import no_progress
from gmeta.preprocess.local import duckdb_engine
from gmeta.preprocess.source import BadRecords
from gmeta.preprocess.tables.table_source import TableSource
from support import plan_in_memory

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from harness import Result, interleave, parser, report

SPEC = TableSpec("user", time="time")
LIMIT = 1_000_000_000
_ROWS_A_USER = 60


def table(rows: int) -> pa.Table:
    """Columns as a recommender's log has them: ids of all sizes, and floats."""
    rng = np.random.default_rng(0)
    columns = {
        "user": rng.integers(0, max(rows // _ROWS_A_USER, 1), rows),
        "time": rng.integers(1_600_000_000, 1_700_000_000, rows),
    }
    columns |= {f"id{place}": rng.integers(0, 10 ** (1 + place % 6), rows) for place in range(10)}
    columns |= {f"x{place}": rng.random(rows, np.float32) for place in range(7)}
    return pa.table(columns)


class Runs:
    """Prepares one table in several ways, each into a folder that is removed.

    Args:
      folder: Where inputs and outputs go.
      rows: Rows of the table.
      sample: Rows for the peer that is too slow for all of them.
    """

    def __init__(self, folder: Path, rows: int, sample: int) -> None:
        self._folder, self._table = folder, table(rows)
        self._sample = self._table.slice(0, sample)
        self._files = {name: folder / f"events.{name}" for name in ("parquet", "csv", "jsonl")}
        pyarrow.parquet.write_table(self._table, self._files["parquet"])
        pyarrow.csv.write_csv(self._table, self._files["csv"])
        with self._files["jsonl"].open("w") as file:
            names = self._table.column_names
            for batch in self._table.to_batches(10_000):
                rows_of_text = zip(*(map(str, column.to_pylist()) for column in batch.columns), strict=True)
                file.writelines(
                    "{" + ", ".join(f'"{n}": {v}' for n, v in zip(names, row, strict=True)) + "}\n"
                    for row in rows_of_text
                )
        self.stages: dict[str, list[float]] = {}

    def prepare(self, kind: str, layout: str, *, limited: bool = False) -> Callable[[int], None]:
        """The command's work, with the time of each stage."""

        def run(_: int) -> None:
            begun: dict[str, float] = {}

            def progress(stage: str, done: int, total: int | None) -> None:
                begun.setdefault(stage, time.perf_counter())
                if done == total:
                    seconds = time.perf_counter() - begun[stage]
                    self.stages.setdefault(f"{stage}/{layout}/{kind}", []).append(seconds)

            prepare(
                self._files[kind],
                self._folder / "out",
                PrepareConfig(layout=layout, batch_rows=20 if limited else None),
                spec=SPEC,
                memory_limit=LIMIT if limited else None,
                progress=no_progress if limited else progress,
            )
            shutil.rmtree(self._folder / "out")

        return run

    def spark(self, _: int) -> None:
        """The distributed engine, in the existing session."""
        from gmeta.preprocess.cluster import spark_engine

        config = PrepareConfig(layout="columnar")
        spark_engine.prepare_on_spark(self._files["parquet"], self._folder / "spark", config, spec=SPEC)
        shutil.rmtree(self._folder / "spark")

    def in_memory(self, _: int) -> None:
        """The reference."""
        source = TableSource([self._files["parquet"]], SPEC, duckdb_engine.connect(4 << 30))
        config = PrepareConfig(layout="columnar").resolve(source.defaults)
        out = self._folder / "memory"
        out.mkdir()
        plan_in_memory.run(source, config, BadRecords(), no_progress, out)
        shutil.rmtree(out)

    def python_example(self, _: int) -> None:
        """A script without a native encoder."""
        import tensorflow as tf

        order = np.lexsort((self._sample["time"], self._sample["user"]))
        rows = self._sample.take(order)
        kinds = [pa.types.is_floating(field.type) for field in rows.schema]
        with tf.io.TFRecordWriter(str(self._folder / "python.tfrecord")) as writer:
            for row in zip(*(column.to_pylist() for column in rows.columns), strict=True):
                features = {
                    name: tf.train.Feature(float_list=tf.train.FloatList(value=[value]))
                    if is_float
                    else tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
                    for name, value, is_float in zip(rows.column_names, row, kinds, strict=True)
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())


def main() -> None:
    """Run all contenders in turn, and print."""
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=1_000_000, help="rows (default: %(default)s)")
    options.add_argument(
        "--spark", action="store_true", help="measure Spark too, on all cores of this machine"
    )
    arguments = options.parse_args()
    rows = 3000 if arguments.smoke else arguments.rows
    sample = min(rows, 20_000)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if arguments.spark:
            stack.enter_context(spark_session("local[*]", {"spark.driver.memory": "4g"}))
        runs = Runs(Path(folder), rows, sample)
        seconds = interleave(
            {
                "columnar/parquet": runs.prepare("parquet", "columnar"),
                "columnar/csv": runs.prepare("csv", "columnar"),
                "columnar/jsonl": runs.prepare("jsonl", "columnar"),
                "example/parquet": runs.prepare("parquet", "example"),
                "limited/columnar/parquet": runs.prepare("parquet", "columnar", limited=True),
                **({"spark/columnar/parquet": runs.spark} if arguments.spark else {}),
                "in_memory": runs.in_memory,
                "python_example": runs.python_example,
            },
            rounds=arguments.rounds,
            warm_up=1,
        )
    peers = {
        "in_memory": rows / seconds.pop("in_memory"),
        "python_example": sample / seconds.pop("python_example"),
    }
    peers["duckdb"] = rows / seconds["columnar/parquet"]
    results = [
        Result(f"prepare/end_to_end/{name}", rows / time_, "rows/s", *_peer(name, peers))
        for name, time_ in seconds.items()
    ]
    results += [
        Result(f"prepare/stage/{name}", rows / float(np.median(times[1:])), "rows/s")
        for name, times in runs.stages.items()
    ]
    facts = {"rows": rows, "columns": width(), "pyarrow": pa.__version__}
    report(f"gmeta prepare, {rows:,} rows of {width()} columns", results, arguments.json, **facts)


def width() -> int:
    """Columns of the table."""
    return len(table(1).column_names)


def _peer(name: str, peers: dict[str, float]) -> tuple[str, float]:
    ours = {"columnar/parquet": "in_memory", "spark/columnar/parquet": "duckdb"}
    peer = ours.get(name, "python_example")
    return peer, peers[peer]


if __name__ == "__main__":
    main()

"""Part hstu: steps of the model of `tools/bench/gpu_hstu.py` over tables in different memories.

All contenders take the same batches in turn, in rounds, except the one whose rows are brought just before
their step: it shares the table of the one whose rows are brought ahead, so it takes other batches of the same
law. Another one uses existing rows: it shows the time of a step without embeddings. The time of a step ends
when its loss has reached the host. The ids by which rows are brought are made distinct beforehand.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2
from gmeta.ops import HashTable
from gmeta.policies import Tiers
from support.gpu.cuda_library import synchronize

import gpu_hstu
import numpy as np
import tensorflow as tf
from harness import Result
from parts.tiers.tables import new_table
from parts.tiers.zipf import Zipf, che

SKEW, LOOKAHEAD = 1.05, 2
_STEPS = 6  # of a round
_PAPER = 5  # % of a step that 9N-LLM's embeddings take


class Batch(NamedTuple):
    """Ids and offsets of histories, and the distinct ids: rows are brought by these."""

    ids: tf.Tensor
    offsets: tf.Tensor
    distinct: tf.Tensor


class Bare:
    """A trainer's model on existing rows."""

    def __init__(self, trainer: gpu_hstu.Trainer) -> None:
        self._trainer = trainer

    @tf.function(reduce_retracing=True)
    def step(self, rows: tf.Tensor, inverse: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
        """Train the blocks, and compute the gradient of the rows."""
        loss, of_rows = self._trainer.train_model(rows, inverse, offsets)
        values = of_rows.values if isinstance(of_rows, tf.IndexedSlices) else of_rows
        return loss + 0.0 * tf.reduce_sum(values[:1])


def measure(given: Namespace, note: Callable[..., None]) -> None:
    """Measure steps with each share of the rows in the GPU's memory."""
    for cache in given.caches:
        with tempfile.TemporaryDirectory() as folder:
            _of_cache(given, cache, folder, note)


def _of_cache(given: Namespace, cache: int, folder: str, note: Callable[..., None]) -> None:
    model = "d512x3"
    dim, blocks, heads = (32, 2, 2) if given.smoke else gpu_hstu.MODELS[model]
    rows, tokens = given.rows, given.batch
    bound = _tiers(rows, dim, cache, folder)
    with_gpu = bool(tf.config.list_physical_devices("GPU"))
    tables = {
        "hbm": new_table(rows, dim, device="gpu"),
        "tiers": new_table(rows, dim, bound, device="gpu" if with_gpu else "cpu"),
        "no_prefetch": new_table(rows, dim, bound, device="gpu" if with_gpu else "cpu"),
        "host": new_table(rows, dim, device="cpu"),
    }
    print(f"  tables of {rows:,} rows are made", flush=True)
    trainers = {name: gpu_hstu.Trainer(table, blocks, heads) for name, table in tables.items()}
    draw, random = Zipf(rows, SKEW, 0), np.random.default_rng(1)

    def batches(count: int) -> list[Batch]:
        drawn = []
        for _ in range(count):
            offsets = gpu_hstu.offsets_of(tokens, random)
            ids = draw.ids(int(offsets[-1]))
            drawn.append(Batch(*map(tf.constant, (ids, offsets, np.unique(ids)))))
        return drawn

    tiered = trainers["tiers"]
    warm = min(given.warm, math.ceil(2 * che(rows, rows * cache // 100, SKEW, tokens).batches))
    for _ in range(warm):
        [batch] = batches(1)
        tiered.table.prefetch(batch.distinct)
        tiered.rows(batch.ids, batch.offsets)
    print(f"  the cache is warm after {warm} batches", flush=True)
    bare = Bare(trainers["hbm"])
    seconds: dict[str, list[float]] = {}
    moves = {"brought": 0, "spilled": 0, "crowded": 0}
    asked = 0
    for number in range(1 + given.rounds):
        drawn = batches(_STEPS + LOOKAHEAD)
        before = _moves(tiered.table)
        took = {"tiers": pipelined(tiered, drawn)}
        after = _moves(tiered.table)
        # Other batches: the table already has the rows of the former.
        took["unpipelined"] = [_late(tiered, batch) for batch in batches(_STEPS)]
        for name in ("hbm", "no_prefetch", "host"):
            took[name] = [_step(trainers[name], batch) for batch in drawn[:_STEPS]]
        took["model"] = [_without_embeddings(trainers["hbm"].table, bare, batch) for batch in drawn[:_STEPS]]
        if number == 0:
            continue  # the first round traces functions
        asked += sum(len(batch.distinct) for batch in drawn)
        moves = {name: moves[name] + after[name] - before[name] for name in moves}
        for name, each in took.items():
            seconds.setdefault(name, []).extend(each)
        times = {name: 1e3 * statistics.median(each) for name, each in seconds.items()}
        moved = {name: count / (number * (_STEPS + LOOKAHEAD)) for name, count in moves.items()}
        hits = 100 - 100 * (moves["brought"] + moves["crowded"]) / asked
        note(*results(f"{model}/cache{cache}", times, moved, hits))


def results(about: str, times: Mapping[str, float], moved: Mapping[str, float], hits: float) -> list[Result]:
    """Return the figures of contenders' milliseconds per step, and of rows that moved in a step."""
    name = f"tiers/step/{about}"
    peers = {
        "all in HBM": "hbm",
        "prefetched late": "unpipelined",
        "no prefetch": "no_prefetch",
        "in host memory": "host",
    }
    exposed = {each: 100 * (took - times["model"]) / took for each, took in times.items()}
    return [
        Result(name, times["tiers"] / times["hbm"], "times all in HBM"),
        *(Result(f"{name}/beside/{of}", times["tiers"], "ms", peer, times[of]) for peer, of in peers.items()),
        Result(f"{name}/model", times["model"], "ms"),
        Result("tiers/exposed", exposed["tiers"], "% of a step", "9N-LLM's paper", _PAPER),
        *(Result(f"tiers/exposed/{of}", exposed[of], "% of a step") for of in peers.values()),
        *(Result(f"{name}/{each}", count, "rows a step") for each, count in moved.items()),
        Result(f"{name}/hits", hits, "%"),
    ]


def pipelined(trainer: gpu_hstu.Trainer, batches: Sequence[Batch]) -> list[float]:
    """Take a step for each batch, and return the seconds of those during which rows of a later one moved."""
    for batch in batches[:LOOKAHEAD]:
        trainer.table.prefetch(batch.distinct)
    _wait()
    seconds = []
    for number, batch in enumerate(batches):
        start = time.perf_counter()
        if number + LOOKAHEAD < len(batches):
            trainer.table.prefetch(batches[number + LOOKAHEAD].distinct)
        float(trainer.step(batch.ids, batch.offsets))
        seconds.append(time.perf_counter() - start)
    return seconds[:-LOOKAHEAD]


def _late(trainer: gpu_hstu.Trainer, batch: Batch) -> float:
    start = time.perf_counter()
    trainer.table.prefetch(batch.distinct)
    _wait()
    float(trainer.step(batch.ids, batch.offsets))
    return time.perf_counter() - start


def _step(trainer: gpu_hstu.Trainer, batch: Batch) -> float:
    start = time.perf_counter()
    float(trainer.step(batch.ids, batch.offsets))
    return time.perf_counter() - start


def _without_embeddings(table: HashTable, bare: Bare, batch: Batch) -> float:
    lookup = table.lookup(batch.ids, insert=False)
    float(lookup.rows[0, 0])
    start = time.perf_counter()
    float(bare.step(lookup.rows, lookup.inverse, batch.offsets))
    return time.perf_counter() - start


def _wait() -> None:
    """Wait for all work on the GPU, including copies in parallel with computation."""
    if tf.config.list_physical_devices("GPU"):
        synchronize()


def _moves(table: HashTable) -> dict[str, int]:
    counted = table.statistics()
    return {name: int(getattr(counted, name, 0)) for name in ("brought", "spilled", "crowded")}


def _tiers(rows: int, dim: int, cache: int, folder: str) -> Tiers:
    """Tiers with a share of the rows in HBM; without a GPU, in memory over a drive."""
    held = rows * cache // 100
    if tf.config.list_physical_devices("GPU"):
        return Tiers(hbm_rows=held, lookahead=LOOKAHEAD)
    return Tiers(host_bytes=held * (8 + 12 * dim), ssd=folder)

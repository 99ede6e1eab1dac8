"""How fast datasets of requests with histories are read, on all cores, from the page cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gmeta

import numpy as np
import tensorflow as tf
from harness import Result, interleave
from parts.history_store.days import OWN, Grown, Requests
from parts.history_store.reads import BATCH, by_affinity, shuffled
from parts.history_store.rows import examples

LONGEST = 1_000
LARGE, SMALL = 1_024, 128

Read = Callable[[dict[str, tf.Tensor]], dict[str, Any]]


def measure(folder: Path, grown: Grown, rounds: int) -> list[Result]:
    """Return the figures of the part ``speed``; examples are written into the folder if they are missing."""
    shown = folder / "examples"
    if not shown.exists():
        examples(folder, grown.requests, np.zeros(len(grown.requests), np.int64))
    found = [Result("history/op", rate(grown, rounds), "events/s")]
    of = {"affinity": "of random order", "pipelined": "of one by one", "base_batches": "of large batches"}
    for name, times in paces(grown, shown, rounds).items():
        found.append(Result(f"history/throughput/{name}", times, f"times the rate {of[name]}"))
    return found


def paces(grown: Grown, shown: Path, rounds: int) -> dict[str, float]:
    """Return the speed-up of a reader by each of three techniques.

    ``affinity``     batches of the users of one shard, in the order of users, beside random ones
    ``pipelined``    histories of some batches at once, while examples are read, beside one after another
    ``base_batches`` small batches at once, joined in the end, beside large ones, one after another
    """
    read = partial(_read, gmeta.io.HistoryStore(grown.path))
    once = tf.data.AUTOTUNE
    random = shuffled(grown.requests)
    pairs = {
        "affinity": (
            _batches(random, BATCH).map(read, once).prefetch(2),
            _batches(by_affinity(grown.requests), BATCH).map(read, once).prefetch(2),
        ),
        "pipelined": (
            _examples(shown).map(read),
            _examples(shown).map(read, once).prefetch(2),
        ),
        "base_batches": (
            _batches(random, LARGE).map(read),
            _batches(random, SMALL).map(read, once).batch(LARGE // SMALL).map(_join).prefetch(2),
        ),
    }
    found = {}
    for name, (without, with_it) in pairs.items():
        timed = {"without": partial(_drain, without), "with": partial(_drain, with_it)}
        seconds = interleave(timed, rounds=rounds)
        found[name] = seconds["without"] / seconds["with"]
    return found


def rate(grown: Grown, rounds: int) -> float:
    """Return the events a second that the op rebuilds for random requests, on all cores."""
    read = partial(_read, gmeta.io.HistoryStore(grown.path))
    batches = list(_batches(shuffled(grown.requests), BATCH).take(32))
    function = tf.function(read)
    events = sum(int(function(batch)["time"].row_splits[-1]) for batch in batches)
    seconds = interleave({"op": lambda _: [function(batch) for batch in batches]}, rounds=rounds)
    return events / seconds["op"]


def _read(store: gmeta.io.HistoryStore, batch: dict[str, tf.Tensor]) -> dict[str, Any]:
    return store.read(
        batch["user"], ["time", *OWN], until=batch["time"], generation=batch["generation"], longest=LONGEST
    )


def _batches(requests: Requests, size: int) -> tf.data.Dataset:
    columns = {"user": requests.user, "time": requests.time, "generation": requests.generation}
    return tf.data.Dataset.from_tensor_slices(columns).batch(size)


def _examples(path: Path) -> tf.data.Dataset:
    exposures = gmeta.io.sequences(
        path / "train", targets=["time", "generation"], exposed=2**31 - 1, sequences_per_batch=BATCH
    )
    return exposures.map(lambda batch: {"user": batch["task"], **_values(batch["targets"])})


def _values(columns: dict[str, tf.RaggedTensor]) -> dict[str, tf.Tensor]:
    return {name: column.values for name, column in columns.items()}


def _join(batches: dict[str, tf.RaggedTensor]) -> dict[str, tf.RaggedTensor]:
    return {name: column.merge_dims(0, 1) for name, column in batches.items()}


def _drain(dataset: tf.data.Dataset, _: int) -> None:
    for _ in dataset:
        pass

"""Training steps on histories from a store, compared with steps on fat rows, which contain their histories.

    python tools/bench/history_step.py --json FILE

A request has five exposures, and the earlier events of its user. A fat row has all of these, at most 3,000,
in one group of a prepared data set, which `gmeta.io.sequences` reads. A store that has each event once, and a
data set of exposures alone, give the same batches by `gmeta.io.late`, bit for bit: that is checked first. Fat
rows are stored for the model that needs most, so all models read them whole; `long`, `middle` and `short` are
models that take 3,000, 1,000 and 100 events. By default users have long histories, so that most fat rows are
full; `--events 600` makes them as long as published ones.

Both forms train the same GRM: one lookup for items, categories, styles and actions, HSTU in its production
form without relative biases, experts, a tower for clicks, Adam. On a GPU it is of width 512 with 3 blocks, in
bfloat16, with tables on the GPU; without one it is small. Batches have about equally many tokens in all
cases, so short histories come in batches of more requests. Both forms are read from the page cache, in random
order, anew in each round; a round's first steps, which fill the pipeline, aren't timed.

step          a step on histories from the store, in percent of one on fat rows; medians of rounds in turn
step/.../ms   the same in milliseconds
step/.../read requests a second of reading alone
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gmeta

import numpy as np
import tensorflow as tf
from harness import WARM_UP, Result, parser, report
from parts.history_rows import EVENT, PAGE, STORED, TIME, Forms, make_forms, size

READERS = {"long": 3_000, "middle": 1_000, "short": 100}
MOST = 512  # requests of a batch
FIRST = 3  # steps that aren't timed
SIZES: dict[bool, dict[str, int]] = {
    True: {"dim": 512, "blocks": 3, "heads": 4, "tokens": 65_536, "users": 500, "steps": 30},
    False: {"dim": 32, "blocks": 1, "heads": 2, "tokens": 8_000, "users": 100, "steps": 10},
}
"""Whether there is a GPU -> sizes."""

Step = Callable[[Iterator[Any]], Any]


def readers(forms: Forms, longest: int, batch: int) -> dict[str, tf.data.Dataset]:
    """Return the endless batches of both forms."""
    columns: dict[str, Any] = {
        "contexts": ["user"],
        "history": [*EVENT, TIME],
        "targets": ["item", "category", "style"],
        "labels": ["click"],
        "longest": longest,
        "sequences_per_batch": batch,
        "options": gmeta.io.ReadOptions(seed=1, shuffle_buffer=512),  # the same order for both
    }
    return {
        "fat": gmeta.io.sequences(forms.fat / "train", exposed=PAGE, **columns).repeat(),
        "late": gmeta.io.late(forms.shown / "train", gmeta.io.HistoryStore(forms.store), **columns).repeat(),
    }


def assert_same(datasets: dict[str, tf.data.Dataset], batches: int = 2) -> None:
    """Check that the first batches are equal, bit for bit."""
    for pair in tf.data.Dataset.zip(tuple(datasets.values())).take(batches):
        fat, late = (tf.nest.flatten(one, expand_composites=True) for one in pair)
        assert all(np.array_equal(a, b) for a, b in zip(fat, late, strict=True)), "the batches differ"


def ranker(given: Namespace, longest: int) -> Any:
    """Return a compiled model."""
    width = given.dim // given.heads
    backbone = gmeta.layers.HSTU(
        blocks=given.blocks,
        heads=given.heads,
        attention_dim=width,
        value_dim=width,
        max_length=longest,
        form="production",
        bias_by_place=False,
        bias_by_time=False,
    )
    widths = {"user": 8, "item": 64, "category": 16, "style": 8, "action": 8}
    model = gmeta.models.GRM.of(
        [gmeta.layers.FeatureConfig(name, dim=dim) for name, dim in widths.items()],
        contexts=["user"],
        history=list(EVENT),
        targets=["item", "category", "style"],
        labels={"ctr": "click"},
        dim=given.dim,
        backbone=backbone,
        report=None,
    )
    model.compile(tf.keras.optimizers.Adam(1e-4))
    return model


def paces(datasets: dict[str, tf.data.Dataset], step: Step, steps: int, rounds: int) -> dict[str, float]:
    """Return each form's seconds per step, the median of rounds in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in datasets}
    for number in range(WARM_UP + rounds):
        for name, dataset in datasets.items():
            batches = iter(dataset)
            for _ in range(FIRST):
                done = step(batches)
            _wait(done)
            start = time.perf_counter()
            for _ in range(steps):
                done = step(batches)
            _wait(done)
            if number >= WARM_UP:
                seconds[name].append((time.perf_counter() - start) / steps)
    return {name: statistics.median(own) for name, own in seconds.items()}


def _wait(done: Any) -> None:
    """Fetch a number that a step computed, so that the device is done."""
    tf.nest.flatten(done, expand_composites=True)[0].numpy()


def measure(forms: Forms, reader: str, given: Namespace) -> list[Result]:
    """Measure one of the readers."""
    longest = READERS[reader]
    mean = float(np.minimum(forms.histories, longest).mean()) + PAGE + 1
    batch = max(1, min(MOST, len(forms.histories) // 2, round(given.tokens / mean)))
    datasets = readers(forms, longest, batch)
    assert_same(datasets)
    read = paces(datasets, next, given.steps, given.rounds)
    train = partial(_train, ranker(given, longest).make_train_function())
    trained = paces(datasets, train, given.steps, given.rounds)
    name, peer = f"history/step/{reader}", "fat rows"
    return [
        Result(name, 100 * trained["late"] / trained["fat"], "% of fat rows"),
        Result(f"{name}/ms", 1e3 * trained["late"], "ms", peer, 1e3 * trained["fat"]),
        Result(f"{name}/read", batch / read["late"], "requests/s", peer, batch / read["fat"]),
        Result(f"{name}/events", batch * (mean - PAGE - 1) / read["late"], "events/s"),
        Result(f"{name}/batch", batch, "requests"),
    ]


def _train(function: Callable[[Iterator[Any]], dict[str, Any]], batches: Iterator[Any]) -> Any:
    return function(batches)["loss"]


def main() -> None:
    """Make both forms, and train on them."""
    gpus = tf.config.list_physical_devices("GPU")
    sizes = SIZES[bool(gpus)]
    options = parser(__doc__)
    for name, usual in sizes.items():
        options.add_argument(f"--{name}", type=int, default=usual, help="(default: %(default)s)")
    options.add_argument("--requests", type=int, default=20, help="requests of a user (default: %(default)s)")
    options.add_argument(
        "--events", type=float, default=6_000, help="mean events of a user (default: %(default)s)"
    )
    options.add_argument("--readers", nargs="+", default=list(READERS), choices=list(READERS))
    given = options.parse_args()
    if given.smoke:
        given.__dict__ |= {"users": 8, "requests": 4, "events": 60, "tokens": 400, "steps": 1, "dim": 8}
    if gpus:
        os.environ.setdefault("GMETA_TABLE_DEVICE", "gpu")
        tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        forms = make_forms(Path(folder), given.users, given.requests, given.events)
        results = [result for reader in given.readers for result in measure(forms, reader, given)]
        facts = {
            "gpu": [tf.config.experimental.get_device_details(gpu).get("device_name") for gpu in gpus],
            **{name: getattr(given, name) for name in (*sizes, "requests", "events")},
            "fat_row_events": float(forms.histories.mean()),
            "full_fat_rows": float((forms.histories == STORED).mean()),
            "bytes": {name: size(getattr(forms, name)) for name in ("fat", "shown", "store")},
        }
    report("Steps on histories", results, given.json, **facts)


if __name__ == "__main__":
    main()

"""How long a user's adapted weights stay good while tastes drift: AUC within users against their age.

    python tools/bench/adaptation_age.py
    python tools/bench/adaptation_age.py --users 2000 --seeds 3 --json FILE

A generated log has 500 items and 40 events a user and day. A user likes an item with the probability
``sigmoid(2 u v + b)``; the user's eight tastes ``u`` keep a correlation of 0.93 from day to day, and have
lost half of it after ten. A `MetaModel` that solves its head by ridge learns from the first 20 days and is
exported. Then `AdaptedUsers` observes the log: the served weights of day 20 are read again and again (aged),
or are refreshed each day (fresh), and both predict each day's events before they are observed. ``shared``
predicts without a user's weights. Values are means of the seeds, and their standard deviation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gmeta
from gmeta.export import export_model
from gmeta.export.adapted_users import AdaptedUsers, MemoryUsers
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig
from gmeta.meta import InnerLoop
from gmeta.metrics.auc import auc_of_groups
from gmeta.models import MetaModel

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from harness import Result, parser, report

ITEMS, TASTES, EVENTS, TRAINED = 500, 8, 40, 20
AGES = (1, 2, 4, 8, 16, 30)
KEEP = 80  # the last two days
Day = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


def days(users: int, seed: int) -> Iterator[Day]:
    """Draw the log: the items (users, EVENTS) of each day, and whether users liked them."""
    random = np.random.default_rng(seed)
    items, bias = random.normal(size=(ITEMS, TASTES)), random.normal(size=ITEMS) - 0.5
    tastes = random.normal(size=(users, TASTES))
    while True:
        shown = random.integers(0, ITEMS, (users, EVENTS))
        scores = 2 * np.einsum("ud,ued->ue", tastes, items[shown]) / np.sqrt(TASTES) + bias[shown]
        yield shown, (random.random(scores.shape) < 1 / (1 + np.exp(-scores))).astype(np.float32)
        tastes = 0.93 * tastes + np.sqrt(1 - 0.93**2) * random.normal(size=tastes.shape)


def batches(log: list[Day], seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """Draw tasks of 64 users: their events of two days are the support, those of the next the query."""
    random, users = np.random.default_rng(seed), len(log[0][0])
    of_query = np.arange(KEEP, KEEP + EVENTS)
    index = np.arange(64)[:, np.newaxis] * (KEEP + EVENTS)
    sides = {
        part: {"index": index + places, "mask": np.ones((64, len(places)), np.float32)}
        for part, places in (("support", np.arange(KEEP)), ("query", of_query))
    }
    for _ in range(steps):
        own, day = random.integers(0, users, 64), random.integers(2, len(log))
        shown, liked = (
            np.concatenate([log[each][part][own] for each in (day - 2, day - 1, day)], axis=1)
            for part in (0, 1)
        )
        yield {"features": {"item": shown.ravel()}, "label": liked.ravel(), "task": own, **sides}


def within_users(scores: npt.NDArray[Any], liked: npt.NDArray[Any]) -> float:
    """Return the mean AUC within users."""
    users = np.repeat(np.arange(len(liked)), liked.shape[1])
    values, weights = auc_of_groups(users, scores.ravel(), liked.ravel(), 1 - liked.ravel())
    return float(values[weights > 0].mean())


def measure(seed: int, users: int, steps: int) -> dict[tuple[str, int], float]:
    """Return what -> AUC for one seed."""
    source = days(users, seed)
    log = [next(source) for _ in range(TRAINED)]
    collection = EmbeddingCollection([FeatureConfig("item", dim=16)], optimizer=gmeta.optimizers.Adam(3e-3))
    model = MetaModel(collection, MLP({"fc": 32, "out": 1}), inner=InnerLoop("ridge"))
    model.compile(tf.keras.optimizers.Adam(3e-3), "mse")
    kinds = tf.nest.map_structure(tf.convert_to_tensor, next(batches(log, seed, 1)))
    specs = tf.nest.map_structure(lambda each: tf.TensorSpec(each.shape, each.dtype), kinds)
    tasks = tf.data.Dataset.from_generator(lambda: batches(log, seed, steps), output_signature=specs)
    model.fit(tasks, epochs=1, verbose=0)
    found: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        export_model(model, Path(folder, "1"))
        served = tf.saved_model.load(str(Path(folder, "1"))).signatures
        store = AdaptedUsers(served["adapt_many"], MemoryUsers(), keep=KEEP)
        names = np.arange(users)

        def observe(day: Day) -> None:
            store.observe(np.repeat(names, EVENTS), {"item": day[0].ravel()}, day[1].ravel())
            if diverged := store.refresh().diverged:
                raise RuntimeError(f"{len(diverged)} users diverge")

        def predict(day: Day, weights: list[bytes | None]) -> npt.NDArray[Any]:
            answers = [
                served["predict_with"](item=tf.constant(shown), weights_bytes=tf.constant(data))["rating"]
                for shown, data in zip(day[0], weights, strict=True)
            ]
            return np.stack(answers)

        observe(log[-2])
        observe(log[-1])
        aged = store.weights(names)
        for age in range(1, max(AGES) + 1):
            day = next(source)
            if age in AGES:
                for what, weights in (("aged", aged), ("fresh", store.weights(names))):
                    found[what, age] = within_users(predict(day, weights), day[1])
                shared = served["predict"](item=tf.constant(day[0].ravel()))["rating"].numpy()
                found["shared", age] = within_users(shared.reshape(day[1].shape), day[1])
            observe(day)
    return found


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--users", type=int, default=1000)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--steps", type=int, default=1500)
    given = options.parse_args()
    if given.smoke:
        given.users, given.seeds, given.steps = 70, 1, 3
    runs = [measure(seed, given.users, given.steps) for seed in range(given.seeds)]
    results = []
    for age in AGES:
        for what in ("aged", "fresh", "shared"):
            values = [run[what, age] for run in runs]
            results.append(Result(f"age/{age}/{what}", float(np.mean(values)), "AUC"))
            results.append(Result(f"age/{age}/{what}/spread", float(np.std(values)), "AUC"))
    report(f"adapted weights of {given.users} users by their age in days", results, given.json)


if __name__ == "__main__":
    main()

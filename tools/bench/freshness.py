"""What freshness is worth: the AUC of replicas that get rows and weights each minute, hour or day, or never.

    python tools/bench/freshness.py --maml 1 --json FILE

A generated log of clicks drifts (`gmeta.preprocess.synthetic.drifting_clicks`). The model of `gmeta train
--follow` trains on it, the events of each minute of event time in one step. After a day of warm-up, replicas
take the model's rows and weights at the beginning of each of their periods, and predict the events until the
next; so every event is predicted before any training on it. Metrics are of day 3:

minute .. day   the period of the replica
never           the model at the end of day 1
oracle          the true probabilities, the best possible

The predictions of a period are computed in the model itself at the beginning of the period. They equal those
of a replica with the rows and weights of that moment: `tests/tools/test_freshness_bench.py` compares them
with a session of stock TensorFlow that applies a publisher's deltas.

With --maml, an MLP of the same features is trained by MAML too, one step for the users of each minute. The
support is a user's last events before the minute, the query those of the minute. ``adapt`` predicts after an
inner step on the user's last events before the minute of the request, ``plain`` without it; ``joint`` is the
same MLP trained without an inner loop, on the same queries.

auc, log_loss, normalised_entropy    means over seeds; ``spread`` is the standard deviation
above_day                            the AUC minus that of ``day`` with the same seed
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from gmeta.experiment.online.follow import build
from gmeta.experiment.online.online_model import OnlineConfig
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel
from gmeta.optimizers import Adagrad
from gmeta.preprocess.synthetic.drifting_clicks import MINUTES_OF_DAY, DriftConfig
from support.drifting_log import FEATURES, METRICS, Floats, Log, measure

import numpy as np
import tensorflow as tf
from harness import Result, parser, report, write

PERIODS: Mapping[str, int | None] = {
    "minute": 1,
    "10 minutes": 10,
    "hour": 60,
    "6 hours": 360,
    "day": MINUTES_OF_DAY,
    "never": None,
}
"""Minutes between two refreshes of a replica."""
RATE, ROWS_RATE = 0.003, 0.2
"""The rates of Adam and of Adagrad: small steps, one a minute. Chosen on a log of another seed."""
KEPT = 16
"""A user's last events, the support."""
STALE = ("minute", "day")
"""The replicas with and without adaptation."""


def replay(
    log: Log,
    periods: Mapping[str, int | None],
    warm_up: int,
    predict: Callable[[int, int], Mapping[str, Floats]],
    train: Callable[[int], None],
) -> dict[str, Floats]:
    """Replay a log minute by minute, and predict as replicas do.

    Args:
      log: The log.
      periods: Name of a replica -> minutes between its refreshes; None: never after the warm-up.
      warm_up: Minutes before the first predictions.
      predict: Predicts the events from one minute until another by the present state; kind -> probabilities.
      train: Trains on the events of a minute.

    Returns:
      ``replica`` or ``replica/kind`` -> the probability of each event; NaN during the warm-up.
    """
    scores: dict[str, Floats] = {}
    for minute in range(log.minutes):
        done: dict[int, Mapping[str, Floats]] = {}
        for name, period in periods.items():
            since = minute - warm_up
            if since < 0 or since % (period or log.minutes):
                continue
            last = min(minute + (period or log.minutes), log.minutes)
            if last not in done:
                done[last] = predict(minute, last)
            for kind, found in done[last].items():
                key = f"{name}/{kind}" if kind else name
                scores.setdefault(key, np.full(len(log.columns["ts"]), np.nan))[log.rows(minute, last)] = (
                    found
                )
        train(minute)
    return scores


def online(log: Log, seed: int) -> tuple[Any, Callable[..., Any], Callable[[int], None]]:
    """Return the model of `gmeta train --follow`, a function that predicts and one that trains."""
    columns = {**dict.fromkeys(FEATURES, "int64"), "ts": "int64", "click": "float32"}
    config = OnlineConfig(
        "",
        "click",
        "ts",
        columns=columns,
        features=FEATURES,
        users="user",
        learning_rate=RATE,
        rows_rate=ROWS_RATE,
        seed=seed,
    )
    model = build(config)
    specs = {name: tf.TensorSpec([None], tf.int64) for name in FEATURES}
    forward = tf.function(lambda x: tf.sigmoid(model(x, training=False)[:, 0]), input_signature=[specs])

    def batches() -> Iterator[Any]:
        for minute in range(log.minutes):
            rows = log.rows(minute, minute + 1)
            if rows.stop > rows.start:
                yield log.features(rows), log.columns["click"][rows]

    data = tf.data.Dataset.from_generator(
        batches, output_signature=(specs, tf.TensorSpec([None], tf.float32))
    )
    iterator = iter(data.prefetch(2))
    step = model.make_train_function()

    def train(minute: int) -> None:
        if log.begins[minute + 1] > log.begins[minute]:
            step(iterator)

    def predict(first: int, last: int) -> dict[str, Floats]:
        return {"": forward(log.features(log.rows(first, last))).numpy()}

    return model, predict, train


class Recent:
    """Tasks of a minute: its users, their last events before it, and its events.

    Args:
      log: The log.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        users = log.columns["user"]
        self._order = np.argsort(users, kind="stable")  # by user, then by time
        self._starts = np.searchsorted(users[self._order], np.arange(users.max() + 2))

    def batch(self, minute: int) -> tuple[dict[str, Any], Floats] | None:
        """Return the tasks and, for each event, its place among (tasks, events); None without events."""
        log, rows = self._log, self._log.rows(minute, minute + 1)
        if rows.stop == rows.start:
            return None
        users, task = np.unique(log.columns["user"][rows], return_inverse=True)
        known, queries = [], []
        for number, user in enumerate(users):
            own = self._order[self._starts[user] : self._starts[user + 1]]
            now = np.searchsorted(own, rows.start)
            known.append(own[max(now - KEPT, 0) : now])
            queries.append(np.flatnonzero(task == number))
        width = max(map(len, queries))
        places = np.zeros(len(task), np.int64)
        for number, query in enumerate(queries):
            places[query] = number * width + np.arange(len(query))
        taken = np.concatenate([*known, np.arange(rows.start, rows.stop)])
        before = sum(map(len, known))
        offsets = np.cumsum([0, *map(len, known)])
        support = [np.arange(a, b) for a, b in pairwise(offsets)]
        batch = {
            "features": {name: log.columns[name][taken] for name in FEATURES},
            "label": log.columns["click"][taken],
            "task": users,
            "support": _padded(support, KEPT),
            "query": _padded([before + each for each in queries], width),
        }
        return batch, places


def _padded(indices: list[Floats], width: int) -> dict[str, Floats]:
    index, mask = np.zeros((len(indices), width), np.int64), np.zeros((len(indices), width), np.float32)
    for row, each in enumerate(indices):
        index[row, : len(each)], mask[row, : len(each)] = each, 1
    return {"index": index, "mask": mask}


_TASK_SPECS = {
    "features": {name: tf.TensorSpec([None], tf.int64) for name in FEATURES},
    "label": tf.TensorSpec([None], tf.float32),
    "task": tf.TensorSpec([None], tf.int64),
    **{
        part: {
            "index": tf.TensorSpec([None, None], tf.int64),
            "mask": tf.TensorSpec([None, None], tf.float32),
        }
        for part in ("support", "query")
    },
}


def maml(log: Log, seed: int, steps: int, rate: float) -> tuple[Callable[..., Any], Callable[[int], None]]:
    """Return functions that predict by, and train, an MLP with an inner loop, or with ``steps=0`` without."""
    tf.random.set_seed(seed)
    features = [FeatureConfig(name, TableConfig(name, 16, optimizer=Adagrad(ROWS_RATE))) for name in FEATURES]
    model = MetaModel(
        EmbeddingCollection(features, seed=seed), MLP({"fc1": 64, "fc2": 32, "out": 1}, seed=seed)
    )
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(
        tf.keras.optimizers.Adam(RATE), loss, inner=InnerLoop("maml", steps=steps, learning_rate=rate)
    )
    recent = Recent(log)

    def batches() -> Iterator[Any]:
        for minute in range(log.minutes):
            if (found := recent.batch(minute)) is not None:
                yield found[0]

    data = tf.data.Dataset.from_generator(batches, output_signature=_TASK_SPECS)
    iterator = iter(data.prefetch(2))
    step = model.make_train_function()
    kinds = {"plain": 0, "adapt": steps} if steps else {"joint": 0}
    forward = tf.function(
        lambda batch: [tf.sigmoid(each) for each in model.predict_after(batch, [*kinds.values()]).values()],
        input_signature=[_TASK_SPECS],
    )

    def train(minute: int) -> None:
        if log.begins[minute + 1] > log.begins[minute]:
            step(iterator)

    def predict(first: int, last: int) -> dict[str, Floats]:
        parts: dict[str, list[Floats]] = {kind: [np.empty(0, np.float32)] for kind in kinds}
        for minute in range(first, last):
            if (found := recent.batch(minute)) is not None:
                batch, places = found
                for kind, each in zip(kinds, forward(batch), strict=True):
                    parts[kind].append(each.numpy().reshape(-1)[places])
        return {kind: np.concatenate(each) for kind, each in parts.items()}

    return predict, train


class Found:
    """The metrics of all seeds so far.

    Args:
      day: Minutes of a day.
    """

    def __init__(self, day: int) -> None:
        self._span = range(2 * day, 3 * day, 60)
        self._measured: dict[str, list[dict[str, float]]] = {}
        self._hours: dict[str, list[list[float]]] = {}

    def note(self, log: Log, scores: Mapping[str, Floats]) -> None:
        """Measure what was predicted of a log."""
        for name, each in scores.items():
            self._measured.setdefault(name, []).append(measure(log, each, self._span.start, self._span.stop))
            hours = [measure(log, each, first, first + 60)["auc"] for first in self._span]
            self._hours.setdefault(name, []).append(hours)
            print(name, self._measured[name][-1], flush=True)

    def results(self) -> list[Result]:
        """Return the means and spreads."""
        results: list[Result] = []
        for name, measured in self._measured.items():
            for metric in METRICS:
                results += _with_spread(f"freshness/{name}/{metric}", [each[metric] for each in measured])
            if name in PERIODS and name != "day":
                pairs = zip(measured, self._measured["day"], strict=True)
                away = [each["auc"] - other["auc"] for each, other in pairs]
                results += _with_spread(f"freshness/{name}/above_day", away)
        return results

    def facts(self, events: int) -> dict[str, Any]:
        """Return the number of events and seeds, and the mean AUC of each hour."""
        hours = {name: np.round(np.mean(each, axis=0), 4).tolist() for name, each in self._hours.items()}
        seeds = {name: len(each) for name, each in self._measured.items()}
        return {"events": events, "seeds": seeds, "auc_by_hour": hours}

    def write(self, path: Path | None, events: int) -> None:
        """Write the results so far."""
        if path is not None:
            write(path, self.results(), **self.facts(events))


def _with_spread(name: str, values: list[float]) -> list[Result]:
    found = [Result(name, round(statistics.mean(values), 5), "1")]
    if len(values) > 1:
        found.append(Result(f"{name}/spread", round(statistics.stdev(values), 5), "1"))
    return found


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--events", type=int, default=6000, help="mean events an hour (%(default)s)")
    options.add_argument("--seeds", type=int, default=3, help="logs, and models (%(default)s)")
    options.add_argument("--maml", type=int, default=0, help="seeds of them for MAML (%(default)s)")
    options.add_argument("--inner-rate", type=float, default=0.1, help="MAML's inner rate (%(default)s)")
    given = options.parse_args()
    day = 60 if given.smoke else MINUTES_OF_DAY
    config = DriftConfig(hours=3 * day // 60, events=600 if given.smoke else given.events)
    seeds, with_maml = (1, 1) if given.smoke else (given.seeds, given.maml)
    found, events = Found(day), 0
    for seed in range(seeds):
        log = Log(replace(config, seed=seed))
        found.note(log, {"oracle": log.columns["p_click"]})
        found.note(log, replay(log, PERIODS, day, *online(log, seed)[1:]))
        events = len(log.columns["ts"])
        found.write(given.json, events=events)
    for seed in range(with_maml):
        log = Log(replace(config, seed=seed))
        for steps in (1, 0):
            stale = {name: PERIODS[name] for name in STALE}
            scores = replay(log, stale, 2 * day, *maml(log, seed, steps, given.inner_rate))
            found.note(log, {f"maml/{name}": each for name, each in scores.items()})
            found.write(given.json, events=events)
    report(f"Metrics of the third day, {events:,} events", found.results(), given.json, **found.facts(events))


if __name__ == "__main__":
    main()

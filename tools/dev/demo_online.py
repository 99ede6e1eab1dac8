"""Serve a stream of clicks while a model trains on it, and show what freshness is worth: `make demo-online`.

    python tools/dev/demo_online.py RUN

Three days of a log whose tastes and items drift (`gmeta.preprocess.synthetic.drifting_clicks`). Day 1 is
there at the start; the others pass in two minutes. `gmeta train --follow` trains on the log's folder and
publishes deltas each second. This process is the application: each second it receives the next events as
requests, asks replicas for the probabilities of clicks, and then appends the events and their clicks to the
log. So a replica predicts each event before the training reads it.

A replica is a session of stock TensorFlow that serves the exported model and applies deltas by its signature
``apply_delta``. The replicas differ in how often, by the log's time, they take the deltas that are there.

::

    RUN/events/       the log, a file each second
    RUN/training/     the run of `gmeta train --follow`
    RUN/online/       what it publishes
    RUN/freshness.png, RUN/freshness.json   the result
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

from gmeta.core.files import write_atomically
from gmeta.export.delivery import catch_up
from gmeta.export.published_folder import MODEL, PublishedFolder
from gmeta.export.servers import Server
from gmeta.preprocess.synthetic.drifting_clicks import MINUTES_OF_DAY, DriftConfig
from support.drifting_log import FEATURES, METRICS, Floats, Log, measure

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import tensorflow as tf
from draw_freshness import draw

PERIODS: Mapping[str, int | None] = {
    "each second": 0,
    "2 hours": 120,
    "6 hours": 360,
    "day": MINUTES_OF_DAY,
    "never": None,
}
"""Minutes of the log between two refreshes of a replica; None: never after day 1."""
SETTINGS = (
    'label="click"',
    'time="ts"',
    'unit="us"',
    f"features={json.dumps(FEATURES)}",
    'window="2h"',
    "batch_size=128",
    "learning_rate=0.003",
    "rows_rate=0.2",
    'publish_every="1s"',
    'dense_every="1s"',
)
_WINDOWS = 11  # of progressive metrics that end within day 1
_QUIET = 4.0  # seconds without a delta after these, after which training waits for events
_LONGEST = 300.0  # seconds to wait for the training


class Replica(Server):
    """A session of stock TensorFlow in place of a server.

    Args:
      model: The folder of a SavedModel.
    """

    def __init__(self, model: Path) -> None:
        super().__init__(str(model))
        self._session = tf.compat.v1.Session(graph=tf.Graph())
        with self._session.graph.as_default():
            loaded = tf.compat.v1.saved_model.load(self._session, ["serve"], str(model))
        self._signatures = loaded.signature_def

    def _run(self, name: str, **inputs: object) -> Floats:
        signature = self._signatures[name]
        feed = {signature.inputs[key].name: value for key, value in inputs.items()}
        output = "click" if "click" in signature.outputs else next(iter(signature.outputs))
        return np.asarray(self._session.run(signature.outputs[output].name, feed))

    def ask(self, signature: str, inputs: Mapping[str, bytes]) -> int:
        """Call a signature that returns a version."""
        return int(self._run(signature, **inputs))

    def predict(self, features: Mapping[str, Floats]) -> Floats:
        """Return the probability of a click for each event."""
        return self._run("predict", **features)


class Serving:
    """The replicas of all freshnesses, and what they have predicted.

    Args:
      log: The log.
      online: The publisher's folder.
      begin: The minute of the first requests.
    """

    def __init__(self, log: Log, online: Path, begin: int) -> None:
        self._log, self._online, self._begin = log, online, begin
        model = online / MODEL / str(PublishedFolder(online).contents().models[-1])
        self._replicas = {name: Replica(model) for name in PERIODS}
        self._due: dict[str, float] = dict.fromkeys(PERIODS, begin)
        self.refreshes = dict.fromkeys(PERIODS, 0)
        self.scores = {name: np.full(len(log.columns["ts"]), np.nan) for name in PERIODS}

    def answer(self, first: int, last: int) -> None:
        """Refresh the replicas that are due, then predict the events from one minute until another."""
        rows = self._log.rows(first, last)
        for name, replica in self._replicas.items():
            if first >= self._due[name]:
                catch_up(self._online, replica, lambda _: None)
                self._due[name] = self._next(PERIODS[name], first)
                self.refreshes[name] += 1
            self.scores[name][rows] = replica.predict(self._log.features(rows))

    def _next(self, period: int | None, now: int) -> float:
        """Return the minute of the next refresh."""
        if period is None:
            return np.inf
        return now + period - (now - self._begin) % period if period else now


class Training:
    """`gmeta train --follow` in a process.

    Args:
      run: The demo's folder.
    """

    def __init__(self, run: Path) -> None:
        self.online, self._progress = run / "online", run / "training" / "progress.json"
        sets = [word for each in SETTINGS for word in ("--set", each)]
        follows = ["train", "--follow", str(run / "events"), "--run", str(run / "training")]
        words = [str(Path(sys.executable).with_name("gmeta")), *follows, *sets, "--publish", str(self.online)]
        self._process = subprocess.Popen(words)

    def check(self) -> None:
        """Raise an error if training has ended."""
        if self._process.poll() is not None:
            raise SystemExit(f"gmeta train has ended with status {self._process.returncode}; see above")

    def wait(self) -> None:
        """Wait until all events that are there have been trained and published."""
        changed, last, began = time.monotonic(), -1, time.monotonic()
        while last < 1 or self._windows() < _WINDOWS or time.monotonic() - changed < _QUIET:
            self.check()
            if time.monotonic() - began > _LONGEST:
                raise SystemExit(f"day 1 isn't trained and published after {_LONGEST:.0f} s; see above")
            newest = PublishedFolder(self.online).contents().version
            if newest != last:
                changed, last = time.monotonic(), newest
            time.sleep(0.2)

    def _windows(self) -> int:
        return len(json.loads(self._progress.read_text())) if self._progress.exists() else 0

    def stop(self, append_last: Callable[[], None]) -> None:
        """End training, which saves a checkpoint; further rows end its wait for them."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            append_last()
            self._process.wait(_LONGEST)


def append(log: Log, folder: Path, number: int, first: int, last: int) -> None:
    """Append the events from one minute until another to the log's folder, as a file."""
    rows, out = log.rows(first, last), io.BytesIO()
    columns = {name: values[rows] for name, values in log.columns.items() if name != "p_click"}
    pyarrow.parquet.write_table(pa.table(columns), out)
    write_atomically(folder / f"{number:06d}.parquet", out.getvalue())


def show(log: Log, serving: Serving, run: Path) -> None:
    """Print the metrics of the last day, and draw them."""
    day = log.minutes - MINUTES_OF_DAY, log.minutes
    scores = {**serving.scores, "true probabilities": log.columns["p_click"]}
    found = {name: measure(log, each, *day) for name, each in scores.items()}
    print(f"\nday 3, by how often replicas were refreshed\n{'':<20}{'refreshes':>10}", end="")
    print("".join(f"{name:>20}" for name in METRICS))
    for name, each in found.items():
        print(f"{name:<20}{serving.refreshes.get(name, ''):>10}", end="")
        print("".join(f"{each[metric]:>20.4f}" for metric in METRICS))
    best = found.pop("true probabilities")["auc"]
    low = min(0.5, *(each["auc"] for each in found.values()))
    print(f"\nAUC, from {low:.2f} to that of the true probabilities, {best:.3f}")
    for name, each in found.items():
        print(f"{name:<14}{each['auc']:.3f}  {'#' * round(60 * (each['auc'] - low) / (best - low))}")
    hours = range(*day, 60)
    by_hour = {name: [measure(log, scores[name], hour, hour + 60)["auc"] for hour in hours] for name in found}
    draw(run / "freshness.png", {name: each["auc"] for name, each in found.items()}, by_hour, best=best)
    write_atomically(run / "freshness.json", json.dumps({"day": found, "best": best, "auc_by_hour": by_hour}))
    print(f"\nthe curves: {run / 'freshness.png'}")


def main(run: Path, events: int, seconds: int) -> None:
    """Run the demo."""
    tf.get_logger().setLevel("ERROR")
    log = Log(DriftConfig(hours=72, events=events))
    for name in ("events", "training", "online"):
        shutil.rmtree(run / name, ignore_errors=True)
    append(log, run / "events", 0, 0, MINUTES_OF_DAY)
    print(f"{len(log.columns['ts']):,} events in three days; the first is written", flush=True)
    edges = np.linspace(MINUTES_OF_DAY, log.minutes, seconds + 1).astype(int).tolist()
    training = Training(run)
    try:
        training.wait()
        serving = Serving(log, training.online, MINUTES_OF_DAY)
        print(f"requests: each second those of {edges[1] - edges[0]} minutes", flush=True)
        begin = time.monotonic()
        for number, (first, last) in enumerate(pairwise(edges), 1):
            serving.answer(first, last)
            if number < seconds:
                append(log, run / "events", number, first, last)
            training.check()
            time.sleep(max(begin + number - time.monotonic(), 0.0))
    finally:
        training.stop(lambda: append(log, run / "events", seconds, *edges[-2:]))
    show(log, serving, run)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the folder, whose earlier contents are replaced")
    parser.add_argument("--events", type=int, default=3000, help="mean events an hour  [default: 3000]")
    parser.add_argument("--seconds", type=int, default=110, help="for days 2 and 3  [default: 110]")
    given = parser.parse_args()
    main(given.run, given.events, given.seconds)

"""What it takes to publish what a step of training changes, and to apply it in a server that answers.

    python tools/bench/publish.py
    python tools/bench/publish.py --rows 10000000 --json FILE
    python tools/bench/publish.py --catalogue 100000 --json FILE

A table of rows 64 wide, trained by SGD. Between two deltas, ten steps change a hundredth of all rows. The
server is the exported model in another process, as TensorFlow Serving runs it: a session of TensorFlow's own
ops. It is asked for 1,000 rows again and again: alone, beside a thread that keeps a core busy, and while it
applies a delta, by turns.

delta          making a delta; its bytes, beside those of the rows that it has
base           writing the SavedModel
apply          in the server; apply/first: the first one, by which TensorFlow optimizes the graph
request        the 50th and 99th percentile of a request while a delta is applied, and beside the busy thread;
               the peer is the server alone

With --catalogue, instead, the time in which a session applies deltas to models that hold the vectors of a
catalogue, 64 wide, and computes these again, and the seconds of processors that this takes:

changed        a next-item model, 1% of whose items have changed
all            the same, all of whose items have changed
whole          a two-tower model with a hidden layer of 128: the vectors of all items
dense          it, by a delta with dense weights
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import gmeta  # noqa: F401  before TensorFlow: it selects Keras 2
from gmeta.export import Publisher
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model, NextItemModel, TwoTower
from gmeta.ops import AttentionMask
from gmeta.optimizers import SGD

import numpy as np
import tensorflow as tf
from harness import Result, parser, report

DIM, STEPS, CHANGED, ASKED = 64, 10, 0.01, 1000
PART = Path(__file__).parent / "parts" / "delta_server.py"


class Scores(Model):
    """One table, one weight a column."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = EmbeddingCollection([FeatureConfig("id", TableConfig("id", DIM))], optimizer=SGD(0.1))
        self.dense = tf.keras.layers.Dense(1)

    def call(self, inputs: dict[str, tf.Tensor], training: bool = False) -> tf.Tensor:
        """Score ids."""
        return self.dense(self.rows(inputs, training=training)["id"])[:, 0]


def step(model: Scores, ids: np.ndarray) -> None:
    """Change the rows of some ids."""
    lookup = model.rows.lookup({"id": tf.constant(ids)}, insert=True)
    model.rows.apply_gradients(lookup, [tf.ones_like(rows) for rows in lookup.rows])


class Nothing(tf.keras.layers.Layer):
    """A backbone that returns its input."""

    needs_times, mask = False, AttentionMask()

    def call(self, x: object, times: object = None, view: object = None, training: object = None) -> object:
        """Return the tokens."""
        return x


def apply_times(
    model: NextItemModel | TwoTower, changes: Mapping[str, tuple[np.ndarray, bool]], rounds: int
) -> Iterable[tuple[str, float, float]]:
    """Return the seconds in which deltas are applied, and those of processors, medians.

    Args:
      model: The model.
      changes: Name -> the items that change, and whether the delta has dense weights.
      rounds: How often each is measured, after a first time.
    """

    def step(items: np.ndarray) -> None:
        lookup = model.collection.lookup(model.item_inputs(tf.constant(items)), insert=True)
        model.collection.apply_gradients(lookup, [tf.ones_like(rows) for rows in lookup.rows])

    step(np.arange(model.items))
    step(np.arange(1))
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(model, folder)
        base = publisher.publish_base().path
        session = tf.compat.v1.Session(graph=tf.Graph())
        with session.graph.as_default():
            saved = tf.compat.v1.saved_model.load(session, ["serve"], str(base))
        definition = saved.signature_def["apply_delta"]
        for name, (items, dense) in changes.items():
            took = []
            for _ in range(rounds + 1):
                step(items)
                delta = publisher.publish(dense=dense).path.read_bytes()
                start = np.array([time.perf_counter(), time.process_time()])
                session.run(
                    definition.outputs["delta_version"].name, {definition.inputs["delta_bytes"].name: delta}
                )
                took.append(np.array([time.perf_counter(), time.process_time()]) - start)
                step(np.arange(1))
            seconds, busy = np.median(took[1:], axis=0)
            yield name, float(seconds), float(busy)


def measure_catalogue(items: int, rounds: int, file: str | None) -> None:
    """Measure deltas to models that hold vectors of a catalogue."""
    some = np.random.default_rng(0).choice(items, max(items // 100, 1), replace=False)

    def collection(*names: str) -> EmbeddingCollection:
        features = [FeatureConfig(name, TableConfig(name, DIM)) for name in names]
        return EmbeddingCollection(features, optimizer=SGD(0.1))

    next_item = NextItemModel(collection("item"), Nothing(), items=items, max_length=8)
    towers = TwoTower(collection("item", "history"), items=items, history="history", hidden=[128])
    found = [
        *apply_times(next_item, {"changed": (some, False), "all": (np.arange(items), False)}, rounds),
        *apply_times(towers, {"whole": (some, False), "dense": (some, True)}, rounds),
    ]
    report(
        f"a catalogue of {items:,} vectors of {DIM}",
        [
            Result(f"publish/catalogue{items}/{what}/{name}", value, "s")
            for name, seconds, busy in found
            for what, value in (("apply", seconds), ("processor", busy))
        ],
        file,
    )


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=1_000_000, help="rows in the table (%(default)s)")
    options.add_argument("--catalogue", type=int, help="measure a catalogue of this many items instead")
    options = options.parse_args()
    if options.catalogue is not None:
        return measure_catalogue(options.catalogue, options.rounds, options.json)
    rows = 20_000 if options.smoke else options.rows
    model, random = Scores(), np.random.default_rng(0)
    model({"id": tf.constant([0])})
    for first in range(0, rows, 1_000_000):
        step(model, np.arange(first, min(first + 1_000_000, rows)))
    step(model, np.arange(1))
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(model, folder)
        base = publisher.publish_base()
        deltas = []
        for _ in range(options.rounds + 1):
            for _ in range(STEPS):
                step(model, random.choice(rows, max(int(rows * CHANGED / STEPS), 1), replace=False))
            deltas.append(publisher.publish(dense=False))
        del model
        words = [sys.executable, str(PART), str(base.path), str(rows), str(ASKED)]
        done = subprocess.run(
            [*words, *(str(delta.path) for delta in deltas)], capture_output=True, text=True, check=True
        )
        served = json.loads(done.stdout.splitlines()[-1])
    first = deltas[0]
    path = f"publish/rows{rows}"
    report(
        f"{rows:,} rows of {DIM}, of which {CHANGED:.0%} change",
        [
            Result(f"{path}/base", base.seconds, "s"),
            Result(f"{path}/delta", float(np.median([delta.seconds for delta in deltas])), "s"),
            Result(f"{path}/delta/bytes", first.bytes, "B", "rows alone", first.rows * DIM * 4),
            Result(f"{path}/apply", float(np.median(served["apply"])), "s"),
            Result(f"{path}/apply/first", served["first"], "s"),
            *(
                Result(f"{path}/{name}/p{which}", value, "ms", "alone", served["alone"][which])
                for name, what in (("request", "during"), ("request/busy", "busy"))
                for which, value in served[what].items()
            ),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()

"""What it takes to publish what a step of training changes, and to apply it in a server that answers.

    python tools/bench/publish.py
    python tools/bench/publish.py --rows 10000000 --json FILE

A table of rows 64 wide, trained by SGD. Between two deltas, ten steps change a hundredth of all rows. The
server is the exported model in another process, as TensorFlow Serving runs it: a session of TensorFlow's own
ops. It is asked for 1,000 rows again and again: alone, beside a thread that keeps a core busy, and while it
applies a delta, by turns.

delta          making a delta; its bytes, beside those of the rows that it has
base           writing the SavedModel
apply          in the server; apply/first: the first one, by which TensorFlow optimizes the graph
request        the 50th and 99th percentile of a request while a delta is applied, and beside the busy thread;
               the peer is the server alone
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import gmeta  # noqa: F401  before TensorFlow: it selects Keras 2
from gmeta.export import Publisher
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model
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


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=1_000_000, help="rows in the table (%(default)s)")
    options = options.parse_args()
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

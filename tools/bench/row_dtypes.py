"""What rows of 8 and 16 bits save in exported models and deltas, and what they cost in AUC.

    python tools/bench/row_dtypes.py --json FILE
    python tools/bench/row_dtypes.py --run runs/ranking --json FILE

A table of rows 64 wide, exported with rows of float32, bfloat16 and int8: ``static`` without deltas, ``live``
with the signatures that take them.

disk      bytes of the SavedModel
memory    what a session of stock TensorFlow takes when it loads and serves the model
request   median of a request for 1,000 rows; the models are asked in turn
delta     bytes of a delta that has a hundredth of the rows

With --run, the models of `gmeta train --for ranking` are measured on its test rows, by what exports compute:
the mean of AUC and log loss over its seeds, and ``spread``, the standard deviation; ``difference`` is the
mean over seeds of the difference from float32.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import gmeta  # noqa: F401  before TensorFlow: it selects Keras 2
from gmeta.experiment.results.metrics import auc
from gmeta.export import Publisher, export_model
from gmeta.ops.table.portable_tables import portable_ops

import numpy as np
import tensorflow as tf
from harness import Result, parser, report
from publish import CHANGED, DIM, Scores, step

PART = Path(__file__).parent / "parts" / "loaded_models.py"
DTYPES = ("float32", "bfloat16", "int8")
ASKED = 1000


def size_of(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def serve(rows: int, rounds: int, folders: Sequence[Path]) -> dict[str, object]:
    """Load models in another process, and ask them."""
    words = [sys.executable, str(PART), str(rows), str(ASKED), str(rounds), *map(str, folders)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def sizes(rows: int, rounds: int, folder: Path) -> list[Result]:
    """Measure bytes, memory and requests."""
    model, random = Scores(), np.random.default_rng(0)
    model({"id": tf.constant([0])})
    for first in range(0, rows, 1_000_000):
        step(model, np.arange(first, min(first + 1_000_000, rows)))
    step(model, np.arange(1))
    exports: dict[str, dict[str, Path]] = {"static": {}, "live": {}}
    publishers = {dtype: Publisher(model, folder / dtype, dtype=dtype) for dtype in DTYPES}
    for dtype in DTYPES:
        exports["static"][dtype] = export_model(model, folder / f"static-{dtype}", dtype=dtype).folder
        exports["live"][dtype] = publishers[dtype].publish_base().path
    step(model, random.choice(rows, int(rows * CHANGED), replace=False))
    deltas = {dtype: publishers[dtype].publish(dense=False) for dtype in DTYPES}
    del model
    found: dict[str, dict[str, float]] = {}
    for kind, folders in exports.items():
        asked = serve(rows, 100 * rounds, [*folders.values()])["ms"]
        for dtype, where in folders.items():
            found.setdefault(f"{kind}/disk", {})[dtype] = size_of(where)
            found.setdefault(f"{kind}/memory", {})[dtype] = serve(rows, 0, [where])["memory"]
            found.setdefault(f"{kind}/request", {})[dtype] = asked[str(where)]
    found["delta"] = {dtype: delta.bytes for dtype, delta in deltas.items()}
    found["delta/seconds"] = {dtype: delta.seconds for dtype, delta in deltas.items()}
    units = {"request": "ms", "seconds": "s"}
    return [
        Result(
            f"row_dtypes/rows{rows}/{name}/{dtype}",
            value,
            units.get(name.rpartition("/")[2], "B"),
            *(() if dtype == "float32" else ("float32", values["float32"])),
        )
        for name, values in found.items()
        for dtype, value in values.items()
    ]


def quality(run: Path) -> list[Result]:
    """Measure a run's methods with rows of each dtype."""
    from gmeta.experiment.ranking.examples import Parts
    from gmeta.experiment.ranking.models import ModelScorer, load_best
    from gmeta.experiment.runs.run_folder import RunFolder

    held = RunFolder(run)
    config, data = held.load()
    parts = Parts.read(config, data, "raise")
    results = []
    for method, settings in config.methods.items():
        found: dict[str, dict[str, list[float]]] = {"auc": {}, "logloss": {}}
        for seed in config.seeds:
            model = load_best(method, settings, seed, parts=parts, folder=held.training(method, seed))
            for dtype in DTYPES:
                with portable_ops(dtype=dtype):
                    logits = ModelScorer(model, parts.encoding).scores(parts.test)
                for metric, value in measure(parts.test.labels, logits).items():
                    found[metric].setdefault(dtype, []).append(value)
        for metric, by_dtype in found.items():
            for dtype, values in by_dtype.items():
                name = f"row_dtypes/{metric}/{method}/{dtype}"
                away = np.subtract(values, by_dtype["float32"])
                results.append(Result(name, statistics.mean(values), ""))
                results.append(Result(f"{name}/spread", statistics.stdev(values), ""))
                if dtype != "float32":
                    results.append(Result(f"{name}/difference", float(away.mean()), ""))
                    results.append(Result(f"{name}/difference/spread", float(away.std(ddof=1)), ""))
    return results


def measure(labels: np.ndarray, logits: np.ndarray) -> dict[str, float]:
    """Return the AUC and the log loss."""
    losses = np.logaddexp(0, np.where(labels > 0, -logits, logits))
    return {"auc": auc(labels, logits, 1.0), "logloss": float(losses.mean())}


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=1_000_000, help="rows in the table (%(default)s)")
    options.add_argument("--run", type=Path, help="a run of gmeta train --for ranking, with several seeds")
    given = options.parse_args()
    if given.run is not None:
        report(f"{given.run} with rows of 8 and 16 bits", quality(given.run), given.json)
        return
    rows = 5_000 if given.smoke else given.rows
    with tempfile.TemporaryDirectory() as folder:
        found = sizes(rows, given.rounds, Path(folder))
    report(f"{rows:,} rows of {DIM} in 8 and 16 bits", found, given.json)


if __name__ == "__main__":
    main()

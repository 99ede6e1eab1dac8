"""Meta-training on more and more ranks: samples a second, and whether they learn what one rank learns.

    gmeta bench scaling --json FILE
    gmeta bench scaling --ranks 1 2 4 --model dlrm

MAML of second order on generated tasks, under `fit`: Zipf ids of many features into dynamic tables, which
the ranks share out, and a multi-layer perceptron, which each has. A rank's batch stays the same, so N ranks
do N times the work. Where there are GPUs each rank takes one for the dense part; rows are in host memory. The
small model has steps of a few milliseconds on a GPU, which the exchange dominates; the larger one, with the
features of a click log and five inner steps, has steps in which computing does.

samples      support and query samples a second, all ranks together; medians over epochs, the first left out
speed_up     their ratio to N times one rank's (G-Meta, table 1: 1, 0.94, 0.89, 0.86 of ideal)
agreement    the largest difference of any row or weight after training on the same global batches, relative
             to the largest number beside it, from one rank on the CPU; also with rows and gradients that
             travel in 16 bits between two ranks
rms          of these the root mean square of the difference over that of the numbers; the largest difference
             is Adam's: where a gradient is rounding alone, its sign is chance, and a step has its full length
rms_rows     the same of the tables' rows alone
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness import Result, parser, report
from parts.jobs import run_job

SIZES = {
    "dim": 32,
    "features": 16,
    "hidden": [512, 256],
    "tasks": 64,
    "support": 24,
    "query": 8,
    "inner_steps": 1,
    "distinct_steps": 10,
    "steps": 50,
    "wire_dtype": "float32",
}
MODELS: dict[str, dict[str, Any]] = {
    "small": {},
    "dlrm": {"dim": 64, "features": 23, "hidden": [1024, 512, 256], "tasks": 256, "inner_steps": 5},
}


def run(ranks: int, settings: dict[str, Any], folder: Path, gpu: bool = True) -> Any:
    """Train on so many ranks; see parts/maml_rank.py."""
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return run_job("meta.rank", ranks, settings, folder / "found.json", hidden)


def learned_rows(ranks: int, settings: dict[str, Any], gpu: bool) -> dict[str, np.ndarray]:
    """Rows of all ranks in the order of their keys, and rank 0's dense weights."""
    with tempfile.TemporaryDirectory() as name:
        run(ranks, settings, Path(name), gpu)
        parts = [dict(np.load(Path(name) / f"rank{rank}.npz")) for rank in range(ranks)]
    found = {key: value for key, value in parts[0].items() if key.startswith("dense")}
    for number in range(sum(key.startswith("keys") for key in parts[0])):
        keys = np.concatenate([part[f"keys{number}"] for part in parts])
        rows = np.concatenate([part[f"rows{number}"] for part in parts])
        found |= {f"keys{number}": np.sort(keys), f"rows{number}": rows[np.argsort(keys)]}
    return found


def difference(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest, relative to the largest number of its array; infinite where keys differ."""
    worst = 0.0
    for name, values in expected.items():
        if found[name].shape != values.shape:
            return float("inf")
        worst = max(worst, float(np.abs(found[name] - values).max() / max(np.abs(values).max(), 1e-30)))
    return worst


def root_mean_square(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], parts: tuple[str, ...] = ("rows", "dense")
) -> float:
    """Of the differences of rows and weights, relative to that of the numbers; the worst array's."""
    pairs = [(found[name], values) for name, values in expected.items() if name.startswith(parts)]
    return max(float(np.linalg.norm(own - values) / np.linalg.norm(values)) for own, values in pairs)


def agreement(ranks: list[int], settings: dict[str, Any]) -> list[Result]:
    """How far what so many ranks have learned is from what one has on the CPU; in 16 bits too."""
    results = []
    expected = learned_rows(1, settings, gpu=False)
    for size in ranks:
        off = difference(learned_rows(size, settings, gpu=True), expected)
        results.append(Result(f"scaling/agreement/np{size}", off, "relative"))
    for wire in ("float16", "bfloat16"):
        found = learned_rows(2, {**settings, "wire_dtype": wire}, gpu=True)
        off, deviation = difference(found, expected), root_mean_square(found, expected)
        results.append(Result(f"scaling/agreement/np2/{wire}", off, "relative"))
        results.append(Result(f"scaling/rms/np2/{wire}", deviation, "relative"))
        rows = root_mean_square(found, expected, ("rows",))
        results.append(Result(f"scaling/rms_rows/np2/{wire}", rows, "relative"))
    return results


def main() -> None:
    """Run the numbers of ranks one after another."""
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options.add_argument("--model", choices=MODELS, default="small")
    options.add_argument("--tasks", type=int, help="in a rank's batch")
    options.add_argument("--pace-only", action="store_true", help="leave out what ranks have learned")
    given = options.parse_args()
    ranks = [1, 2] if given.smoke else sorted({1, *given.ranks})
    settings = {**SIZES, **MODELS[given.model], "epochs": 1 + given.rounds, "keep_rows": False}
    settings["tasks"] = given.tasks or settings["tasks"]
    if given.smoke:
        settings |= {"tasks": 4, "hidden": [8], "features": 3, "steps": 2, "distinct_steps": 1}
    # Few steps: rounding grows with training, and more so through second derivatives.
    same = {**settings, "tasks": 4 * ranks[-1], "distinct_steps": 10, "steps": 10, "epochs": 1}
    same["keep_rows"] = True
    results, rates, gpus = [], {}, 0
    if given.smoke:  # ranks that agree are the tests' business
        given.pace_only = True
    for size in ranks:
        with tempfile.TemporaryDirectory() as folder:
            found = run(size, settings, Path(folder))
        rates[size] = found["samples_an_epoch"] / statistics.median(found["seconds"][1:])
        gpus = found["gpus"]
        results.append(Result(f"scaling/samples/np{size}", rates[size], "samples/s"))
    for size in ranks[1:]:
        results.append(Result(f"scaling/speed_up/np{size}", rates[size] / size / rates[1], "of ideal"))
    if not given.pace_only:
        results += agreement(ranks if gpus else ranks[1:], same)
    report("Meta-training on ranks", results, given.json, settings=settings, gpus_a_rank=gpus)


if __name__ == "__main__":
    main()

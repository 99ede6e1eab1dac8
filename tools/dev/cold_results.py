"""Converts the output of `gmeta evaluate --json` to a file of docs/results.

python tools/dev/cold_results.py --json docs/results/cold-ml-1m.json ml-1m=runs/a.json ml-1m-all=runs/b.json

It measures nothing. Figures are named results/cold/DATA/SPLIT/METHOD/METRIC, and differences
results/cold/DATA/SPLIT/METHOD-BASELINE/mae. For a method that adapts, its largest number of steps counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gmeta.core.errors import GmetaError
from gmeta.experiment.results.evaluation import Evaluation
from gmeta.experiment.results.evaluation_json import load
from gmeta.experiment.results.metrics import Bootstrap

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
from harness import machine

METRICS = ("mae", "rmse", "auc", "logloss")


def figures(data: str, evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    """Yield an evaluation's figures, then the difference of each method's MAE from each baseline's."""
    whole = {name: method.results for name, method in evaluation.methods.items()}
    splits: dict[str, tuple[Mapping[str, Any], Bootstrap | None]] = {
        evaluation.data.split: (whole, evaluation.bootstrap)
    }
    splits |= {name: (split.results, split.bootstrap) for name, split in evaluation.splits.items()}
    for split, (methods, bootstrap) in splits.items():
        where = f"results/cold/{data}/{split}"
        for method, by_steps in methods.items():
            last = by_steps[max(by_steps)]
            for metric in (each for each in METRICS if each in last):
                yield _figure(f"{where}/{method}/{metric}", last[metric])
        for found in bootstrap.comparisons if bootstrap else ():
            if found.metric == "mae" and found.steps == max(methods[found.method]):
                interval = [round(found.low, 5), round(found.high, 5)]
                name = f"{where}/{found.method}-{found.baseline}/mae"
                yield {"name": name, "value": round(found.difference, 5), "interval": interval}


def _figure(name: str, seeds: Sequence[float]) -> dict[str, Any]:
    spread = {"spread": round(statistics.stdev(seeds), 5)} if len(seeds) > 1 else {}
    return {"name": name, "value": round(statistics.mean(seeds), 5), **spread}


def main() -> None:
    """Read the evaluations that the command line names, and write the file."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("evaluations", nargs="+", metavar="DATA=FILE", help="a name, and the file of --json")
    options.add_argument("--json", type=Path, required=True, help="the file to write")
    given = options.parse_args()
    found: list[dict[str, Any]] = [machine()]
    for each in given.evaluations:
        data, _, file = each.partition("=")
        if not data or not file:
            raise SystemExit(f"{each}: give DATA=FILE, such as ml-1m=runs/ml-1m/evaluation.json")
        try:
            found += figures(data, load(Path(file)))
        except GmetaError as error:
            raise SystemExit(str(error)) from error
    given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found) - 1} figures: {given.json}")


if __name__ == "__main__":
    main()

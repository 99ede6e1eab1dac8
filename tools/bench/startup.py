"""The time from a program's start to its first training step, and a first ``fit`` compared with a second.

    python tools/bench/startup.py --json FILE

Each round starts processes of the two models of README, each with AutoGraph as gmeta configures it, which
converts only the calls in Keras' functions, and as in TensorFlow 2.16, which converts them as a whole.
Figures are medians over rounds.

import         of gmeta, TensorFlow, layers and models; the peer is TensorFlow with tf-keras alone
to_first_step  from the process's start to the end of the first step
first_fit      one epoch, with the tracing of the train step
over_second    how much longer the first fit takes than the second
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gmeta import preprocess

from harness import Result, parser, report

PART = Path(__file__).parent / "parts" / "startup_run.py"
MODELS = ("model", "meta_model")
CONVERSIONS = ("calls", "whole")
PEER = "whole functions converted"
ALONE = """import time; begin = time.perf_counter()
import tensorflow as tf
tf.keras.Model
print(time.perf_counter() - begin)"""


def run(model: str, folder: str, conversion: str) -> dict[str, float]:
    """Start one program, and return its seconds by purpose."""
    words = [sys.executable, str(PART), model, folder, conversion, str(time.time())]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds | {"over_second": seconds["first_fit"] - seconds["second_fit"]}


def import_alone() -> float:
    """Import TensorFlow and tf-keras in a separate process, and return the seconds."""
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1"}
    words = [sys.executable, "-c", ALONE]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    """Run all programs in turn, round after round."""
    options = parser(__doc__).parse_args()
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    alone = []
    with tempfile.TemporaryDirectory() as folder:
        preprocess.prepare(preprocess.SyntheticConfig(), folder)
        for _ in range(options.rounds):
            alone.append(import_alone())
            for model in MODELS[: 1 if options.smoke else None]:
                for conversion in CONVERSIONS:
                    runs.setdefault((model, conversion), []).append(run(model, folder, conversion))

    def median(model: str, conversion: str, what: str) -> float:
        return statistics.median(seconds[what] for seconds in runs[model, conversion])

    own = [seconds["import"] for each in runs.values() for seconds in each]
    only = "TensorFlow alone"
    results = [Result("startup/import", statistics.median(own), "s", only, statistics.median(alone))]
    for model in dict.fromkeys(model for model, _ in runs):
        for what in ("to_first_step", "first_fit", "over_second"):
            figures = [median(model, conversion, what) for conversion in CONVERSIONS]
            results.append(Result(f"startup/{what}/{model}", figures[0], "s", PEER, figures[1]))
    report("Start of a program", results, options.json)


if __name__ == "__main__":
    main()

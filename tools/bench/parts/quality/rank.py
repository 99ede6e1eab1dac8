"""One rank of the benchmark of quality: trains models in turn, and measures new users after each epoch."""

from __future__ import annotations

import json
from typing import Any

import gmeta
from gmeta.core import collectives

import tensorflow as tf
from parts.jobs import job_arguments
from parts.quality.models import prepare_trainee


def train(case: dict[str, Any], settings: dict[str, Any]) -> dict[str, list[float]]:
    """Train a model, and return its metrics over all ranks' samples after each epoch."""
    of = prepare_trainee(case["model"], case["way"], case["seed"], settings)
    history = of.model.fit(
        of.training, validation_data=of.measured, epochs=settings["epochs"], verbose=0
    ).history
    return {metric: [float(value) for value in history[f"val_{metric}"]] for metric in of.metrics}


def main() -> None:
    """Train the models that the file doesn't have yet; rank 0 writes results after each model."""
    out, settings = job_arguments()
    gmeta.init()
    done = json.loads(out.read_text()) if out.exists() else []
    known = collectives.broadcast_object([row["case"] for row in done])
    for case in settings["cases"]:
        if case in known:
            continue
        done.append({"case": case, "metrics": train(case, settings)})
        tf.keras.backend.clear_session()
        if collectives.world().rank == 0:
            out.write_text(json.dumps(done))


if __name__ == "__main__":
    main()

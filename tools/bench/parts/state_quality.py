"""GAUC of a ranker whose users' histories are kept as states, beside that of whole sequences."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gmeta.core.row_formats import RowDtype
from gmeta.metrics import UserGAUC
from gmeta.models import UserStates
from gmeta.preprocess.synthetic.exposures import ExposureConfig

import tensorflow as tf
from harness import Result
from parts.exposure_logs import Batches, oracle, parts, prepare_log
from parts.exposure_rankers import ranker

PAGE = 50  # exposures of a user, of one moment, so that all of the history comes before them
LABELS = {"ctr": "click", "ctcvr": "buy"}
WHOLE = "whole"


def state_quality(given: Any, dtypes: Sequence[RowDtype], *, smoke: bool) -> list[Result]:
    """Train a model on each log, and measure it on the new users.

    Args:
      given: ``log_users``; ``dim``, ``blocks``, ``heads``; ``tokens``: the mean events of a user; ``seconds``
        of training; ``seeds``.
      dtypes: The dtypes of states.
      smoke: Whether logs are small.
    """
    found: dict[str, list[float]] = {}
    for seed in range(given.seeds):
        log = ExposureConfig(
            seed=seed,
            users=100 if smoke else given.log_users,
            mean_events=given.tokens,
            exposures=PAGE,
            page=PAGE,
        )
        with tempfile.TemporaryDirectory() as folder:
            data, batches = prepare_log(Path(folder), log), Batches(6000)
            best = oracle(Path(folder, f"new-{seed}", "cold"), batches)
            old, *new = parts(data, seed, batches)
            model = ranker(
                "hstu",
                log,
                dim=given.dim,
                blocks=given.blocks,
                rate=0.003,
                seed=seed,
                by_time=False,
                heads=given.heads,
            )
            begin, epochs = time.perf_counter(), 0
            while time.perf_counter() - begin < given.seconds:
                model.fit(old, verbose=0)
                epochs += 1
            row = measured(model, [*new], dtypes)
        row |= {f"oracle/gauc_{task}": best[f"gauc_{task}"] for task in LABELS}
        print(json.dumps({"seed": seed, "epochs": epochs, **row}), flush=True)
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    results = []
    for name, values in found.items():
        unit = "GAUC" if "gauc" in name else ""
        least = max(values) if "difference" in name else statistics.mean(values)
        results.append(Result(f"user_states/quality/{name}", least, unit))
    for dtype in dtypes:
        for task in LABELS:
            pairs = zip(found[f"{WHOLE}/gauc_{task}"], found[f"{dtype}/gauc_{task}"], strict=True)
            losses = [whole - kept for whole, kept in pairs]
            name = f"user_states/quality/{dtype}/loss_{task}"
            results.append(Result(name, statistics.mean(losses), "GAUC"))
            results.append(Result(f"{name}/most", max(losses), "GAUC"))
    return results


def measured(model: Any, data: Sequence[tf.data.Dataset], dtypes: Sequence[RowDtype]) -> dict[str, float]:
    """Return each task's GAUC from whole sequences and from states, and the largest difference of logits."""
    kept = {dtype: UserStates(model, dtype) for dtype in dtypes}
    metrics = {name: {task: UserGAUC() for task in LABELS} for name in (WHOLE, *dtypes)}
    off = dict.fromkeys(dtypes, 0.0)

    @tf.function(input_signature=[data[0].element_spec])
    @tf.autograph.experimental.do_not_convert
    def logits(batch: Any) -> dict[str, dict[str, tf.Tensor]]:
        found = {WHOLE: model(batch, training=False)}
        found |= {dtype: states.score(states.read(batch), batch) for dtype, states in kept.items()}
        return {name: {task: of[task].flat_values for task in LABELS} for name, of in found.items()}

    for batch in (each for split in data for each in split):
        found = logits(batch)
        for task, label in LABELS.items():
            labels = batch["labels"][label]
            users = tf.repeat(batch["task"], labels.row_lengths())
            for name, of in found.items():
                metrics[name][task].update_state(labels.values, of[task], users)
                if name != WHOLE:
                    apart = float(tf.reduce_max(tf.abs(of[task] - found[WHOLE][task])))
                    off[name] = max(off[name], apart)
    row = {
        f"{name}/gauc_{task}": float(metric.result())
        for name, of in metrics.items()
        for task, metric in of.items()
    }
    return row | {f"{dtype}/largest_difference": value for dtype, value in off.items()}

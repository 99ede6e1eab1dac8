"""What GRM gains over rankers without a sequence, and MAML over GRM, on logs whose probabilities are known.

    python tools/bench/grm_quality.py --kinds hstu dnn-recent --seconds 100 --epochs 60 --json FILE
    python tools/bench/grm_quality.py --meta --events 150 --epochs 6 --json FILE

A log (`gmeta.preprocess.synthetic.exposures`) is prepared without events that precede no exposure. Models
train on four fifths of the users, and after each epoch are measured on the others, who are new to them: half
of these are for validation, whose GAUC of both labels chooses the epoch, and half for the test. Each seed
determines a log and initial weights.

hstu, fuxi   `gmeta.models.GRM.of`: the sequence, masked by time, so that an exposure sees earlier events
dnn          the same features of the exposure together with the means of the contexts and of all earlier
             events, and a multilayer perceptron, shared by the towers
dnn-recent   the same, of the last ten events
oracle       the ranking by the probabilities that the log was drawn with, which nothing beats except by
             chance
joint, maml  with --meta: `gmeta.models.MetaGRM` adapts experts, gates and towers to a user's earlier
             exposures, and the later ones are measured after a number of inner steps; users have their own
             taste of styles (--own), which only their clicks reveal. joint is trained without adaptation
spread       the standard deviation over the seeds

All kinds have the same embeddings, towers, loss, optimizer, rate and batches. With --store events are in a
store of histories, and `gmeta.io.late` reads them: with the same --batch the figures are the same to the bit.
The JSON's first object has the rows of all epochs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2
from gmeta.meta import InnerLoop
from gmeta.metrics import GAUC
from gmeta.models import MetaGRM
from gmeta.preprocess.synthetic.exposures import ExposureConfig

import tensorflow as tf
from harness import Result, parser, report
from parts.exposure_logs import LAWS, Batches, oracle, parts, prepare_log
from parts.exposure_rankers import KINDS, Row, chosen_by, ranker, train

ADAPTED = ("mixture", "heads")
ORACLE = "oracle"


def compare(
    log: ExposureConfig,
    warm: tf.data.Dataset,
    validation: tf.data.Dataset,
    cold: tf.data.Dataset,
    *,
    epochs: int,
    steps: int,
    inner_rate: float,
    rate: float,
    keep: Callable[[Row], None],
    **settings: Any,
) -> None:
    """Train both on the old users, and report the GAUC of the new users' later exposures.

    Args:
      log: The log that the data come from.
      warm: Old users.
      validation: New users, which choose the epoch.
      cold: Other new users.
      epochs: The number of epochs over the old users.
      steps: Inner steps, in training and in evaluation.
      inner_rate: Their learning rate; the start of MAML's rates, of which it learns one per layer.
      rate: The learning rate of the outer loop.
      keep: Takes a row after each epoch: ``gauc_ctr`` after so many ``steps`` on the user's earlier
        exposures.
      **settings: Arguments of `ranker`.
    """
    plain = InnerLoop(steps=0, adapt=ADAPTED, learning_rate=inner_rate)
    adapted = InnerLoop(steps=steps, adapt=ADAPTED, learning_rate=inner_rate, learn_learning_rate="layer")
    after = sorted({0, 1, steps})
    for kind, inner, samples in (("joint", plain, "all"), ("maml", adapted, "query")):
        base = ranker("hstu", log, rate=rate, seed=log.seed, report=None, **settings)
        model = MetaGRM(base, inner=inner, outer_samples=samples)  # type: ignore[arg-type]
        model.compile(tf.keras.optimizers.Adam(rate))
        for epoch in range(1, epochs + 1):
            begin = time.perf_counter()
            loss = model.fit(warm, verbose=0).history["loss"][0]
            seconds = round(time.perf_counter() - begin, 1)
            by, found = after_steps(model, validation, after), after_steps(model, cold, after)
            for taken in after:
                row = {"kind": kind, "seed": log.seed, "epoch": epoch, "seconds": seconds, "loss": loss}
                chosen = {f"validation_{name}": value for name, value in by[taken].items()}
                keep({**row, "steps": taken, **chosen, **found[taken]})


def after_steps(model: MetaGRM, data: tf.data.Dataset, steps: list[int]) -> dict[int, dict[str, float]]:
    """Inner steps -> GAUC of each label, of the query exposures."""
    labels = {task: number for number, task in enumerate(model.learner.labels)}
    metrics = {taken: {task: GAUC() for task in labels} for taken in steps}

    @tf.autograph.experimental.do_not_convert
    def logits(batch: Any) -> Any:
        batch = model.learner.tasks_of(batch)
        found = model.predict_after(batch, steps)
        query = batch["query"]
        of_labels = tf.gather(batch["label"], query["index"])
        return {taken: model.by_label(out) for taken, out in found.items()}, of_labels, query["mask"]

    graph = tf.function(logits, input_signature=[data.element_spec])  # of batches of any sizes
    for batch in data:
        found, of_labels, mask = graph(batch)
        for taken, by_task in metrics.items():
            for task, metric in by_task.items():
                metric.update_state(of_labels[..., labels[task]], found[taken][task], mask)
    return {
        taken: {f"gauc_{task}": float(metric.result()) for task, metric in by_task.items()}
        for taken, by_task in metrics.items()
    }


def best_rows(rows: list[Row]) -> dict[tuple[str, int], dict[int, Row]]:
    """Return kind and steps -> seed -> the row of the epoch in time that is best on the validation users."""
    best: dict[tuple[str, int], dict[int, Row]] = {}
    for row in rows:
        of_seeds = best.setdefault((row["kind"], row.get("steps", 0)), {})
        before = of_seeds.get(row["seed"])
        if row.get("in_time", True) and (before is None or chosen_by(row) > chosen_by(before)):
            of_seeds[row["seed"]] = row
    return best


def results_of(rows: list[Row]) -> list[Result]:
    """Turn rows into means and spreads over seeds."""
    results = []
    for (kind, steps), of_seeds in best_rows(rows).items():
        name = f"grm/quality/{kind}" + (f"/steps{steps}" if kind in ("joint", "maml") else "")
        for metric in ("gauc_ctr", "gauc_ctcvr") if of_seeds else ():
            values = [row[metric] for row in of_seeds.values()]
            results.append(Result(f"{name}/{metric}", statistics.mean(values), "GAUC"))
            if len(values) > 1:
                results.append(Result(f"{name}/{metric}/spread", statistics.stdev(values), "GAUC"))
    return results


def measure(given: argparse.Namespace, seed: int, folder: Path) -> list[Row]:
    """Train on one log, and return a row for each epoch."""
    log = ExposureConfig(
        seed=seed,
        users=given.users,
        mean_events=given.events,
        exposures=given.exposures,
        own=given.own if given.meta else 0.0,
        **LAWS[given.law],  # type: ignore[arg-type]
    )
    store = folder / f"histories-{seed}" if given.store else None
    data = prepare_log(folder, log, store=store)
    users = given.batch
    if given.store and users is None:
        users = max(1, round(given.tokens / (given.events + given.exposures)))
    batches = Batches(given.tokens, users, store, given.longest)
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}), flush=True)

    keep({"kind": ORACLE, "seed": seed, **oracle(folder / f"new-{seed}" / "cold", batches)})
    settings = {name: getattr(given, name) for name in ("dim", "blocks", "window", "horizon", "rate")}
    splits = parts(data, seed, batches)
    if given.meta:
        steps = {"epochs": given.epochs, "steps": given.steps, "inner_rate": given.inner_rate}
        compare(log, *splits, keep=keep, **steps, **settings)
        return rows
    if given.longest is not None:
        settings["length"] = min(given.longest, round(given.events))
    for kind in given.kinds:
        train(kind, log, splits, epochs=given.epochs, seconds=given.seconds, keep=keep, **settings)
    return rows


def arguments() -> argparse.Namespace:
    """Return what to train; reject settings that don't fit together."""
    options = parser(__doc__)
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=["hstu", "dnn"])
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument(
        "--users", type=int, default=2_500, help="users, a fifth of whom are measured (default: %(default)s)"
    )
    options.add_argument(
        "--events", type=float, default=600, help="mean events of a user (default: %(default)s)"
    )
    options.add_argument(
        "--exposures", type=int, default=50, help="exposures of a user (default: %(default)s)"
    )
    options.add_argument("--law", choices=LAWS, default="recent", help="law of clicks (default: %(default)s)")
    options.add_argument("--epochs", type=int, default=8, help="most epochs (default: %(default)s)")
    options.add_argument("--seconds", type=float, help="most seconds of training a model")
    options.add_argument(
        "--tokens", type=int, default=6_000, help="tokens of a batch, about (default: %(default)s)"
    )
    options.add_argument("--batch", type=int, help="users of a batch, instead of --tokens")
    options.add_argument("--store", action="store_true", help="read histories from a store")
    options.add_argument("--longest", type=int, help="most events of a history (default: all)")
    options.add_argument("--dim", type=int, default=32, help="(default: %(default)s)")
    options.add_argument("--blocks", type=int, default=2, help="(default: %(default)s)")
    options.add_argument("--window", type=int, default=0, help="events back that a block sees; 0: all")
    options.add_argument("--horizon", type=float, help="HSTU's initial horizon in seconds; 0: as published")
    options.add_argument(
        "--rate", type=float, default=3e-3, help="Adam's learning rate (default: %(default)s)"
    )
    options.add_argument("--threads", type=int, help="TensorFlow's threads (default: all cores)")
    options.add_argument("--meta", action="store_true", help="compare MAML with joint training")
    options.add_argument("--own", type=float, default=1.5, help="strength of users' own taste with --meta")
    options.add_argument("--steps", type=int, default=5, help="inner steps of --meta (default: %(default)s)")
    options.add_argument(
        "--inner-rate", type=float, default=0.3, help="learning rate of inner steps of --meta"
    )
    given = options.parse_args()
    if given.meta and given.seconds is not None:
        options.error("--seconds isn't taken with --meta, which counts epochs")
    if given.horizon is not None and not (given.meta or "hstu" in given.kinds):
        options.error("--horizon is of hstu, which isn't among --kinds")
    if given.smoke:
        small = {"seeds": [0, 1], "users": 40, "events": 20, "exposures": 10, "epochs": 1, "tokens": 600}
        given.__dict__ |= {**small, "kinds": ["dnn"], "dim": 4, "blocks": 1}
    return given


def main() -> None:
    """Generate logs, train rankers on them, and compare their GAUC on new users."""
    given = arguments()
    if given.threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(given.threads)
        tf.config.threading.set_inter_op_parallelism_threads(given.threads)
    rows: list[Row] = []
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(given, seed, Path(folder))
    report("Quality of GRM", results_of(rows), given.json, seeds=given.seeds, law=given.law, by_epoch=rows)


if __name__ == "__main__":
    main()

"""What longer histories gain in the bytes that fat rows take for short ones.

    python tools/bench/history_quality.py --json FILE

A log (`gmeta.preprocess.synthetic.exposures`, law `lasting` of `grm_quality.py`) with more events per user
than there, and otherwise unchanged: clicks depend on a user's lasting taste of categories, which old events
show as well as those of yesterday, and hardly on what the user does now. So more events show the taste more
exactly; another log would gain less, or nothing. A user has 20 requests of 10 exposures, all in the later
half of the events. Each request is an example: its history is the newest 100, 1,000 or 4,000 events before
it, from a store (`gmeta.io.late`).

All models train on the same four fifths of the users, with the same batches and epochs, and are measured on
new users: half of them choose the epoch, by the GAUC of clicks and of purchases; the GAUC of clicks on the
other half is reported. Each seed determines a log and initial weights. Initially HSTU weights old events
nearly as much as new ones (`--horizon`); this was chosen on validation users of the log of seed 100.

gauc         of GRM (`hstu`); its mean over the seeds
gauc/spread  the standard deviation over the seeds, most of which is the logs'
gauc/counts  the same histories by two counts: the share of the exposure's category among the events, and
             how often training users clicked its item, with weights chosen by validation
gauc/dnn     a perceptron over the mean of the history, with the same embeddings and towers
gain         of GRM over a history of 100 events, paired by seed, and its spread
bytes        of the store and the examples, in percent of fat rows of that length
equal_bytes  the events of fat rows that take as many bytes as the store and the examples
oracle       GAUC of the probabilities that the log was drawn with

With --rows FOLDER each seed's rows are kept in a file there, and the report covers all files there. So seeds
can run one after another or side by side; --seeds without a number only reports.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from argparse import Namespace
from pathlib import Path

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2
from gmeta.preprocess.synthetic.exposures import ExposureConfig, exposure_log

import numpy as np
import tensorflow as tf
from harness import Result, parser, report
from parts.exposure_logs import LAWS, Batches, oracle, parts, prepare_log
from parts.exposure_rankers import Row, chosen_by, train
from parts.history_counts import rank_by_counts
from parts.history_rows import size, write_requests

LENGTHS = (100, 1_000, 4_000)
PAGE, REQUESTS = 10, 20


def log_of(given: Namespace, seed: int) -> ExposureConfig:
    """Return the settings of a log."""
    return ExposureConfig(
        seed=seed,
        users=given.users,
        mean_events=given.events,
        most_events=round(8 / 3 * given.events),
        exposures=PAGE * REQUESTS,
        page=PAGE,
        **LAWS["lasting"],  # type: ignore[arg-type]
    )


def measure(given: Namespace, seed: int, folder: Path) -> list[Row]:
    """Train on one log at all lengths, and return a row for each epoch."""
    log, store = log_of(given, seed), folder / f"histories-{seed}"
    data = prepare_log(folder, log, store=store, batch_rows=PAGE)
    new, rows = folder / f"new-{seed}", list[Row]()
    rows.append({"kind": "oracle", "seed": seed, **oracle(new / "cold", Batches(users=64, store=store))})
    rows.append({"kind": "bytes", "seed": seed, **bytes_of(given, seed, folder, store)})
    for longest in given.lengths:
        batches = Batches(users=given.batch, store=store, longest=longest)
        about = {"longest": longest, "seed": seed}

        def keep(row: Row, about: Row = about) -> None:
            rows.append({**row, **about})
            print(json.dumps(rows[-1]), flush=True)

        splits = parts(data, seed, batches)
        keep({"kind": "counts", **rank_by_counts(*splits)})
        for kind in given.kinds:
            settings = {"dim": given.dim, "blocks": given.blocks, "rate": given.rate, "length": longest}
            if kind == "hstu":
                settings["horizon"] = given.horizon
            train(kind, log, splits, epochs=given.epochs, seconds=given.seconds, keep=keep, **settings)
    return rows


def bytes_of(given: Namespace, seed: int, folder: Path, store: Path) -> dict[str, float]:
    """Return a user's bytes: in fat rows of each length, for a share of the users, and in both parts."""
    log = exposure_log(log_of(given, seed))
    some = log["user"] <= min(given.users, 100)
    part = {name: values[some] for name, values in log.items()}
    users, found = int(part["user"].max()), {}
    for length in (0, *given.lengths):
        out = folder / f"fat-{seed}-{length}"
        lengths = write_requests(out, part, PAGE, length)
        found[f"fat_{length}"] = size(out) / users
        found[f"events_{length}"] = float(lengths.mean())
    return {**found, "store": size(store) / given.users}


def results_of(rows: list[Row], lengths: list[int]) -> list[Result]:
    """Turn rows into figures over seeds: of the epoch, among those in time, that validation chooses."""
    best: dict[tuple[str, int, int], Row] = {}
    for row in rows:
        key = row["kind"], row.get("longest", 0), row["seed"]
        if row.get("in_time", True) and (key not in best or chosen_by(row) > chosen_by(best[key])):
            best[key] = row
    seeds = sorted({seed for _, _, seed in best})
    kinds = [kind for kind in dict.fromkeys(kind for kind, *_ in best) if kind not in ("oracle", "bytes")]
    results = []
    for longest in lengths:
        name = f"history/quality/{longest}"
        for kind in kinds:
            values = [best[kind, longest, seed]["gauc_ctr"] for seed in seeds]
            of = f"{name}/gauc" if kind == "hstu" else f"{name}/gauc/{kind}"
            results += [Result(of, statistics.mean(values), "GAUC"), _spread(of, values)]
            if longest > lengths[0]:
                gains = [
                    v - best[kind, lengths[0], s]["gauc_ctr"] for v, s in zip(values, seeds, strict=True)
                ]
                of = of.replace("/gauc", "/gain")
                results += [Result(of, statistics.mean(gains), "GAUC"), _spread(of, gains)]
        late, fat = (_mean(best, seeds, what) for what in ("store", f"fat_{longest}"))
        shown = _mean(best, seeds, "fat_0")
        results.append(Result(f"{name}/bytes", 100 * (late + shown) / fat, "% of fat rows"))
    events = [_mean(best, seeds, f"events_{longest}") for longest in (0, *lengths)]
    fat = [_mean(best, seeds, f"fat_{longest}") for longest in (0, *lengths)]
    equal = float(np.interp(_mean(best, seeds, "store") + fat[0], fat, events))
    results.append(Result("history/quality/equal_bytes", equal, "events"))
    values = [best["oracle", 0, seed]["gauc_ctr"] for seed in seeds]
    return [*results, Result("history/quality/oracle", statistics.mean(values), "GAUC")]


def _mean(best: dict[tuple[str, int, int], Row], seeds: list[int], what: str) -> float:
    return statistics.mean(best["bytes", 0, seed][what] for seed in seeds)


def _spread(of: str, values: list[float]) -> Result:
    return Result(f"{of}/spread", statistics.stdev(values) if len(values) > 1 else 0.0, "GAUC")


def main() -> None:
    """Train at all lengths, and report what they gain."""
    gpus = tf.config.list_physical_devices("GPU")
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    options.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    options.add_argument("--kinds", nargs="+", default=["hstu", "dnn"], choices=["hstu", "dnn"])
    options.add_argument("--users", type=int, default=1_500, help="(default: %(default)s)")
    options.add_argument(
        "--events", type=float, default=3_000, help="events of a user (default: %(default)s)"
    )
    options.add_argument("--epochs", type=int, default=4, help="most epochs (default: %(default)s)")
    options.add_argument("--seconds", type=float, help="most seconds of training a model")
    options.add_argument("--batch", type=int, default=32, help="requests of a batch (default: %(default)s)")
    options.add_argument("--dim", type=int, default=128 if gpus else 32, help="(default: %(default)s)")
    options.add_argument("--blocks", type=int, default=1, help="blocks of HSTU (default: %(default)s)")
    options.add_argument(
        "--rate", type=float, default=3e-3, help="Adam's learning rate (default: %(default)s)"
    )
    options.add_argument("--horizon", type=float, default=1e9, help="HSTU's initial horizon; 0: as published")
    options.add_argument("--rows", type=Path, help="folder where each seed's rows are kept")
    given = options.parse_args()
    if given.smoke:
        small = {"seeds": [0, 1], "lengths": [5, 20], "users": 40, "events": 40, "epochs": 1, "dim": 4}
        given.__dict__ |= {**small, "kinds": ["hstu"]}
    if gpus:
        tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    kept = {path: json.loads(path.read_text()) for path in given.rows.glob("*.json")} if given.rows else {}
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as folder:
            own = measure(given, seed, Path(folder))
        path = (given.rows or Path()) / f"seed-{seed}.json"
        kept[path] = own
        if given.rows:
            given.rows.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(own, indent=1) + "\n")
    rows: list[Row] = [row for own in kept.values() for row in own]
    facts = {
        "gpu": [tf.config.experimental.get_device_details(gpu).get("device_name") for gpu in gpus],
        "seeds": sorted({row["seed"] for row in rows}),
        **{name: getattr(given, name) for name in ("users", "events", "epochs", "seconds", "batch", "dim")},
        **{name: getattr(given, name) for name in ("blocks", "rate", "horizon")},
    }
    report("Quality for length", results_of(rows, given.lengths), given.json, **facts)


if __name__ == "__main__":
    main()

"""CTR and CTCVR of exposures: GRM beside a DNN ranker, on a log with the lengths of MTGenRec's sequences.

python models/grm/train.py --out runs/grm --kinds hstu,dnn --seeds 0,1,2 --json runs/grm/results.json
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2

# isort: split
import tensorflow as tf
from logs import LAWS, Batches, oracle, parts, prepare_log
from meta_ranking import compare
from rankers import KINDS, Kind, ranker
from results import Row, chosen_by, report

from gmeta.preprocess.synthetic.exposures import ExposureConfig

PATIENCE = 8  # epochs without a better validation before a kind's training ends


def train(
    kind: Kind,
    log: ExposureConfig,
    data: tuple[tf.data.Dataset, tf.data.Dataset, tf.data.Dataset],
    *,
    epochs: int,
    seconds: float | None,
    tell: Callable[[Row], None],
    **settings: Any,
) -> None:
    """Train on the old users, and measure on the new ones after each epoch.

    Args:
      kind: The model.
      log: What the data are of.
      data: As `parts` returns them.
      epochs: The most.
      seconds: The most of training, measurements not counted; the epoch that passes them is told and not
        counted in the report. None: as many as the epochs take.
      tell: Is handed a row after each epoch.
      **settings: Of `ranker`.
    """
    model = ranker(kind, log, seed=log.seed, **settings)
    spent, best, waited = 0.0, 0.0, 0
    for epoch in range(1, epochs + 1):
        begin = time.perf_counter()
        trained = model.fit(data[0], verbose=0).history
        spent += time.perf_counter() - begin
        row: Row = {"kind": kind, "seed": log.seed, "epoch": epoch, "seconds": round(spent, 1)}
        row["loss"] = trained["loss"][0]
        for prefix, users_of in (("validation_", data[1]), ("", data[2])):
            measured = model.evaluate(users_of, verbose=0, return_dict=True)
            kept = {name: value for name, value in measured.items() if name.startswith(("auc", "gauc"))}
            row |= {prefix + name: value for name, value in kept.items()}
        tell(row | {"in_time": seconds is None or spent <= seconds})
        waited = 0 if chosen_by(row) > best else waited + 1
        best = max(best, chosen_by(row))
        if waited == PATIENCE or (seconds is not None and spent >= seconds):
            return


def whole_numbers(seeds: str) -> list[int]:
    """Of a text such as 0,1,2."""
    try:
        return [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise click.BadParameter(f"{seeds!r} isn't numbers such as 0,1,2", param_hint="--seeds") from None


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for logs and data.")
@click.option("--kinds", default="hstu,dnn", show_default=True, help=f"Of {', '.join(KINDS)}.")
@click.option("--seeds", default="0", show_default=True, help="Each is a log, and a start of the weights.")
@click.option("--users", "count", default=2500, show_default=True, help="A fifth of them is measured.")
@click.option("--events", default=600.0, show_default=True, help="The mean of a user.")
@click.option("--exposures", default=50, show_default=True, help="Of a user.")
@click.option("--law", type=click.Choice(list(LAWS)), default="recent", show_default=True, help="Of clicks.")
@click.option("--epochs", default=8, show_default=True, help="At most.")
@click.option("--seconds", type=float, help="Of training, at most, the same for each kind.")
@click.option("--tokens", default=6000, show_default=True, help="Of a batch, about.")
@click.option("--batch", type=int, help="Users of a batch, instead. [default with --store: of mean length]")
@click.option("--store", is_flag=True, help="Keep events in a store, and read histories out of it.")
@click.option("--longest", type=int, help="Most events of a history; all otherwise.")
@click.option("--dim", default=32, show_default=True)
@click.option("--blocks", default=2, show_default=True)
@click.option("--window", default=0, show_default=True, help="Events back that a block sees; 0: all.")
@click.option("--horizon", type=float, help="Of HSTU's start, in seconds; 0: as published. [default: 3600]")
@click.option("--rate", default=3e-3, show_default=True, help="Of Adam.")
@click.option("--threads", type=int, help="Of TensorFlow; all cores otherwise.")
@click.option("--meta", is_flag=True, help="Adapt the heads to users who have a taste of their own.")
@click.option("--own", default=1.5, show_default=True, help="With --meta: how strong that taste is.")
@click.option("--steps", default=5, show_default=True, help="With --meta: inner steps.")
@click.option("--inner-rate", default=0.3, show_default=True, help="With --meta: of an inner step.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Where to write all rows.")
def main(
    out: Path,
    kinds: str,
    seeds: str,
    count: int,
    events: float,
    exposures: int,
    law: str,
    epochs: int,
    seconds: float | None,
    tokens: int,
    batch: int | None,
    store: bool,
    longest: int | None,
    threads: int | None,
    meta: bool,
    own: float,
    steps: int,
    inner_rate: float,
    file: Path | None,
    **settings: Any,
) -> None:
    """Generate logs, train rankers on them, and tell their GAUC on users whom they haven't seen."""
    if meta and seconds is not None:
        raise click.BadParameter("isn't taken with --meta, which counts epochs", param_hint="--seconds")
    if threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    if settings["horizon"] is not None and not (meta or "hstu" in kinds.split(",")):
        raise click.BadParameter("is of hstu, which isn't among --kinds", param_hint="--horizon")
    strange = [kind for kind in kinds.split(",") if kind not in KINDS]
    if strange:
        raise click.BadParameter(
            f"{', '.join(strange)}: choose among {', '.join(KINDS)}", param_hint="--kinds"
        )
    rows: list[Row] = []

    def tell(row: Row) -> None:
        rows.append(row)
        print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(rows, indent=1) + "\n")

    for seed in whole_numbers(seeds):
        log = ExposureConfig(
            seed=seed,
            users=count,
            mean_events=events,
            exposures=exposures,
            own=own if meta else 0.0,
            **LAWS[law],  # type: ignore[arg-type]
        )
        histories = out / f"histories-{seed}" if store else None
        folder = prepare_log(out, log, store=histories)
        users = max(1, round(tokens / (events + exposures))) if store and batch is None else batch
        batches = Batches(tokens, users, histories, longest)
        tell({"kind": "oracle", "seed": seed, "epoch": 0, **oracle(out / f"new-{seed}" / "cold", batches)})
        data = parts(folder, seed, batches)
        if meta:
            compare(log, *data, epochs=epochs, steps=steps, inner_rate=inner_rate, tell=tell, **settings)
            continue
        if longest is not None:
            settings["length"] = min(longest, round(events))
        for kind in kinds.split(","):
            train(kind, log, data, epochs=epochs, seconds=seconds, tell=tell, **settings)  # type: ignore[arg-type]
    print(report(rows))


if __name__ == "__main__":
    main()

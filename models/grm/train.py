"""CTR and CTCVR of exposures: GRM beside a DNN ranker, on a log with the lengths of MTGenRec's sequences.

python models/grm/train.py --out runs/grm --kinds hstu,dnn --seeds 0,1,2 --json runs/grm/results.json
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pyarrow
import pyarrow.parquet

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2

# isort: split
import tensorflow as tf
from meta_ranking import compare
from rankers import CONTEXTS, HISTORY, KINDS, TARGETS, TIME, Kind, ranker

from gmeta import io
from gmeta.core.errors import GmetaError
from gmeta.metrics import UserGAUC
from gmeta.preprocess import EXPOSURE_SPEC, ExposureConfig, PrepareConfig, prepare, write_exposures

Row = dict[str, Any]
LABELS = ["click", "buy"]
COLD = 5  # every fifth user is new to the model; every other of these is for validation, the others for test
PATIENCE = 8  # epochs without a better validation before a kind's training ends
LAWS: dict[str, dict[str, float]] = {
    "recent": {},
    "lasting": {"now": 0.5, "next": 0.5, "taste": 6.0},
    "slow": {"fresh": 0.05, "drift": 0.0005, "focus": 0.15},
}


def prepare_log(out: Path, log: ExposureConfig) -> Path:
    """Generate the log and prepare it anew; old users are its split ``warm``.

    Beside it is a folder of the new users, ``new-<seed>``: ``warm`` is for validation, ``cold`` for test.

    Raises:
      click.ClickException: The folder can't be written to, or the log can't be made.
    """
    table, folder = out / f"log-{log.seed}.parquet", out / f"data-{log.seed}"
    halves = out / f"new-{log.seed}.parquet"
    try:
        rows = pyarrow.parquet.read_table(write_exposures(table, log))
        new = pyarrow.array(rows["user"].to_numpy() % COLD == 0)
        pyarrow.parquet.write_table(rows.filter(new), halves)
        for source, into, modulus in ((table, folder, COLD), (halves, out / f"new-{log.seed}", 2 * COLD)):
            config = PrepareConfig(cold_modulus=modulus, seed=log.seed)
            prepare([source], into, config, spec=EXPOSURE_SPEC, overwrite=True)
    except (GmetaError, OSError) as error:
        raise click.ClickException(f"{out}: {error}") from error
    return folder


def users(path: Path, *, tokens: int, labels: list[str] = LABELS, **options: Any) -> tf.data.Dataset:
    """Batches of users' sequences of about so many tokens."""
    return io.sequences(
        path,
        contexts=CONTEXTS,
        history=[*HISTORY, TIME],
        targets=[*TARGETS, TIME],
        labels=labels,
        exposed=io.Flag("exposed"),
        balance=io.Balance(tokens),
        options=io.ReadOptions(**options),
    ).prefetch(2)


def parts(folder: Path, seed: int, tokens: int) -> tuple[tf.data.Dataset, tf.data.Dataset, tf.data.Dataset]:
    """Read the old users, in another order each epoch, and the new ones for validation and for test."""
    new = folder.parent / f"new-{seed}"
    old = users(folder / "warm", tokens=tokens, seed=seed)
    return old, *(users(new / split, tokens=tokens, shuffle=False) for split in ("warm", "cold"))


def oracle(path: Path, tokens: int) -> Row:
    """GAUC of the probabilities that the log was drawn with: no ranking does better, but by chance."""
    metrics = {"ctr": UserGAUC(), "ctcvr": UserGAUC()}
    for batch in users(path, tokens=tokens, labels=[*LABELS, "p_click", "p_buy"], shuffle=False):
        labels = batch["labels"]
        of = tf.repeat(batch["task"], labels["click"].row_lengths())
        for task, label in (("ctr", "click"), ("ctcvr", "buy")):
            metrics[task].update_state(labels[label].values, labels[f"p_{label}"].values, of)
    return {f"gauc_{task}": float(metric.result()) for task, metric in metrics.items()}


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


def chosen_by(row: Row) -> float:
    """Return what epochs are chosen by: the GAUC of both labels on the validation users."""
    return float(row["validation_gauc_ctr"] + row["validation_gauc_ctcvr"])


def report(rows: list[Row]) -> str:
    """Tell the GAUC on the test users: of the epoch in time that is best on the validation users."""
    best: dict[tuple[str, int, int], Row] = {}
    for row in rows:
        key = row["kind"], row["seed"], row.get("steps", 0)
        before = best.get(key)
        if row.get("in_time", True) and (
            before is None or "validation_gauc_ctr" not in row or chosen_by(row) > chosen_by(before)
        ):
            best[key] = row
    lines = [f"{'':12}seed  steps  epoch  seconds  GAUC ctr  ctcvr"]
    for (kind, seed, steps), row in best.items():
        numbers = f"{seed:4}{steps:7}{row['epoch']:7}{row.get('seconds', 0.0):9.1f}"
        lines.append(f"{kind:12}{numbers}{row['gauc_ctr']:10.4f}{row['gauc_ctcvr']:9.4f}")
    return "\n".join([*lines, *spread(best)])


def spread(best: dict[tuple[str, int, int], Row]) -> list[str]:
    """Tell the means and standard deviations over seeds, if there are several."""
    of: dict[tuple[str, int], list[Row]] = {}
    for (kind, _, steps), row in best.items():
        of.setdefault((kind, steps), []).append(row)
    lines = []
    for (kind, steps), rows in of.items():
        if len(rows) > 1:
            told = []
            for name in ("gauc_ctr", "gauc_ctcvr"):
                values = [row[name] for row in rows]
                told.append(f"{statistics.mean(values):.4f}±{statistics.stdev(values):.4f}")
            lines.append(f"{kind:12}mean of {len(rows)} seeds, steps {steps}: {'  '.join(told)}")
    return lines


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
@click.option("--dim", default=32, show_default=True)
@click.option("--blocks", default=2, show_default=True)
@click.option("--window", default=0, show_default=True, help="Events back that a block sees; 0: all.")
@click.option("--rate", default=3e-3, show_default=True, help="Of Adam.")
@click.option("--threads", type=int, help="Of TensorFlow; all cores otherwise.")
@click.option("--meta", is_flag=True, help="Adapt the heads to users who have a taste of their own.")
@click.option("--own", default=1.5, show_default=True, help="With --meta: how strong that taste is.")
@click.option("--steps", default=3, show_default=True, help="With --meta: inner steps.")
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
        folder = prepare_log(out, log)
        tell({"kind": "oracle", "seed": seed, "epoch": 0, **oracle(out / f"new-{seed}" / "cold", tokens)})
        data = parts(folder, seed, tokens)
        if meta:
            compare(log, *data, epochs=epochs, steps=steps, inner_rate=inner_rate, tell=tell, **settings)
            continue
        for kind in kinds.split(","):
            train(kind, log, data, epochs=epochs, seconds=seconds, tell=tell, **settings)  # type: ignore[arg-type]
    print(report(rows))


if __name__ == "__main__":
    main()

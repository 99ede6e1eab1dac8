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
from meta_ranking import compare
from rankers import CONTEXTS, HISTORY, KINDS, TARGETS, TIME, Kind, ranker

from gmeta import io
from gmeta.core.errors import GmetaError
from gmeta.metrics import UserGAUC
from gmeta.preprocess import EXPOSURE_SPEC, ExposureConfig, PrepareConfig, prepare, write_exposures

Row = dict[str, Any]
LABELS = ["click", "buy"]
COLD = 5  # every fifth user is new to the model, and measured


def prepare_log(out: Path, log: ExposureConfig) -> Path:
    """The log, generated and prepared anew.

    Raises:
      click.ClickException: The folder can't be written to, or the log can't be made.
    """
    table, folder = out / f"log-{log.seed}.parquet", out / f"data-{log.seed}"
    config = PrepareConfig(cold_modulus=COLD, seed=log.seed)
    try:
        write_exposures(table, log)
        prepare([table], folder, config, spec=EXPOSURE_SPEC, overwrite=True)
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


def both(folder: Path, seed: int, tokens: int) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """The old users, in another order each epoch, and the new ones."""
    old = users(folder / "warm", tokens=tokens, seed=seed)
    return old, users(folder / "cold", tokens=tokens, shuffle=False)


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
    warm: tf.data.Dataset,
    cold: tf.data.Dataset,
    *,
    epochs: int,
    tell: Callable[[Row], None],
    **settings: Any,
) -> None:
    """Train on the old users, and measure on the new ones after each epoch."""
    model = ranker(kind, log, seed=log.seed, **settings)
    for epoch in range(1, epochs + 1):
        begin = time.perf_counter()
        trained = model.fit(warm, verbose=0).history
        seconds = round(time.perf_counter() - begin, 1)
        measured = model.evaluate(cold, verbose=0, return_dict=True)
        row = {"kind": kind, "seed": log.seed, "epoch": epoch, "seconds": seconds}
        row |= {"loss": trained["loss"][0], "new_users_loss": measured["loss"]}
        tell(row | {name: value for name, value in measured.items() if name.startswith(("auc", "gauc"))})


def report(rows: list[Row]) -> str:
    """The best epoch of each, by the GAUC of clicks."""
    best: dict[tuple[str, int, int], Row] = {}
    for row in rows:
        key = row["kind"], row["seed"], row.get("steps", 0)
        best[key] = max(best.get(key, row), row, key=lambda each: each["gauc_ctr"])
    lines = [f"{'':12}seed  steps  epoch  GAUC ctr  ctcvr"]
    for (kind, seed, steps), row in best.items():
        numbers = f"{seed:4}{steps:7}{row['epoch']:7}{row['gauc_ctr']:10.4f}{row['gauc_ctcvr']:9.4f}"
        lines.append(f"{kind:12}{numbers}")
    return "\n".join(lines)


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
@click.option("--epochs", default=8, show_default=True)
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
    epochs: int,
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
            seed=seed, users=count, mean_events=events, exposures=exposures, own=own if meta else 0.0
        )
        folder = prepare_log(out, log)
        tell({"kind": "oracle", "seed": seed, "epoch": 0, **oracle(folder / "cold", tokens)})
        data = both(folder, seed, tokens)
        if meta:
            compare(log, *data, epochs=epochs, steps=steps, inner_rate=inner_rate, tell=tell, **settings)
            continue
        for kind in kinds.split(","):
            train(kind, log, *data, epochs=epochs, tell=tell, **settings)  # type: ignore[arg-type]
    print(report(rows))


if __name__ == "__main__":
    main()

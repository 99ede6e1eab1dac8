"""The next item: SASRec, eSASRec, HSTU and FuXi-α beside popularity, over the whole catalogue.

python models/hstu/train.py beauty
python models/hstu/train.py path/to/ml-100k --model all --json runs/next-item.jsonl
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2

# isort: split
import click
import numpy as np
import tensorflow as tf
from histories import Histories, LeaveLastOut, batches, read_histories
from report import CHOSEN_BY, choose_epoch, write_report
from sequences import find_file, read_sequences
from settings import (
    KS,
    MOVIELENS,
    OF_MOVIELENS,
    OF_SEQUENCES,
    Make,
    Settings,
    make_model,
    options_of,
    settings_of,
)

from gmeta.core.errors import GmetaError
from gmeta.metrics import NextItem
from gmeta.metrics.next_item import catalogue_ranks

POPULARITY = "popularity"
_MEASURED = 1024  # users at once


def train(
    name: str, makers: dict[str, Make], data: LeaveLastOut, settings: Settings, seed: int
) -> Iterator[dict[str, Any]]:
    """Train a model until validation no longer improves, and measure it after every so many epochs.

    Test items are measured where validation is better than before.
    """
    random.seed(seed)  # what Keras' layers take their seeds from
    tf.random.set_seed(seed)
    counts = np.bincount(data.train["item"].values, minlength=data.items)
    begin = time.perf_counter()
    model = make_model(name, makers, data.items, settings, seed, counts)
    histories = batches(data.train, settings.batch, shuffle=seed)
    seconds, best, best_epoch = 0.0, -1.0, 0
    for done in range(0, settings.epochs, settings.every):
        until, start = min(done + settings.every, settings.epochs), time.perf_counter()
        losses = model.fit(histories, initial_epoch=done, epochs=until, verbose=0).history["loss"]
        seconds += time.perf_counter() - start
        found = {"validation": _measure(model, data.validation)}
        if found["validation"][CHOSEN_BY] > best:
            best, best_epoch = found["validation"][CHOSEN_BY], until
            found["test"] = _measure(model, data.test)
        took = {"seconds": round(seconds, 1), "elapsed": round(time.perf_counter() - begin, 1)}
        yield {"epoch": until, **took, "loss": losses[-1], **found}
        if until - best_epoch >= settings.patience:
            return


def _measure(model: tf.keras.Model, histories: Histories) -> dict[str, float]:
    return model.evaluate(batches(histories, _MEASURED), verbose=0, return_dict=True)


def popularity(data: LeaveLastOut) -> dict[str, Any]:
    """Rank items by how often they occur in what models are trained on; ties count against it."""
    counts = tf.math.bincount(tf.cast(data.train["item"].values, tf.int32), minlength=data.items)

    def measured(histories: Histories) -> dict[str, float]:
        last = histories["item"][:, -1:].values
        metric = NextItem(KS)
        metric.update_state(catalogue_ranks(tf.ones([tf.size(last), 1]), counts[:, tf.newaxis], last))
        return {name: float(value) for name, value in metric.result().items()}

    return {"epoch": 0, "validation": measured(data.validation), "test": measured(data.test)}


@click.command()
@click.argument("data", metavar="DATA")
@click.option("--folder", type=click.Path(path_type=Path), envvar="GMETA_SEQUENCES", help="Of text files.")
@click.option("--model", "models", multiple=True, help="all, or a model's name; several times.")
@click.option("--seed", "seeds", multiple=True, type=int, default=[0], show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Of TensorFlow's; as many as cores by default.")
@click.option("--until", type=float, help="End where NDCG@10 of the test items is this.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where measures go, a line each.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the table and the curves go.")
@options_of(Settings)
def main(
    data: str,
    folder: Path | None,
    models: tuple[str, ...],
    seeds: tuple[int, ...],
    threads: int | None,
    until: float | None,
    path: Path | None,
    out: Path | None,
    **own: Any,
) -> None:
    """Train models on DATA to tell each user's next item.

    DATA is beauty, toys or yelp; a text file with a user a line, "user item item …"; or a folder of
    MovieLens-100K or -1M. A user's last item is for testing, the one before it for choosing the epoch.
    Several processes may write their runs to one file of --json.
    """
    if threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    given = {name: value for name, value in own.items() if value is not None}
    try:
        file = find_file(data, folder) or Path(data)
        lines = file.is_file()
        cuts = read_sequences(file) if lines else read_histories(file)
    except GmetaError as error:
        raise click.ClickException(str(error)) from error
    makers, settings = (OF_SEQUENCES, Settings()) if lines else (OF_MOVIELENS, MOVIELENS)
    known = (POPULARITY, *makers)
    for name in set(models) - {"all", *known}:
        raise click.BadParameter(f"{name}: for these data there are {', '.join(known)}", param_hint="--model")
    models = models or ((POPULARITY, "sasrec") if lines else ("hstu-2",))
    click.echo(f"{cuts.name}: {cuts.users} users, {cuts.items} items")
    out = Path("runs/next-item", cuts.name) if out is None else out
    path = path or out / "runs.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    measured: dict[str, list[list[dict[str, Any]]]] = {}
    for name in known if "all" in models else dict.fromkeys(models):
        for seed in [None] if name == POPULARITY else seeds:
            run = _run(name, makers, cuts, settings_of(name, settings, given), seed, path, until)
            measured.setdefault(name, []).append(run)
    click.echo(write_report(measured, out))


def _run(
    name: str,
    makers: dict[str, Make],
    data: LeaveLastOut,
    settings: Settings,
    seed: int | None,
    path: Path,
    until: float | None,
) -> list[dict[str, Any]]:
    """Train a model with a seed, or measure popularity; write and say each measure."""
    if seed is None:
        facts, measures = {}, iter([popularity(data)])
    else:
        facts = {"seed": seed, "settings": asdict(settings)}
        measures = train(name, makers, data, settings, seed)
    lines: list[dict[str, Any]] = []
    for found in measures:
        lines.append({"data": data.name, "model": name, **facts, **found})
        with path.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        _say(lines[-1], "validation")
        if until is not None and found.get("test", {}).get(CHOSEN_BY, 0) >= until:
            click.echo(f"test {CHOSEN_BY} {until} after {found.get('elapsed', 0)} s")
            break
    _say(choose_epoch(lines), "test")
    return lines


def _say(line: dict[str, Any], cut: str) -> None:
    who = f"{line['model']}, seed {line['seed']}" if "seed" in line else line["model"]
    numbers = ", ".join(f"{name} {value:.4f}" for name, value in line[cut].items() if name in _SHOWN)
    took = f" ({line['seconds']:.0f} s)" if "seconds" in line and cut == "validation" else ""
    click.echo(f"{who}, epoch {line['epoch']}{took}: {cut} {numbers}")


_SHOWN = ("hr@10", "hr@50", "ndcg@10")

if __name__ == "__main__":
    main()

"""Generative retrieval: a model of users' histories that tells the next item's semantic id, digit by digit.

python models/generative/train.py beauty --seed 0 --seed 1 --seed 2
python models/generative/train.py beauty --ids random
python models/generative/train.py beauty --form flat --softmax codes
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "hstu"))  # histories are read as there

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2

# isort: split
import click
import numpy as np
import tensorflow as tf
from histories import Histories, LeaveLastOut, batches
from item_codes import make_ids
from report import CHOSEN_BY, choose_epoch
from retriever_settings import KS, RetrieverSettings, check_given, make_retriever
from sequences import find_file, read_sequences
from settings import options_of

from gmeta.core.errors import GmetaError
from gmeta.metrics import NextItem
from gmeta.models import FlatRetriever, GenerativeRetriever
from gmeta.preprocess import SemanticIds

MEASURED = 256  # users at once
_SHOWN = ("hr@10", "ndcg@10")
_K = 10  # codes whose share of valid ones is measured


def train(
    data: LeaveLastOut,
    ids: SemanticIds,
    settings: RetrieverSettings,
    seed: int,
    *,
    test: bool,
    minutes: float,
    keep: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Train a retriever until validation no longer improves, or for some minutes.

    Test items are measured where validation is better than before, with the items of the history left out of
    the answer and without; and there the share of the likeliest codes, without a trie, that items have.
    ``keep`` gets the weights there.
    """
    random.seed(seed)  # what Keras' layers take their seeds from
    tf.random.set_seed(seed)
    begin = time.perf_counter()
    model = make_retriever(ids, settings, seed)
    histories = batches(data.train, settings.batch, shuffle=seed)
    validation = choose_users(data.validation, settings.measured)
    seconds, best, best_epoch = 0.0, -1.0, 0
    for done in range(0, settings.epochs, settings.every):
        until, start = min(done + settings.every, settings.epochs), time.perf_counter()
        losses = model.fit(histories, initial_epoch=done, epochs=until, verbose=0).history
        seconds += time.perf_counter() - start
        found = {"validation": model.evaluate(batches(validation, MEASURED), verbose=0, return_dict=True)}
        if found["validation"][CHOSEN_BY] > best:
            best, best_epoch = found["validation"][CHOSEN_BY], until
            if test:
                found["test"] = model.evaluate(batches(data.test, MEASURED), verbose=0, return_dict=True)
                found["test_unseen"] = measure_unseen(model, data.test)
                found["valid"] = {f"share@{_K}": measure_valid(model, data.test)}
            if keep is not None:
                model.save_weights(keep)
        took = {"seconds": round(seconds, 1), "elapsed": round(time.perf_counter() - begin, 1)}
        yield {
            "epoch": until,
            **took,
            "loss": losses["loss"][-1],
            "code_loss": losses.get("code_loss", losses["loss"])[-1],
            **found,
        }
        if until - best_epoch >= settings.patience or took["elapsed"] > 60 * minutes:
            return


def measure_valid(model: GenerativeRetriever | FlatRetriever, histories: Histories) -> float:
    """Measure which share of the likeliest codes items have, if any code may be written."""
    share = tf.function(
        lambda items: model.valid_share({"item": items[:, :-1]}, _K), reduce_retracing=True, autograph=False
    )
    return float(np.mean(np.concatenate([share(batch["item"]) for batch in batches(histories, MEASURED)])))


def choose_users(histories: Histories, number: int) -> Histories:
    """Choose users evenly over the file, as its first ones differ from the others; 0: all."""
    users = int(histories["item"].nrows())
    chosen = np.linspace(0, users - 1, min(number or users, users)).astype(int)
    return {name: tf.gather(rows, chosen) for name, rows in histories.items()}


def measure_unseen(model: GenerativeRetriever | FlatRetriever, histories: Histories) -> dict[str, float]:
    """Measure answers that leave out what the history has, which is never the answer in these data."""
    metric, k = NextItem(KS), max(KS)

    @tf.function(reduce_retracing=True)
    def ranks(items: tf.RaggedTensor) -> tf.Tensor:
        found, _ = model.retrieve({"item": items[:, :-1]}, k, leave_out_seen=True)
        there = found == items[:, -1:].values[:, tf.newaxis]
        places = tf.argmax(tf.cast(there, tf.int32), axis=1) + 1
        return tf.where(tf.reduce_any(there, axis=1), places, model.items)

    for batch in batches(histories, MEASURED):
        metric.update_state(ranks(batch["item"]))
    return {name: float(value) for name, value in metric.result().items()}


@click.command()
@click.argument("data", metavar="DATA")
@click.option("--folder", type=click.Path(path_type=Path), envvar="GMETA_SEQUENCES", help="Of text files.")
@click.option("--seed", "seeds", multiple=True, type=int, default=[0], show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Of TensorFlow's; as many as cores by default.")
@click.option("--minutes", type=float, default=float("inf"), help="After which a run ends.")
@click.option("--test/--no-test", default=True, help="Whether to measure test items.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where measures go, a line each.")
@options_of(RetrieverSettings)
def main(
    data: str,
    folder: Path | None,
    seeds: tuple[int, ...],
    threads: int | None,
    minutes: float,
    test: bool,
    path: Path | None,
    **own: Any,
) -> None:
    """Train a retriever on DATA: beauty, toys or yelp, or a text file with a user a line, "user item item …".

    A user's last item is for testing, the one before it for choosing the epoch. Several processes may write
    their runs to one file of --json.
    """
    if threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    given = {name: value for name, value in own.items() if value is not None}
    settings = RetrieverSettings(**given)
    try:
        check_given(settings.form, given)
        file = find_file(data, folder) or Path(data)
        cuts = read_sequences(file)
        click.echo(f"{cuts.name}: {cuts.users} users, {cuts.items} items")
        path = path or Path("runs", "generative", f"{cuts.name}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        for seed in seeds:
            ids = make_ids(cuts, file, settings, seed)
            click.echo(json.dumps(ids.report()))
            _run(cuts, ids, settings, seed, path, test, minutes)
    except (GmetaError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _run(
    data: LeaveLastOut,
    ids: SemanticIds,
    settings: RetrieverSettings,
    seed: int,
    path: Path,
    test: bool,
    minutes: float,
) -> None:
    """Train with a seed; write and say each measure."""
    name = f"{'flat' if settings.form == 'flat' else 'retriever'}-{Path(settings.ids).name}"
    facts = {"data": data.name, "model": name, "seed": seed, "settings": asdict(settings)}
    facts["ids"] = ids.report()
    lines: list[dict[str, Any]] = []
    for found in train(data, ids, settings, seed, test=test, minutes=minutes):
        lines.append({**facts, **found})
        with path.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        _say(name, lines[-1], ("validation", "test", "test_unseen"))
    _say(f"{name}, chosen", choose_epoch(lines), ("validation", "test", "test_unseen"))


def _say(name: str, line: dict[str, Any], cuts: tuple[str, ...]) -> None:
    told = f"{name}, seed {line['seed']}, epoch {line['epoch']}"
    told += f" ({line['seconds']:.0f} s of {line['elapsed']:.0f})"
    told += f": loss {line['loss']:.4f}, code loss {line['code_loss']:.4f}"
    for cut in cuts:
        if cut in line:
            told += f"; {cut} " + ", ".join(f"{metric} {line[cut][metric]:.4f}" for metric in _SHOWN)
    if "valid" in line:
        told += "; valid " + ", ".join(f"{name} {share:.3f}" for name, share in line["valid"].items())
    click.echo(told)


if __name__ == "__main__":
    main()

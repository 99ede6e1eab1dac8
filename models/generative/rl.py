"""Imitation, then rewards: a retriever of train.py learns on by what it draws, beside more imitation.

python models/generative/rl.py beauty --seed 0 --minutes 8 --reward-minutes 4
python models/generative/rl.py toys --ids runs/ids/toys-0 --reward rank --objective grpo
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "hstu"))  # histories are read as there

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2

# isort: split
import click
import tensorflow as tf
from histories import LeaveLastOut, batches
from item_codes import make_ids
from report import CHOSEN_BY, choose_epoch
from retriever_settings import RetrieverSettings, make_retriever
from reward_report import MORE, PARTS, RL, SFT, write_report
from reward_settings import RewardSettings, make_training, next_items
from sequences import find_file, read_sequences
from settings import options_of
from train import MEASURED, choose_users, train

from gmeta.core.errors import DataError, GmetaError
from gmeta.core.files import write_atomically
from gmeta.models import GenerativeRetriever
from gmeta.preprocess import SemanticIds

Line = dict[str, Any]


def go_on(
    model: GenerativeRetriever,
    fit: Callable[[int], Any],
    data: LeaveLastOut,
    *,
    measured: int,
    minutes: float,
    test: bool,
) -> Iterator[Line]:
    """Train a model further for some minutes; measure it as `train` does, and before too, as epoch 0."""
    validation = batches(choose_users(data.validation, measured), MEASURED)
    begin, seconds, best, logs = time.perf_counter(), 0.0, -1.0, {}
    for epoch in itertools.count():
        if epoch:
            start = time.perf_counter()
            logs = {name: values[-1] for name, values in fit(epoch).history.items()}
            seconds += time.perf_counter() - start
        found = {"validation": model.evaluate(validation, verbose=0, return_dict=True)}
        if found["validation"][CHOSEN_BY] > best:
            best = found["validation"][CHOSEN_BY]
            if test:
                found["test"] = model.evaluate(batches(data.test, MEASURED), verbose=0, return_dict=True)
        took = {"seconds": round(seconds, 1), "elapsed": round(time.perf_counter() - begin, 1)}
        yield {"epoch": epoch, **took, **logs, **found}
        if seconds >= 60 * minutes:
            return


def more_imitation(
    model: GenerativeRetriever, data: LeaveLastOut, settings: RetrieverSettings, seed: int
) -> Callable[[int], Any]:
    """Return what trains epoch after epoch as before."""
    histories = batches(data.train, settings.batch, shuffle=seed)
    return lambda epoch: model.fit(histories, initial_epoch=epoch - 1, epochs=epoch, verbose=0)


def by_rewards(
    model: GenerativeRetriever, data: LeaveLastOut, rewards: RewardSettings, seed: int
) -> Callable[[int], Any]:
    """Return what trains by rewards for a number of steps, again and again."""
    training = make_training(model, rewards, seed)
    rows = batches(next_items(data.train, rewards.targets), rewards.reward_batch, shuffle=seed)
    rows, steps = (rows.repeat(), rewards.reward_every) if rewards.reward_every else (rows, None)
    return lambda epoch: training.fit(
        rows, initial_epoch=epoch - 1, epochs=epoch, steps_per_epoch=steps, verbose=0
    )


def imitate(
    data: LeaveLastOut,
    ids: SemanticIds,
    settings: RetrieverSettings,
    seed: int,
    folder: Path,
    *,
    test: bool,
    minutes: float,
) -> Iterator[Line]:
    """Train as train.py does and keep the weights of the best epoch in a folder; or read what is kept there.

    Raises:
      DataError: What is kept there was trained with other data, ids or settings.
    """
    facts = {"data": data.name, "model": SFT, "seed": seed, "settings": asdict(settings), "ids": ids.digest}
    kept = folder / "lines.jsonl"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        lines = []
        for found in train(data, ids, settings, seed, test=test, minutes=minutes, keep=folder / "weights"):
            lines.append({**facts, **found})
            yield lines[-1]
        write_atomically(kept, "".join(json.dumps(line) + "\n" for line in lines))
        return
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    if {name: lines[0].get(name) for name in facts} != facts or ("test" in lines[0]) != test:
        raise DataError(
            "what is kept there was trained with other data, ids or settings",
            path=folder,
            advice="name another folder as --keep",
        )
    yield from lines


def run(
    data: LeaveLastOut,
    ids: SemanticIds,
    settings: RetrieverSettings,
    rewards: RewardSettings,
    seed: int,
    folder: Path,
    *,
    parts: Sequence[str],
    test: bool,
    minutes: float,
) -> Iterator[Line]:
    """Yield the measures of imitation; and of going on from its best epoch, by more of it and by rewards."""
    lines = []
    for line in imitate(data, ids, settings, seed, folder, test=test, minutes=minutes):
        lines.append(line)
        if SFT in parts:
            yield line
    facts = {"data": data.name, "seed": seed, "began": choose_epoch(lines)["seconds"]}
    for name in [each for each in (MORE, RL) if each in parts]:
        random.seed(seed)  # what Keras' layers take their seeds from
        tf.random.set_seed(seed)
        model = make_retriever(ids, settings, seed)
        model.load_weights(folder / "weights")
        if name == MORE:
            fit, of = more_imitation(model, data, settings, seed + 1), asdict(settings)
        else:
            fit, of = by_rewards(model, data, rewards, seed), asdict(settings) | asdict(rewards)
        ends = {"measured": settings.measured, "minutes": rewards.reward_minutes, "test": test}
        for found in go_on(model, fit, data, **ends):
            yield {**facts, "model": name, "settings": of, **found}


def say(line: Line) -> None:
    """Print a measure."""
    told = f"{line['model']}, seed {line['seed']}, epoch {line['epoch']} ({line['seconds']:.0f} s)"
    told += "".join(f", {name} {line[name]:.4f}" for name in ("loss", "reward", "tied") if name in line)
    for cut in ("validation", "test"):
        if cut in line:
            told += f"; {cut} hr@10 {line[cut]['hr@10']:.4f}, ndcg@10 {line[cut]['ndcg@10']:.4f}"
    click.echo(told)


@click.command()
@click.argument("data", metavar="DATA")
@click.option("--folder", type=click.Path(path_type=Path), envvar="GMETA_SEQUENCES", help="Of text files.")
@click.option("--seed", "seeds", multiple=True, type=int, default=[0], show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Of TensorFlow's; as many as cores by default.")
@click.option("--minutes", type=float, default=float("inf"), help="After which imitation ends.")
@click.option("--test/--no-test", default=True, help="Whether to measure test items.")
@click.option("--keep", type=click.Path(path_type=Path), help="What imitation learned, a folder a seed.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where measures go, a line each.")
@click.option("--figures", type=click.Path(path_type=Path), help="Where the table and the picture go.")
@options_of(RetrieverSettings)
@options_of(RewardSettings)
def main(
    data: str,
    folder: Path | None,
    seeds: tuple[int, ...],
    threads: int | None,
    minutes: float,
    test: bool,
    keep: Path | None,
    parts: tuple[str, ...],
    path: Path | None,
    figures: Path | None,
    **own: Any,
) -> None:
    """Train a retriever on DATA by imitation (SFT), then by rewards, and say which is better.

    DATA, ids and most options are those of train.py. Rewards go on from the best epoch in validation, and so
    does "more SFT", for as many minutes of training. What --keep holds already isn't trained again. With some
    of the parts alone, reward_report.py makes the table and the picture once all are there.
    """
    if threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    given = {name: value for name, value in own.items() if value is not None}
    settings, rewards = (
        kind(**{name: value for name, value in given.items() if name in kind.__annotations__})
        for kind in (RetrieverSettings, RewardSettings)
    )
    try:
        file = find_file(data, folder) or Path(data)
        cuts = read_sequences(file)
        out = Path("runs", "rl", cuts.name)
        path, keep, figures = path or out / "runs.jsonl", keep or out / "sft", figures or out
        path.parent.mkdir(parents=True, exist_ok=True)
        click.echo(f"{cuts.name}: {cuts.users} users, {cuts.items} items")
        for seed in seeds:
            ids = make_ids(cuts, file, settings, seed)
            ends = {"parts": parts, "test": test, "minutes": minutes}
            for line in run(cuts, ids, settings, rewards, seed, keep / str(seed), **ends):
                with path.open("a") as written:
                    written.write(json.dumps(line) + "\n")
                say(line)
        if test and len(parts) == len(PARTS):
            click.echo(write_report([path], figures))
    except (GmetaError, OSError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()

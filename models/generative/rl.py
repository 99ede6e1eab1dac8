"""Rewards after imitation: continues a run's generative model by rewarded draws, and by more imitation.

python models/generative/rl.py --run runs/generative --minutes 4
python models/generative/rl.py --run runs/generative --minutes 4 --set 'reward="rank"' --set targets=3
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2

# isort: split
import click
import numpy as np
import tensorflow as tf
from reward_report import MORE, PARTS, write_report

from gmeta.core.errors import ConfigError, GmetaError
from gmeta.core.settings import from_mapping, override
from gmeta.experiment.next_item.generative import SearchScorer
from gmeta.experiment.next_item.histories import Cuts, in_batches
from gmeta.experiment.next_item.models import load_best, training_batches, validation_batches
from gmeta.experiment.next_item.ranked import rank
from gmeta.experiment.next_item.runs import read_cuts
from gmeta.experiment.plan.generative_config import GenerativeMethod
from gmeta.experiment.plan.next_item_config import NextItemConfig
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.reinforcement import ECPO, GRPO, PolicyTraining, Rollouts
from gmeta.reinforcement.rewards import HitReward, RankAwareReward

REWARDS = {"hit": HitReward, "rank": RankAwareReward}
OBJECTIVES = {"ecpo": ECPO, "grpo": GRPO}
Line = dict[str, Any]


@dataclass(frozen=True)
class RewardSettings:
    """Rewards, and training by them.

    Attributes:
      reward: ``"hit"`` or ``"rank"``.
      objective: ``"ecpo"`` or ``"grpo"``.
      sampling: The source of a group: ``"beam"``, ``"sample"`` or ``"without_replacement"``.
      group: The number of items drawn for a history.
      updates: The number of updates per draw.
      kl: The weight of the divergence from the policy at the start.
      sft: The weight of the loss of imitation.
      targets: The number of rewarded items at the end of each training history, each in a separate row.
      batch: Rows in a step.
      rate: Adam's learning rate.
      every: The number of steps between measurements; 0: a pass over the rows.
      measured: The number of measured validation users; 0: all.
    """

    reward: str = "hit"
    objective: str = "ecpo"
    sampling: str = "beam"
    group: int = 16
    updates: int = 1
    kl: float = 0.0
    sft: float = 0.1
    targets: int = 1
    batch: int = 256
    rate: float = 1e-4
    every: int = 0
    measured: int = 0

    def __post_init__(self) -> None:
        for name, known in (("reward", REWARDS), ("objective", OBJECTIVES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be {' or '.join(known)}, got {getattr(self, name)!r}")


def next_items(train: Mapping[str, tf.RaggedTensor], targets: int) -> dict[str, Any]:
    """Cut training histories before each of their last items, but not before a first one.

    Args:
      train: The columns of histories, without the items of validation and test.
      targets: The number of items of each history.

    Returns:
      The columns of the histories so far, ``next``: the next items, ``user``: row numbers.
    """
    parts: list[dict[str, Any]] = []
    for last in range(1, targets + 1):
        long = tf.where(train["item"].row_lengths() > last)[:, 0]
        rows = {name: tf.gather(column, long) for name, column in train.items()}
        then = tf.gather(rows["item"].values, rows["item"].row_limits() - last)
        parts.append(
            {name: column[:, :-last] for name, column in rows.items()} | {"next": then, "user": long}
        )
    return {name: tf.concat([part[name] for part in parts], axis=0) for name in parts[0]}


def by_rewards(model: Any, cuts: Cuts, settings: RewardSettings, seed: int) -> Callable[[int], Any]:
    """Return a function that trains a model by rewards, for an epoch of that number."""
    s = settings
    training = PolicyTraining(
        model,
        REWARDS[s.reward](),
        objective=OBJECTIVES[s.objective](kl=s.kl),
        rollouts=Rollouts(s.group, s.sampling, seed, weights="equal"),
        updates=s.updates,
        sft=s.sft,
        user="user",
    )
    training.compile(tf.keras.optimizers.Adam(s.rate))
    columns = next_items(cuts.train.ragged(), s.targets)

    def fit(epoch: int) -> Any:
        rows = in_batches(columns, s.batch, seed, epoch)
        rows, steps = (rows.repeat(), s.every) if s.every else (rows, None)
        return training.fit(rows, initial_epoch=epoch - 1, epochs=epoch, steps_per_epoch=steps, verbose=0)

    return fit


def more_imitation(model: Any, cuts: Cuts, method: GenerativeMethod, seed: int) -> Callable[[int], Any]:
    """Return a function that trains a model as in the run, with users in orders that the run hasn't used."""

    def fit(epoch: int) -> Any:
        rows = training_batches(cuts.train, method, seed, method.epochs + epoch)
        return model.fit(rows, initial_epoch=epoch - 1, epochs=epoch, verbose=0)

    return fit


def go_on(
    model: Any,
    fit: Callable[[int], Any],
    cuts: Cuts,
    config: NextItemConfig,
    *,
    measured: int,
    minutes: float,
) -> Iterator[Line]:
    """Train a model for some minutes, and yield its metrics at the start, as epoch 0, and after each epoch.

    Test items are ranked when validation improves, as in `gmeta evaluate`.
    """
    k, users = config.ks[0], len(cuts.validation)
    some = np.linspace(0, users - 1, min(measured or users, users)).astype(int)
    validation = validation_batches(cuts.validation.choose(some))
    seconds, best, logs = 0.0, -1.0, {}
    for epoch in itertools.count():
        if epoch:
            start = time.perf_counter()
            logs = {name: values[-1] for name, values in fit(epoch).history.items()}
            seconds += time.perf_counter() - start
        found: Line = {"validation": model.evaluate(validation, verbose=0, return_dict=True)}
        if found["validation"][f"ndcg@{k}"] > best:
            best = found["validation"][f"ndcg@{k}"]
            ranked = rank(SearchScorer(model), cuts.test, cuts.items, seen=bool(config.seen), shown=k)
            own = ranked.of_users(k)
            found["test"] = {f"{name}@{k}": float(own[name].mean()) for name in ("hr", "ndcg")}
        yield {"epoch": epoch, "k": k, "seconds": round(seconds, 1), **logs, **found}
        if seconds >= 60 * minutes:
            return


def learn_on(
    run: RunFolder,
    method: str | None,
    seeds: Sequence[int],
    settings: RewardSettings,
    *,
    parts: Sequence[str],
    minutes: float,
) -> Iterator[Line]:
    """Yield the metrics of each part and seed, which begin with the best epoch of a run.

    Raises:
      ConfigError: The run is for something else, or has no such method or seed.
      DataError: The run's training isn't complete.
    """
    config, data = run.load(unchanged=True)
    methods = config.methods if isinstance(config, NextItemConfig) else {}
    own = {name: each for name, each in methods.items() if isinstance(each, GenerativeMethod)}
    chosen = method or next(iter(own), None)
    if chosen not in own:
        raise ConfigError(
            f"{run.path} has no generative method {method or ''}: it has {', '.join(config.methods)}"
        )
    if strange := [seed for seed in seeds if seed not in config.seeds]:
        raise ConfigError(f"{run.path} has no seed {strange[0]}; it has {', '.join(map(str, config.seeds))}")
    cuts = read_cuts(config, data, attributes=False)
    for seed in seeds or config.seeds:
        for part in parts:
            random.seed(seed)  # Keras' layers take their seeds from it
            tf.random.set_seed(seed)
            scorer: Any = load_best(config, chosen, seed, cuts=cuts, folder=run.training(chosen, seed))
            model = scorer.model
            if part == MORE:
                fit, of = more_imitation(model, cuts, own[chosen], seed), {}
            else:
                fit, of = by_rewards(model, cuts, settings, seed), asdict(settings)
            facts = {"run": str(run.path), "method": chosen, "seed": seed, "part": part, "settings": of}
            for found in go_on(model, fit, cuts, config, measured=settings.measured, minutes=minutes):
                yield {**facts, **found}


def say(line: Line) -> None:
    """Print the metrics of an epoch."""
    k = line["k"]
    text = f"{line['part']}, seed {line['seed']}, epoch {line['epoch']} ({line['seconds']:.0f} s)"
    text += "".join(f", {name} {line[name]:.4f}" for name in ("loss", "reward", "tied") if name in line)
    for cut in ("validation", "test"):
        if cut in line:
            text += f"; {cut} HR@{k} {line[cut][f'hr@{k}']:.4f}, NDCG@{k} {line[cut][f'ndcg@{k}']:.4f}"
    click.echo(text)


@click.command()
@click.option("--run", "path", type=click.Path(path_type=Path), required=True, help="A run of gmeta train.")
@click.option("--method", help="A generative method of the run.  [default: the first one]")
@click.option(
    "--seed", "seeds", multiple=True, type=int, help="May be repeated.  [default: those of the run]"
)
@click.option("--minutes", type=float, required=True, help="Of training for each part, without measures.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS, show_default=True)
@click.option("--set", "given", multiple=True, metavar="KEY=VALUE", help="A RewardSettings field, in TOML.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder for measures, table and picture.  [default: RUN/rewards]",
)
def main(
    path: Path,
    method: str | None,
    seeds: tuple[int, ...],
    minutes: float,
    parts: tuple[str, ...],
    given: tuple[str, ...],
    out: Path | None,
) -> None:
    """Train the best epoch of a run further, by rewards and by more imitation, and compare the two."""
    try:
        settings = from_mapping(RewardSettings, override({}, given), "--set")
        out = out or path / "rewards"
        out.mkdir(parents=True, exist_ok=True)
        file = out / f"{'-'.join(parts)}-{'-'.join(map(str, seeds)) or 'all'}.jsonl"
        with file.open("w") as written:
            for line in learn_on(RunFolder(path), method, seeds, settings, parts=parts, minutes=minutes):
                written.write(json.dumps(line) + "\n")
                written.flush()
                say(line)
        if len(parts) == len(PARTS):
            click.echo(write_report([file], out))
    except (GmetaError, OSError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()

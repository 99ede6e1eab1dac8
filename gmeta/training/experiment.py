"""A whole experiment: every method with every seed, then one evaluation of them all."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmeta import io
from gmeta.core import collectives
from gmeta.core.config import to_mapping
from gmeta.core.errors import DataError
from gmeta.core.manifest import Manifest
from gmeta.core.on_bad import OnBad
from gmeta.models import MetaModel
from gmeta.training import cold_start
from gmeta.training.checkpoint.ranks import Ranks
from gmeta.training.cold_start import QueryRows
from gmeta.training.evaluation import DataDescription, Evaluation, MethodResult, TrainingRun
from gmeta.training.experiment_config import ExperimentConfig
from gmeta.training.progress import TrainingProgress
from gmeta.training.run_folder import RunFolder
from gmeta.training.trainer import COLD, WARM, Outcome, cold_tasks, restore, train

ITEM_MEAN = "item_mean"
"""The baseline that every evaluation has beside the methods that are trained."""


def run_training(
    config: ExperimentConfig,
    run: RunFolder,
    data: Path,
    *,
    progress: TrainingProgress,
    on_bad: OnBad = "raise",
    checkpoint_every: int | None = None,
) -> io.Waiting:
    """Train every method with every seed; go on with what is half done, and leave what is done.

    On several ranks all call it together; see `gmeta.training.trainer.train`.

    Args:
      config: The experiment.
      run: Where checkpoints go.
      data: A prepared data set.
      progress: Where it is shown, resumed runs included.
      on_bad: What a bad record does: ``"raise"`` or ``"skip"``.
      checkpoint_every: As in `gmeta.training.trainer.train`.

    Returns:
      How long all of it has waited for data.

    Raises:
      ConfigError: The folder holds an experiment of other settings.
      DataError: Bad records, or a checkpoint that can't be restored.
    """
    here = collectives.world()
    with Ranks.of().together():
        if here.rank == 0:
            run.begin(config, data)
    collectives.check_agreement(
        {"data": Manifest.load(data).digest}, advice="give every rank the same prepared data set"
    )
    left_out: set[str] = set()
    waiting = io.Waiting()
    for method, settings in config.methods.items():
        for seed in config.seeds:
            label = f"{settings.label}, seed {seed}"
            bar = progress.track(label, settings.epochs)
            outcome = train(
                config,
                method,
                seed,
                data=data,
                folder=run.training(method, seed),
                callbacks=[bar],
                on_bad=on_bad,
                checkpoint_every=checkpoint_every,
            )
            if outcome.epochs_before == settings.epochs:
                progress.say(f"{label}: all {settings.epochs} epochs were done before")
            elif outcome.epochs_before or outcome.steps_before:
                progress.say(f"{label}: resumed {_where(outcome)}{_other_ranks(outcome)}")
            waiting += outcome.waiting
            for message in outcome.left_out:
                if message not in left_out:
                    progress.say(f"left out: {message}")
            left_out |= set(outcome.left_out)
    return waiting


def _where(outcome: Outcome) -> str:
    if outcome.steps_before:
        return f"after step {outcome.steps_before} of epoch {outcome.epochs_before + 1}"
    return f"after epoch {outcome.epochs_before}"


def _other_ranks(outcome: Outcome) -> str:
    before, now = outcome.ranks_before, collectives.world().shares.total
    if before == now:
        return ""
    return f", which had {before} ranks; on {now} a step has {now}/{before} times as many tasks"


def evaluate(run: RunFolder, on_bad: OnBad = "raise") -> Evaluation:
    """Measure every method of a trained experiment on the cold tasks, beside the item mean.

    On several ranks all call it together, and all get the whole of it.

    Raises:
      DataError: The run isn't trained to the end; it says which method and seed.
    """
    started = time.monotonic()
    config, data = run.load()
    manifest = Manifest.load(data)
    with io.data_errors():
        everything = (0, 1)  # ranks divide the predictions
        cold = list(cold_tasks(config, data, on_bad, shard=everything))
        warm = io.tasks(data / WARM, query=config.query, shuffle=False, on_bad=on_bad, shard=everything)
        rows = cold_start.query_rows(cold)
        baseline = rows.measure(cold_start.item_means(warm, rows))
    methods, curves, training = {}, {}, {}
    for method, settings in config.methods.items():
        measured = [_measure(config, run, method, seed, cold, rows) for seed in config.seeds]
        methods[method] = MethodResult(
            settings.label,
            settings.description,
            {
                steps: _by_metric([one.metrics[steps] for one in measured])
                for steps in config.evaluation_steps
            },
        )
        curves[method] = {size: [one.support_mae[size] for one in measured] for size in config.support_sizes}
        training[method] = [one.training for one in measured]
    methods[ITEM_MEAN] = MethodResult(
        "item mean",
        "The mean rating of the item among the warm users; knows nothing of the user.",
        {0: _by_metric([baseline])},
    )
    curves[ITEM_MEAN] = {size: [baseline["mae"]] for size in config.support_sizes}
    return Evaluation(
        title="Cold-start evaluation",
        data=DataDescription(
            name=str(manifest.config.get("source", data.name)),
            warm_tasks=manifest.splits[WARM].groups,
            cold_tasks=manifest.splits[COLD].groups,
            rows=sum(split.rows for split in manifest.splits.values()),
        ),
        config={"experiment": to_mapping(config), "data": dict(manifest.config)},
        seeds=config.seeds,
        methods=methods,
        support_curve=curves,
        support_steps=config.support_steps,
        training=training,
        notes=[f"{count} input records left out: {reason}" for reason, count in manifest.dropped.items()],
        seconds={"evaluate": time.monotonic() - started},
    )


@dataclass(frozen=True)
class _Measured:
    """What one trained model reached: steps -> metric -> value, support size -> MAE, and its curves."""

    metrics: Mapping[int, Mapping[str, float]]
    support_mae: Mapping[int, float]
    training: TrainingRun


def _measure(
    config: ExperimentConfig,
    run: RunFolder,
    method: str,
    seed: int,
    cold: Sequence[Mapping[str, Any]],
    rows: QueryRows,
) -> _Measured:
    model, training = trained(config, run, method, seed)
    predictions = cold_start.predict_after(model, cold, config.evaluation_steps)
    support_mae = {}
    for size in config.support_sizes:
        predicted = cold_start.predict_after(model, cold, [config.support_steps], support_size=size)
        support_mae[size] = rows.measure(predicted[config.support_steps])["mae"]
    return _Measured(
        {steps: rows.measure(predicted) for steps, predicted in predictions.items()},
        support_mae,
        training,
    )


def trained(
    config: ExperimentConfig, run: RunFolder, method: str, seed: int
) -> tuple[MetaModel, TrainingRun]:
    """A model of a run and its curves.

    Raises:
      DataError: It isn't trained to the end, or its checkpoint can't be restored.
    """
    model, checkpoints = restore(config, method, seed, folder=run.training(method, seed))
    done, wanted = len(checkpoints.run.epoch), config.methods[method].epochs
    if done < wanted:
        raise DataError(
            f"{method}, seed {seed}: {done} of {wanted} epochs are trained",
            path=run.path,
            advice="run `gmeta train` again to finish",
        )
    return model, checkpoints.run


def _by_metric(measurements: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """One mapping a seed -> metric -> one value a seed."""
    by_metric: dict[str, list[float]] = {}
    for measurement in measurements:
        for metric, value in measurement.items():
            by_metric.setdefault(metric, []).append(value)
    return by_metric

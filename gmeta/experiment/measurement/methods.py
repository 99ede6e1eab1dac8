"""Predictions of every method of a trained experiment, and of baselines, on each of its test splits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gmeta import io
from gmeta.core.data.on_bad import OnBad
from gmeta.experiment.baselines.all_baselines import Baselines
from gmeta.experiment.baselines.task_rows import ItemNumbers, Tasks
from gmeta.experiment.baselines.tuning import Tuned
from gmeta.experiment.measurement import cold_start
from gmeta.experiment.measurement.attribute_reader import AttributeReader
from gmeta.experiment.measurement.baseline_rows import number_items, read_tasks, read_whole
from gmeta.experiment.measurement.cold_start import Floats
from gmeta.experiment.measurement.split import EVERYTHING, Split, yes_from
from gmeta.experiment.plan.experiment_config import ExperimentConfig
from gmeta.experiment.plan.task_sets import measured_tasks, other_training_tasks
from gmeta.experiment.results.evaluation import TrainingRun
from gmeta.experiment.runs.all_runs import load_trained
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.models import MetaModel


@dataclass(frozen=True)
class MeasuredRun:
    """What the methods of a run and the baselines predict on its test splits.

    Attributes:
      splits: Test split -> predictions.
      training: Method -> the curves of each seed.
      tuned: The baselines' settings.
      baselines: Their names, from the simplest on.
      baseline_seconds: How long tuning, fitting and asking them took.
    """

    splits: Mapping[str, Split]
    training: Mapping[str, list[TrainingRun]]
    tuned: Tuned
    baselines: Sequence[str]
    baseline_seconds: float


def measure(run: RunFolder, on_bad: OnBad = "raise") -> MeasuredRun:
    """Let every method of a trained experiment, and the baselines, predict its test splits.

    Baselines are tuned on and fitted to the tasks that methods were trained on.

    Raises:
      DataError: The run isn't trained to the end; the message names the method and the seed.
    """
    config, data = run.load()
    primary = config.test_splits[0]
    reader = AttributeReader.of(config)
    with io.data_errors():
        warm = read_tasks(
            reader.watch(measured_tasks(config, data, config.train_split, on_bad, shard=EVERYTHING)),
            config.item,
            yes_from(config),
        )
        others = reader.watch(other_training_tasks(config, data, on_bad), "columns")
        warm = warm.and_whole(read_whole(others, config.item, config.label, yes_from(config)))
        batches = {
            name: list(reader.watch(measured_tasks(config, data, name, on_bad, shard=EVERYTHING)))
            for name in config.test_splits
        }
    splits = {name: Split(config, cold_start.query_rows(each)) for name, each in batches.items()}
    first = splits[primary]
    training: dict[str, list[TrainingRun]] = {method: [] for method in config.methods}
    for method in config.methods:
        for seed in config.seeds:
            model, course = load_trained(config, run, method, seed)
            training[method].append(course)
            for name, split in splits.items():
                after = cold_start.predict_after(model, batches[name], config.evaluation_steps)
                for steps, predictions in after.items():
                    split.add(method, steps, predictions)
            for size in config.support_sizes:
                steps = config.support_steps
                limited = cold_start.predict_after(model, batches[primary], [steps], support_size=size)
                first.limited.setdefault((method, size), []).append(limited[steps])
            if config.loss == "mse" and model.learner.inner.algorithm == "ridge":
                first.varied.setdefault(method, []).append(_with_variance(config, model, batches[primary]))
    started = time.monotonic()
    asked = {name: read_tasks(each, config.item, yes_from(config)) for name, each in batches.items()}
    numbers = ItemNumbers.of_tasks(warm, asked.values())
    warm, asked = number_items(warm, numbers), {name: number_items(asked[name], numbers) for name in asked}
    baselines = Baselines.of(
        warm,
        numbers.unknown,
        by_item=config.item is not None,
        attributes=reader.attributes(numbers),
    )

    def ask(split: str, tasks: Tasks) -> dict[str, Floats]:
        if split == config.train_split:
            return baselines.predict_warm(warm, tasks)
        return baselines.predict(tasks)

    for name, split in splits.items():
        for baseline, found in ask(name, asked[name]).items():
            split.add(baseline, 0, split.outputs(found))
    for size in config.support_sizes:
        for baseline, found in ask(primary, asked[primary].latest(size)).items():
            first.limited[baseline, size] = [first.outputs(found)]
    if config.loss == "mse" and primary != config.train_split:
        means = baselines.predict(asked[primary])
        for baseline, variance in baselines.variances(asked[primary]).items():
            first.varied[baseline] = [(means[baseline], variance)]
    seconds = time.monotonic() - started
    return MeasuredRun(splits, training, baselines.tuned, list(baselines.predictors), seconds)


def _with_variance(
    config: ExperimentConfig, model: MetaModel, batches: Sequence[Mapping[str, Any]]
) -> tuple[Floats, Floats]:
    """Predict query rows and their variances by a model whose inner loop is ridge."""
    steps = model.learner.inner.steps_in("evaluation")
    predictions = cold_start.predict_after(model, batches, [steps])[steps]
    deviation = config.label_scale.deviation if config.label_scale else 1.0
    noise = cold_start.label_noise(model, deviation)
    return predictions, cold_start.predict_variance(model, batches, noise)

"""Evaluation of every method of a trained experiment on each of its test splits, beside baselines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from gmeta import io
from gmeta.core.data.manifest import Manifest
from gmeta.core.data.on_bad import OnBad
from gmeta.core.settings import to_mapping
from gmeta.experiment.baselines.all_baselines import Baselines
from gmeta.experiment.baselines.task_rows import ItemNumbers, Tasks
from gmeta.experiment.measurement import cold_start
from gmeta.experiment.measurement.attribute_reader import AttributeReader
from gmeta.experiment.measurement.baseline_rows import number_items, read_tasks
from gmeta.experiment.measurement.baseline_words import NO_ITEM, describe
from gmeta.experiment.measurement.cold_start import Floats
from gmeta.experiment.measurement.split import EVERYTHING, Split, yes_from
from gmeta.experiment.plan.experiment_config import ExperimentConfig
from gmeta.experiment.plan.task_sets import count_tasks, measured_tasks
from gmeta.experiment.results.bootstrap import Bootstrap
from gmeta.experiment.results.calibration import Calibration
from gmeta.experiment.results.evaluation import (
    DataDescription,
    Evaluation,
    MethodResult,
    SplitResult,
    TrainingRun,
)
from gmeta.experiment.runs.all_runs import load_trained
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.models import MetaModel


def evaluate(run: RunFolder, on_bad: OnBad = "raise") -> Evaluation:
    """Measure every method of a trained experiment on its test splits, beside the baselines.

    In a job of several ranks, all ranks call it together, and each gets the whole evaluation.

    Raises:
      DataError: The run isn't trained to the end; the message names the method and the seed.
    """
    started = time.monotonic()
    config, data = run.load()
    manifest = Manifest.load(data)
    primary, *others = config.test_splits
    reader = AttributeReader.of(config)
    with io.data_errors():
        warm = read_tasks(
            reader.watch(measured_tasks(config, data, config.train_split, on_bad, shard=EVERYTHING)),
            config.item,
            yes_from(config),
        )
        splits = {name: Split.read(config, data, name, on_bad, reader) for name in config.test_splits}
    numbers = ItemNumbers.of_tasks(warm, [split.tasks for split in splits.values()])
    for split in splits.values():
        split.tasks = number_items(split.tasks, numbers)
    first = splits[primary]
    curves: dict[str, dict[int, list[float]]] = {}
    training: dict[str, list[TrainingRun]] = {}
    sure: dict[str, list[tuple[Floats, Floats]]] = {}
    for method in config.methods:
        training[method] = []
        curves[method] = {size: [] for size in config.support_sizes}
        for seed in config.seeds:
            model, course = load_trained(config, run, method, seed)
            training[method].append(course)
            for split in splits.values():
                after = cold_start.predict_after(model, split.batches, config.evaluation_steps)
                for steps, predictions in after.items():
                    split.add(method, steps, predictions)
            for size, values in curves[method].items():
                steps = config.support_steps
                limited = cold_start.predict_after(model, first.batches, [steps], support_size=size)
                values.append(first.measure(limited[steps])["mae"])
            if config.loss == "mse" and model.learner.inner.algorithm == "ridge":
                sure.setdefault(method, []).append(_with_variance(config, model, first))
    measured = time.monotonic()
    warm = number_items(warm, numbers)
    baselines = Baselines.of(
        warm,
        numbers.unknown,
        by_item=config.item is not None,
        attributes=reader.attributes(numbers),
    )
    simple = list(baselines.predictors)

    def ask(split: str, tasks: Tasks) -> dict[str, Floats]:
        if split == config.train_split:
            return baselines.predict_warm(warm, tasks)
        return baselines.predict(tasks)

    def compare(split: str) -> Bootstrap | None:  # of tasks that only methods have seen, nothing is a win
        return None if split == config.train_split else splits[split].bootstrap(simple)

    for name, split in splits.items():
        for baseline, found in ask(name, split.tasks).items():
            split.add(baseline, 0, split.outputs(found))
    for size in config.support_sizes:
        for baseline, found in ask(primary, first.tasks.latest(size)).items():
            curves.setdefault(baseline, {})[size] = [first.measure(first.outputs(found))["mae"]]
    if config.loss == "mse" and primary != config.train_split:
        means = baselines.predict(first.tasks)
        for baseline, variance in baselines.variances(first.tasks).items():
            sure[baseline] = [(means[baseline], variance)]
    about = {name: (settings.label, settings.description) for name, settings in config.methods.items()}
    about |= describe(baselines.tuned, config)
    ended = time.monotonic()
    return Evaluation(
        title="Cold-start evaluation",
        data=DataDescription(
            name=str(manifest.config.get("source", data.name)),
            warm_tasks=count_tasks(config, data, config.train_split)[0],
            cold_tasks=count_tasks(config, data, primary)[0],
            rows=sum(split.rows for split in manifest.splits.values()),
            split=primary,
        ),
        config={"experiment": to_mapping(config), "data": dict(manifest.config)},
        seeds=config.seeds,
        methods={name: MethodResult(*about[name], found) for name, found in first.results.items()},
        splits={
            name: SplitResult(count_tasks(config, data, name)[0], splits[name].results, compare(name))
            for name in others
        },
        bootstrap=compare(primary),
        support_curve=curves if config.support_sizes else {},
        support_steps=config.support_steps if config.support_sizes else None,
        calibration={name: _calibration(first, found) for name, found in sure.items()},
        training=training,
        notes=[
            *_notes(config, data),
            *(f"{count} input records left out: {reason}" for reason, count in manifest.dropped.items()),
        ],
        seconds={"evaluate": time.monotonic() - started, "of which baselines": ended - measured},
    )


def _with_variance(config: ExperimentConfig, model: MetaModel, split: Split) -> tuple[Floats, Floats]:
    """Predict the query rows of a split, and their variances, by a model whose inner loop is ridge."""
    steps = model.learner.inner.steps_in("evaluation")
    predictions = cold_start.predict_after(model, split.batches, [steps])[steps]
    deviation = config.label_scale.deviation if config.label_scale else 1.0
    noise = cold_start.label_noise(model, deviation)
    return predictions, cold_start.predict_variance(model, split.batches, noise)


def _calibration(split: Split, found: Sequence[tuple[Floats, Floats]]) -> Calibration:
    return Calibration.of(split.rows.labels, [each for each, _ in found], [each for _, each in found])


def _notes(config: ExperimentConfig, data: Path) -> list[str]:
    """Return the notes that a reader needs to judge the table."""
    notes = []
    for split in (config.train_split, *config.test_splits):
        _, small = count_tasks(config, data, split)
        if small:
            notes.append(f"{small:,} {split} tasks are too small for a support and a query set: passed over")
    if all(method.inner.steps for method in config.methods.values()):
        notes.append("No method was trained without an inner loop: what meta-learning adds can't be told.")
    if config.item is None:
        notes.append(NO_ITEM)
    if config.train_split in config.test_splits:
        notes.append(
            f"Methods were trained on the {config.train_split} tasks whose table is shown; baselines predict "
            "each of these tasks from the rows of others, so that their differences are not compared."
        )
    return notes

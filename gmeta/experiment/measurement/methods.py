"""Evaluation of every method of a trained experiment on each of its test splits, and of two baselines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmeta import io
from gmeta.core.data.manifest import Manifest
from gmeta.core.data.on_bad import OnBad
from gmeta.core.settings import to_mapping
from gmeta.experiment.measurement import baselines, cold_start
from gmeta.experiment.measurement.answer_metrics import click_metrics, number_metrics
from gmeta.experiment.measurement.baselines import ItemMeans, as_logits
from gmeta.experiment.measurement.cold_start import Floats, QueryRows
from gmeta.experiment.plan.experiment_config import ExperimentConfig
from gmeta.experiment.plan.task_sets import count_tasks, measured_tasks
from gmeta.experiment.results.evaluation import (
    DataDescription,
    Evaluation,
    MethodResult,
    SplitResult,
    TrainingRun,
)
from gmeta.experiment.results.metrics import OF_ORDER, rating_metrics
from gmeta.experiment.runs.all_runs import load_trained
from gmeta.experiment.runs.run_folder import RunFolder

ITEM_MEAN, BIASES = "item_mean", "biases"
"""The baselines that every evaluation measures beside the trained methods."""

Results = dict[int, dict[str, list[float]]]
"""Inner steps -> metric -> one value per seed."""

_EVERYTHING = (0, 1)  # ranks divide the predictions, not the tasks


@dataclass(frozen=True)
class _Split:
    """A split's batches and their query rows."""

    config: ExperimentConfig
    batches: Sequence[Mapping[str, Any]]
    rows: QueryRows

    @classmethod
    def read(cls, config: ExperimentConfig, data: Path, name: str, on_bad: OnBad) -> _Split:
        """Read the whole split; every rank reads all of it."""
        batches = list(measured_tasks(config, data, name, on_bad, shard=_EVERYTHING))
        return cls(config, batches, cold_start.query_rows(batches))

    def measure(self, predictions: Floats) -> dict[str, float]:
        """Compute the metrics of a network's outputs; the outputs are logits where labels are binary."""
        labels, splits, ratings = self.rows.labels, self.rows.row_splits, not self.config.own_columns
        if self.config.loss == "mse":
            return (
                rating_metrics(labels, predictions, splits)
                if ratings
                else number_metrics(labels, predictions)
            )
        if ratings:
            found = rating_metrics(labels, predictions, splits)
            return {name: found[name] for name in OF_ORDER}
        return click_metrics(labels, predictions, splits, self.config.positive)

    def baselines(self, means: ItemMeans) -> dict[str, dict[str, float]]:
        """Compute the metrics of the baselines; for ratings, the plain means give the order."""
        config, rates = self.config, _yes(self.config) is not None
        damping = baselines.ITEM_DAMPING if config.own_columns else 0.0
        found = {
            ITEM_MEAN: baselines.item_means(means, self.batches, config.item, damping),
            BIASES: baselines.biases(means, self.batches, config.item, _yes(config)),
        }
        return {name: self.measure(as_logits(each) if rates else each) for name, each in found.items()}


def _yes(config: ExperimentConfig) -> float | None:
    """Return the label from which on a row counts as 1, or None if the experiment doesn't predict a rate."""
    return config.positive if config.own_columns and config.loss != "mse" else None


def evaluate(run: RunFolder, on_bad: OnBad = "raise") -> Evaluation:
    """Measure every method of a trained experiment on its test splits, beside the baselines.

    In a job of several ranks, all ranks call it together, and each gets the whole evaluation.

    Raises:
      DataError: The run isn't trained to the end; the message names the method and the seed.
    """
    started = time.monotonic()
    config, data = run.load()
    manifest = Manifest.load(data)
    with io.data_errors():
        splits = {name: _Split.read(config, data, name, on_bad) for name in config.test_splits}
        warm = measured_tasks(config, data, config.train_split, on_bad, shard=_EVERYTHING)
        means = ItemMeans.of(warm, config.item, _yes(config))
    first = splits[config.test_splits[0]]
    results: dict[str, dict[str, Results]] = {name: {} for name in splits}
    curves: dict[str, dict[int, list[float]]] = {}
    training: dict[str, list[TrainingRun]] = {}
    for method in config.methods:
        training[method] = []
        curves[method] = {size: [] for size in config.support_sizes}
        for seed in config.seeds:
            model, course = load_trained(config, run, method, seed)
            training[method].append(course)
            for name, split in splits.items():
                after = cold_start.predict_after(model, split.batches, config.evaluation_steps)
                _add(results[name].setdefault(method, {}), {n: split.measure(p) for n, p in after.items()})
            for size, values in curves[method].items():
                steps = config.support_steps
                limited = cold_start.predict_after(model, first.batches, [steps], support_size=size)
                values.append(first.measure(limited[steps])["mae"])
    for name, split in splits.items():
        for baseline, found in split.baselines(means).items():
            _add(results[name].setdefault(baseline, {}), {0: found})
    for size in config.support_sizes:
        curves.setdefault(ITEM_MEAN, {})[size] = results[config.test_splits[0]][ITEM_MEAN][0]["mae"]
    about = {name: (settings.label, settings.description) for name, settings in config.methods.items()}
    about |= _about_baselines(config)
    primary, *others = config.test_splits
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
        methods={name: MethodResult(*about[name], found) for name, found in results[primary].items()},
        splits={name: SplitResult(count_tasks(config, data, name)[0], results[name]) for name in others},
        support_curve=curves if config.support_sizes else {},
        support_steps=config.support_steps if config.support_sizes else None,
        training=training,
        notes=[
            *_notes(config, data),
            *(f"{count} input records left out: {reason}" for reason, count in manifest.dropped.items()),
        ],
        seconds={"evaluate": time.monotonic() - started},
    )


def _about_baselines(config: ExperimentConfig) -> dict[str, tuple[str, str]]:
    rows, kind = f"the {config.train_split} tasks", "rating" if not config.own_columns else config.label
    if config.item is None:
        first = "mean", f"The mean {kind} of {rows}: no column is named as the item."
        second = "task bias", "That mean, and how far a task's own support rows lie off it, damped."
        return {ITEM_MEAN: first, BIASES: second}
    return {
        ITEM_MEAN: (
            "item mean",
            f"The mean {kind} of the item ({config.item}) among {rows}; knows nothing of the user.",
        ),
        BIASES: (
            "user and item biases",
            "The mean, how far the item lies off it, and how far the user's own support rows do, damped.",
        ),
    }


def _notes(config: ExperimentConfig, data: Path) -> list[str]:
    """Return the notes that a reader needs to judge the table."""
    notes = []
    for split in (config.train_split, *config.test_splits):
        _, small = count_tasks(config, data, split)
        if small:
            notes.append(f"{small:,} {split} tasks are too small for a support and a query set: passed over")
    if all(method.inner.steps for method in config.methods.values()):
        notes.append("No method was trained without an inner loop: what meta-learning adds can't be told.")
    return notes


def _add(results: Results, measured: Mapping[int, Mapping[str, float]]) -> None:
    """Append the values that one more seed reached."""
    for steps, metrics in measured.items():
        for metric, value in metrics.items():
            results.setdefault(steps, {}).setdefault(metric, []).append(value)

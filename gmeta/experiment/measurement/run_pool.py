"""The evaluation of a trained experiment, or of several that are measured as one: folds over tasks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError
from gmeta.core.schema import OnBad
from gmeta.core.settings import to_mapping
from gmeta.experiment.baselines import ATTRIBUTES, BIASES, FACTORS, ITEM_MEAN, KRIGING, NEIGHBOURS
from gmeta.experiment.baselines.tuning import Tuned
from gmeta.experiment.measurement.methods import measure
from gmeta.experiment.measurement.split import Split
from gmeta.experiment.plan.experiment_config import (
    HELD_OUT,
    ExperimentConfig,
    budget_seconds,
    describe_negatives,
)
from gmeta.experiment.plan.task_sets import count_measured, count_trained, count_unmeasured, training_queries
from gmeta.experiment.results.evaluation import DataDescription, Evaluation, MethodResult, SplitResult
from gmeta.experiment.results.metrics import Bootstrap
from gmeta.experiment.runs.run_folder import RunFolder

# The names of the baselines in tables and notes, and a sentence on each.

_LABELS = {
    ITEM_MEAN: "item mean",
    BIASES: "user and item biases",
    NEIGHBOURS: "nearest neighbours",
    KRIGING: "kriging",
    FACTORS: "ridge on factors",
    ATTRIBUTES: "ridge on attributes",
}
_WHAT = {
    BIASES: "The mean, how far the item lies off it, and how far the user's own support rows do",
    NEIGHBOURS: (
        "Those biases, and the support rows whose items go best with the item asked for, weighted by the "
        "covariance of their labels"
    ),
    KRIGING: "A Gaussian process over items with their covariance, conditioned on the user's support rows",
    FACTORS: "Items' factors by alternating least squares, and a ridge regression of the user's support rows",
    ATTRIBUTES: (
        "A ridge regression on items' attributes, which new items have too, and a Gaussian process over "
        "them, conditioned on the user's support rows"
    ),
}


def describe(tuned: Sequence[Tuned], config: ExperimentConfig) -> dict[str, tuple[str, str]]:
    """Return each baseline's label, and a sentence that describes it with each run's chosen settings."""
    chosen = [each.describe() for each in tuned]
    return {
        name: _describe(name, "; or ".join(dict.fromkeys(each[name] for each in chosen)), config)
        for name in chosen[0]
    }


def _describe(name: str, chosen: str, config: ExperimentConfig) -> tuple[str, str]:
    kind = config.label if config.own_columns else "rating"
    rows = f"the {config.train_split} tasks"
    if config.item is None:
        if name == ITEM_MEAN:
            return "mean", f"The mean {kind} of {rows}: no column is named as the item."
        return "task bias", f"That mean, and how far a task's own support rows lie off it ({chosen})."
    if name == ITEM_MEAN:
        what = f"The mean {kind} of the item ({config.item}) among {rows}; knows nothing of the user"
        return _LABELS[ITEM_MEAN], f"{what} ({chosen})."
    return _LABELS[name], f"{_WHAT[name]} ({chosen})."


NO_ITEM = (
    "No column is named as the item: the baselines by neighbours, kriging, factors and attributes, which "
    "need one, are left out."
)


# Notes for the reader of an evaluation: which tasks count, and what the table doesn't show.


def notes_on_tasks(runs: Sequence[RunFolder], loaded: Sequence[tuple[ExperimentConfig, Path]]) -> list[str]:
    """Return notes on how many tasks each run trains on, measures and skips."""
    if len(runs) == 1:
        return _passed_over(*loaded[0])
    notes = [f"{len(runs)} runs are measured as one: each predicts the tasks that it held out."]
    for run, (config, data) in zip(runs, loaded, strict=True):
        counts = (
            f"trained on {count_trained(config, data)[0]:,}, {count_measured(config, data, HELD_OUT)[0]:,}"
        )
        notes.append(f"{run.path.name}: {counts} tasks of part {config.held_out_part} measured")
        notes += [f"{run.path.name}: {note}" for note in _passed_over(config, data)]
    return notes


def _passed_over(config: ExperimentConfig, data: Path) -> list[str]:
    """Return notes on the tasks that are too small or too large to be trained on or measured."""
    notes = []
    too_small = "are too small for a support and a query set: passed over"
    for query, methods in training_queries(config).items():
        _, small = count_trained(config, data, query)
        if small:
            names = ", ".join(config.methods[name].label for name in methods)
            notes.append(f"{small:,} {config.train_split} tasks {too_small} in training ({names})")
    for split in config.test_splits:
        _, small = count_measured(config, data, split)
        if small:
            notes.append(f"{small:,} {split} tasks {too_small}")
        beyond = count_unmeasured(config, data, split)
        if beyond and config.measured_rows:
            fewest, most = config.measured_rows
            bounds = f"fewer than {fewest:,}" + (f" or more than {most:,}" if most else "")
            use = "trained on, not measured" if split == HELD_OUT else "not measured"
            notes.append(f"{beyond:,} {split} tasks have {bounds} rows: {use}")
    return notes


def notes_on_methods(config: ExperimentConfig) -> list[str]:
    """Return the notes that a reader needs to judge the table."""
    notes = []
    if all(method.inner.steps for method in config.methods.values()):
        notes.append("No method was trained without an inner loop, so the gain of meta-learning is unknown.")
    if config.item is None:
        notes.append(NO_ITEM)
    if config.negatives is not None:
        notes.append(describe_negatives(config.negatives))
    if config.train_split in config.test_splits:
        notes.append(
            f"Methods were trained on the {config.train_split} tasks whose table is shown; baselines predict "
            "each of these tasks from the rows of others, so that their differences are not compared."
        )
    return notes


_OF_TRAINING_ROWS = ("held_out_part", "labels", "label_scale")
"""Settings in which folds differ: which tasks are held out, and what is read off the rows of the others.

Those of methods differ as well, where each fold has chosen them on its own training tasks."""


def evaluate(run: RunFolder, *others: RunFolder, on_bad: OnBad = "raise") -> Evaluation:
    """Measure every method of a trained experiment, and the baselines, on its test splits.

    Several runs are measured as one experiment: each predicts the tasks that it held out, with methods and
    baselines trained on its other tasks. Metrics, bootstrap, support curve and calibration cover all these
    tasks together.

    In a job of several ranks, all ranks call it together, and each gets the whole evaluation.

    Args:
      run: The run.
      others: Runs on the same data with the same settings that hold out other parts.
      on_bad: What a bad record does: ``"raise"`` or ``"skip"``.

    Raises:
      ConfigError: Runs can't be measured as one; the message names two of them and what differs.
      DataError: A run isn't fully trained; the message names the method and the seed.
    """
    started = time.monotonic()
    runs = (run, *others)
    loaded = [each.load() for each in runs]
    (config, data), *_ = loaded
    _refuse_unlike(runs, loaded)
    measured = [measure(each, on_bad) for each in runs]
    splits = {name: Split.join([each.splits[name] for each in measured]) for name in config.test_splits}
    primary, *further = config.test_splits
    results = {name: split.results() for name, split in splits.items()}
    about = {name: (method.label, method.description) for name, method in config.methods.items()}
    about |= describe([each.tuned for each in measured], config)

    def compare(split: str) -> Bootstrap | None:  # on tasks that only methods saw, nothing is a win
        return None if split == config.train_split else splits[split].bootstrap(measured[0].baselines)

    def count(split: str) -> int:
        return sum(count_measured(each, data, split)[0] for each, _ in loaded)

    manifest = Manifest.load(data)
    return Evaluation(
        title="Cold-start evaluation",
        data=DataDescription(
            name=str(manifest.config.get("source", data.name)),
            warm_tasks=min(count_trained(each, data)[0] for each, _ in loaded),
            cold_tasks=count(primary),
            rows=sum(split.rows for split in manifest.splits.values()),
            split=primary,
        ),
        config={
            "experiment": _together([to_mapping(each) for each, _ in loaded]),
            "data": dict(manifest.config),
        },
        seeds=config.seeds,
        methods={name: MethodResult(*about[name], found) for name, found in results[primary].items()},
        splits={name: SplitResult(count(name), results[name], compare(name)) for name in further},
        bootstrap=compare(primary),
        support_curve=splits[primary].support_curve(),
        support_steps=config.support_steps if config.support_sizes else None,
        calibration=splits[primary].calibration(),
        training={
            name: [course for each in measured for course in each.training[name]] for name in config.methods
        },
        notes=[
            *notes_on_tasks(runs, loaded),
            *notes_on_methods(config),
            *(f"{dropped} input records left out: {reason}" for reason, dropped in manifest.dropped.items()),
        ],
        seconds={
            "evaluate": time.monotonic() - started,
            "of which baselines": sum(each.baseline_seconds for each in measured),
        },
    )


def _refuse_unlike(runs: Sequence[RunFolder], loaded: Sequence[tuple[ExperimentConfig, Path]]) -> None:
    """Require that several runs hold out different parts of the same data, with the same settings.

    Raises:
      ConfigError: The message names the first two incompatible runs.
    """
    if len(runs) == 1:
        return
    for run, (config, _) in zip(runs, loaded, strict=True):
        if config.test_splits != (HELD_OUT,):
            raise ConfigError(
                f"{run.path} measures {', '.join(config.test_splits)}: several runs are measured as one only "
                f'on the tasks that each holds out, test_splits = ["{HELD_OUT}"]; measure this one alone'
            )
    first, (config, data) = runs[0], loaded[0]
    for run, (other, its_data) in zip(runs[1:], loaded[1:], strict=True):
        if Manifest.load(its_data).digest != Manifest.load(data).digest:
            raise ConfigError(
                f"{first.path} and {run.path} were trained on different data, {data} and {its_data}: "
                "measure each alone"
            )
        ours, theirs = _settings(config), _settings(other)
        differing = [name for name in ours if ours[name] != theirs[name]]
        if differing:
            raise ConfigError(
                f"{first.path} and {run.path} have other settings of {', '.join(differing)}: train them with "
                "the same, or measure each alone"
            )
    for (run, (one, _)), (other_run, (other, _)) in combinations(zip(runs, loaded, strict=True), 2):
        if one.held_out_part == other.held_out_part:
            raise ConfigError(
                f"{run.path} and {other_run.path} hold out the same part, {one.held_out_part}: its tasks "
                "would count twice; leave out one of them"
            )


def _settings(config: ExperimentConfig) -> dict[str, Any]:
    """Return the settings that folds share."""
    found = to_mapping(config)
    chosen = {"methods": sorted(config.methods)} if budget_seconds(config.budget) else {}
    return {
        **{name: value for name, value in found.items() if name not in _OF_TRAINING_ROWS},
        "numbers": sorted(config.numbers),
        **chosen,
    }


def _together(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of all runs: one value where all are equal, else a list with each run's value."""
    found: dict[str, Any] = {}
    for name, value in settings[0].items():
        values = [each[name] for each in settings]
        found[name] = value if all(each == value for each in values) else values
    return found

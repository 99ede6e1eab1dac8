"""Notes for the reader of an evaluation: which tasks count, and what the table doesn't tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gmeta.experiment.measurement.baseline_words import NO_ITEM
from gmeta.experiment.plan.experiment_config import HELD_OUT, ExperimentConfig
from gmeta.experiment.plan.task_sets import count_measured, count_trained, count_unmeasured, training_queries
from gmeta.experiment.runs.run_folder import RunFolder


def notes_on_tasks(runs: Sequence[RunFolder], loaded: Sequence[tuple[ExperimentConfig, Path]]) -> list[str]:
    """Return notes on how many tasks each run trains on and measures, and how many it passes over."""
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
    """Return notes on the tasks that are not trained on or not measured for their size."""
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
        notes.append("No method was trained without an inner loop: what meta-learning adds can't be told.")
    if config.item is None:
        notes.append(NO_ITEM)
    if config.train_split in config.test_splits:
        notes.append(
            f"Methods were trained on the {config.train_split} tasks whose table is shown; baselines predict "
            "each of these tasks from the rows of others, so that their differences are not compared."
        )
    return notes

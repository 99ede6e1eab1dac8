"""Every method of a trained experiment on every split that it names, beside the item mean."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmeta import io
from gmeta.core.config import to_mapping
from gmeta.core.manifest import Manifest
from gmeta.core.on_bad import OnBad
from gmeta.training import cold_start
from gmeta.training.cold_start import Floats, QueryRows
from gmeta.training.evaluation import DataDescription, Evaluation, MethodResult, SplitResult, TrainingRun
from gmeta.training.experiment import trained
from gmeta.training.experiment_config import ExperimentConfig
from gmeta.training.experiment_data import measured_tasks
from gmeta.training.metrics import OF_RATINGS
from gmeta.training.run_folder import RunFolder

ITEM_MEAN = "item_mean"
"""The baseline that every evaluation has beside the methods that are trained."""

Results = dict[int, dict[str, list[float]]]
"""Inner steps -> metric -> one value a seed."""

_EVERYTHING = (0, 1)  # ranks divide the predictions, not the tasks


@dataclass(frozen=True)
class _Split:
    """A split's batches and their query rows."""

    batches: Sequence[Mapping[str, Any]]
    rows: QueryRows
    ratings: bool

    @classmethod
    def read(cls, config: ExperimentConfig, data: Path, name: str, on_bad: OnBad) -> _Split:
        """All of a split, as every rank has it."""
        batches = list(measured_tasks(config, data, name, on_bad, shard=_EVERYTHING))
        return cls(batches, cold_start.query_rows(batches), config.loss == "mse")

    def measure(self, predictions: Floats) -> dict[str, float]:
        """The metrics that the predictions have; logits are no ratings."""
        found = self.rows.measure(predictions)
        return {name: value for name, value in found.items() if self.ratings or name not in OF_RATINGS}


def evaluate(run: RunFolder, on_bad: OnBad = "raise") -> Evaluation:
    """Measure every method of a trained experiment on its test splits, beside the item mean.

    On several ranks all call it together, and all get the whole of it.

    Raises:
      DataError: The run isn't trained to the end; it says which method and seed.
    """
    started = time.monotonic()
    config, data = run.load()
    manifest = Manifest.load(data)
    with io.data_errors():
        splits = {name: _Split.read(config, data, name, on_bad) for name in config.test_splits}
        warm = list(measured_tasks(config, data, config.train_split, on_bad, shard=_EVERYTHING))
    first = splits[config.test_splits[0]]
    results: dict[str, dict[str, Results]] = {name: {} for name in splits}
    curves: dict[str, dict[int, list[float]]] = {}
    training: dict[str, list[TrainingRun]] = {}
    for method in config.methods:
        training[method] = []
        curves[method] = {size: [] for size in config.support_sizes}
        for seed in config.seeds:
            model, course = trained(config, run, method, seed)
            training[method].append(course)
            for name, split in splits.items():
                after = cold_start.predict_after(model, split.batches, config.evaluation_steps)
                _add(results[name].setdefault(method, {}), {n: split.measure(p) for n, p in after.items()})
            for size, values in curves[method].items():
                steps = config.support_steps
                limited = cold_start.predict_after(model, first.batches, [steps], support_size=size)
                values.append(first.measure(limited[steps])["mae"])
    for name, split in splits.items():
        means = split.measure(cold_start.item_means(warm, split.rows))
        _add(results[name].setdefault(ITEM_MEAN, {}), {0: means})
    for size in config.support_sizes:
        curves.setdefault(ITEM_MEAN, {})[size] = results[config.test_splits[0]][ITEM_MEAN][0]["mae"]
    about = {name: (settings.label, settings.description) for name, settings in config.methods.items()}
    about[ITEM_MEAN] = (
        "item mean",
        f"The mean rating of the item among the {config.train_split} users; knows nothing of the user.",
    )
    primary, *others = config.test_splits
    return Evaluation(
        title="Cold-start evaluation",
        data=DataDescription(
            name=str(manifest.config.get("source", data.name)),
            warm_tasks=manifest.splits[config.train_split].groups,
            cold_tasks=manifest.splits[primary].groups,
            rows=sum(split.rows for split in manifest.splits.values()),
            split=primary,
        ),
        config={"experiment": to_mapping(config), "data": dict(manifest.config)},
        seeds=config.seeds,
        methods={name: MethodResult(*about[name], found) for name, found in results[primary].items()},
        splits={name: SplitResult(manifest.splits[name].groups, results[name]) for name in others},
        support_curve=curves if config.support_sizes else {},
        support_steps=config.support_steps if config.support_sizes else None,
        training=training,
        notes=[f"{count} input records left out: {reason}" for reason, count in manifest.dropped.items()],
        seconds={"evaluate": time.monotonic() - started},
    )


def _add(results: Results, measured: Mapping[int, Mapping[str, float]]) -> None:
    """Add what one more seed has reached."""
    for steps, metrics in measured.items():
        for metric, value in metrics.items():
            results.setdefault(steps, {}).setdefault(metric, []).append(value)

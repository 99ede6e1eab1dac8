"""What `gmeta tune` needs from each family of experiments: the planning of settings, and a trial.

A trial trains on training data and measures on validation data, as the choice in `gmeta train` does: for cold
start, a third of the training tasks that stand for new ones (`gmeta.experiment.search.trials`); for the next
item and for ranking, the validation part that chooses epochs. Test data aren't used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError
from gmeta.core.schema import OnBad
from gmeta.core.settings import to_mapping
from gmeta.core.terminal import Interrupts
from gmeta.experiment.next_item.models import measure_epochs
from gmeta.experiment.next_item.runs import plan_catalogue, read_cuts
from gmeta.experiment.plan.experiment_config import FACTORS, ExperimentConfig, MethodConfig
from gmeta.experiment.plan.generative_config import GenerativeMethod
from gmeta.experiment.plan.next_item_config import (
    CatalogueConfig,
    NextItemMethod,
    RetrievalConfig,
    TwoTowerMethod,
)
from gmeta.experiment.plan.own_plan import plan_experiment
from gmeta.experiment.plan.ranking_config import GRM, RankingConfig, RankingMethod
from gmeta.experiment.ranking import models as ranking_models
from gmeta.experiment.ranking.examples import Parts
from gmeta.experiment.ranking.plan import plan_ranking
from gmeta.experiment.ranking.runs import trial_seconds
from gmeta.experiment.runs.trainer import EndWhenInterrupted
from gmeta.experiment.search.study import Choice, Measured, Range, Report, Search, Space, Tunable, get_setting
from gmeta.experiment.search.trials import Trials, with_estimates
from gmeta.io.reader_stats import data_errors
from gmeta.models.zoo.factor_model import FactorSettings

# The space of each kind of method, which contains the settings that a search starts with.


def cold_start_space(starts: Sequence[MethodConfig]) -> Space:
    """Return the settings of a cold-start method that are searched over.

    Args:
      starts: The settings of the first trials.
    """
    first = starts[0]
    rates = ["learning_rate", *(["row_learning_rate"] if first.row_learning_rate is not None else [])]
    if first.model == FACTORS:
        priors = ("own_bias", "own_factors", "bias", "factors", "user")
        return [
            *(_around(starts, rate, 8.0) for rate in rates),
            _around(starts, "epochs", 2.5, whole=True),
            _within(starts, "factors.dim", 2, 64, whole=True),
            _within(starts, "factors.dropout", 0.0, 0.8, log=False),
            *(_around(starts, f"factors.{prior}", 30.0) for prior in priors),
        ]
    space = [*(_around(starts, rate, 20.0) for rate in rates), _around(starts, "epochs", 2.0, whole=True)]
    if first.inner.algorithm != "ridge":
        space.append(_around(starts, "inner.learning_rate", 30.0))
        if first.inner.steps > 0:
            space.append(_within(starts, "inner.steps", 1, 5, log=False, whole=True))
    return space


def next_item_space(starts: Sequence[NextItemMethod] | Sequence[GenerativeMethod]) -> Space:
    """Return the settings of a model of the next item that are searched over; validation ends its epochs."""
    first = starts[0]
    widths = {width for width in (32, 64, 128, 256) if width % first.heads == 0}
    of_cosines = isinstance(first, NextItemMethod) and first.normalize
    return [
        _around(starts, "learning_rate", 10.0),
        _within(starts, "dropout", 0.0, 0.7, log=False),
        *([_within(starts, "temperature", 0.02, 1.0)] if of_cosines else []),
        _within(starts, "blocks", 1, 3, log=False, whole=True),
        Choice("dim", tuple(sorted(widths | {each.dim for each in starts}))),
    ]


def generative_space(starts: Sequence[GenerativeMethod]) -> Space:
    """Return the settings of a generative model that are searched over, apart from its semantic ids."""
    first = starts[0]
    decoder = first.form == "decoder"
    heads = first.decoder_heads or 1
    widths = {width for width in (32, 64, 128, 256) if width % heads == 0}
    return [
        *next_item_space(starts),
        *([_within(starts, "sampled", 0.1, 3.0)] if decoder and first.sampled else []),
        *(
            [Choice("width", tuple(sorted(widths | {each.width or 64 for each in starts})))]
            if decoder
            else []
        ),
    ]


def retrieval_space(starts: Sequence[TwoTowerMethod]) -> Space:
    """Return the settings of a two-tower model that are searched over; validation ends its epochs."""
    first = starts[0]
    return [
        _around(starts, "learning_rate", 10.0),
        _within(starts, "dropout", 0.0, 0.7, log=False),
        *([_within(starts, "item_dropout", 0.0, 0.8, log=False)] if first.history else []),
        *([_within(starts, "temperature", 0.02, 1.0)] if first.normalize else []),
        Choice("dim", tuple(sorted({32, 64, 128, 256} | {each.dim for each in starts}))),
        Choice("law", ("uniform", "popularity", "in-batch")),
    ]


def ranking_space(starts: Sequence[RankingMethod]) -> Space:
    """Return the settings of a model of rows that are searched over; validation ends its epochs."""
    first = starts[0]
    return [
        _around(starts, "learning_rate", 10.0),
        _around(starts, "variance", 30.0),
        _around(starts, "bias_variance", 10.0),
        _within(starts, "dim", 2, 64, whole=True),
        _within(starts, "unknown", 0.0, 0.3, log=False),
        *([] if first.model == "fm" else [_within(starts, "dropout", 0.0, 0.6, log=False)]),
        *([_within(starts, "cross", 1, 4, log=False, whole=True)] if first.model == "dcn" else []),
        *(_of_sequences(starts) if first.model == GRM else []),
    ]


def _of_sequences(starts: Sequence[RankingMethod]) -> Space:
    widths = {width for width in (16, 32, 64, 128) if width % starts[0].heads == 0}
    return [
        _within(starts, "blocks", 1, 3, log=False, whole=True),
        _within(starts, "longest", 20, 500, whole=True),
        Choice("width", tuple(sorted(widths | {each.width for each in starts}))),
    ]


def _around(starts: Sequence[Any], key: str, by: float, whole: bool = False) -> Range:
    """Return the range from a ``by``-th of the starts' values to ``by`` times them."""
    values = [get_setting(each, key) for each in starts]
    least, most = min(values) / by, max(values) * by
    return Range(key, max(round(least), 1) if whole else least, round(most) if whole else most, whole=whole)


def _within(
    starts: Sequence[Any], key: str, least: float, most: float, log: bool = True, whole: bool = False
) -> Range:
    values = [get_setting(each, key) for each in starts]
    return Range(key, min(least, *values), max(most, *values), log, whole)


@dataclass(frozen=True)
class Family:
    """How methods of a family are tuned.

    Attributes:
      plan: (settings, data set, name of the settings, on_bad) -> the experiment, as ``config``, and sentences
        that describe it, ``notes``.
      search: (experiment, data set, on_bad) -> its methods as a `Search`.
    """

    plan: Callable[[Mapping[str, Any], Path, str, OnBad], Any]
    search: Callable[[Any, Path, OnBad], Search]


def _begun(config: Any, data: Path) -> dict[str, Any]:
    """Return the inputs that trials of all methods share; a study adds its method's settings."""
    settings = {key: value for key, value in to_mapping(config).items() if key not in ("methods", "budget")}
    return {"data": Manifest.load(data).digest, "experiment": settings}


# Cold start.

_PARTS = 4


def _plan_cold_start(given: Mapping[str, Any], data: Path, where: str, on_bad: OnBad) -> Any:
    return plan_experiment({key: value for key, value in given.items() if key != "budget"}, data, where)


def _search_cold_start(config: ExperimentConfig, data: Path, on_bad: OnBad) -> Search:
    with data_errors():
        trials = Trials.of(config, data, on_bad)
        if trials is None:
            raise ConfigError(f"{data}: there are too few training tasks to choose settings by")
        estimated = with_estimates(config, data, on_bad)
    tunables = []
    for name, method in config.methods.items():
        # Estimated priors replace only settings that neither the user nor `gmeta train` chose.
        starts = [method, *(estimated[name] if method.factors == FactorSettings() else [])]
        start, of_epoch = trials.seconds(method)
        tunables.append(
            Tunable(
                name,
                method.label,
                starts,
                cold_start_space(starts),
                partial(_measure_tasks, trials, name),
                start + of_epoch * method.epochs,
            )
        )
    measure = "squared error" if config.loss == "mse" else "log loss"
    return Search(tunables, measure, maximize=False, begun=_begun(config, data))


def _measure_tasks(
    trials: Trials, name: str, method: MethodConfig, report: Report, interrupts: Interrupts
) -> Measured:
    """Train a method, and measure it after each quarter of its epochs; its value is the best of these.

    With a rate that falls to 0, the value is that at the end.
    """
    parts = sorted({max(round(method.epochs * part / _PARTS), 1) for part in range(1, _PARTS + 1)})
    found: list[float] = []
    with data_errors():
        losses = trials.losses(name, method, parts, [EndWhenInterrupted(interrupts)])
        for epochs, loss in zip(parts, losses, strict=True):
            found.append(loss)
            if epochs < method.epochs:
                report(round(100 * epochs / method.epochs), loss)
    best = len(parts) - 1 if method.schedule == "one_cycle" else int(np.argmin(found))
    return Measured(found[best], replace(method, epochs=parts[best]), found[-1])


# The next item, and retrieval.

_USUAL_EPOCHS = 30  # until validation ends training
_START, _OF_TOKEN = 8.0, 1.5e-4  # seconds on two cores: to make a model; of a token and a block at 64 numbers
_SPACES: Mapping[type, Callable[[Any], Space]] = {
    NextItemMethod: next_item_space,
    GenerativeMethod: generative_space,
    TwoTowerMethod: retrieval_space,
}


def _search_catalogue(config: CatalogueConfig, data: Path, on_bad: OnBad) -> Search:
    cuts = read_cuts(config, data, on_bad)
    tokens = len(cuts.train.items)

    def evaluate(name: str, method: Any, report: Report, interrupts: Interrupts) -> Measured:
        tried = replace(config, methods={name: method})
        stop = EndWhenInterrupted(interrupts)
        value = measure_epochs(tried, name, config.seeds[0], cuts=cuts, report=report, callbacks=[stop])
        return Measured(value, method, value)

    tunables = []
    for name, method in config.methods.items():
        of_sequences = isinstance(method, NextItemMethod | GenerativeMethod)
        blocks = method.blocks if of_sequences else 1
        space = next(own for kind, own in _SPACES.items() if isinstance(method, kind))
        epochs = min(method.epochs, _USUAL_EPOCHS)
        tunables.append(
            Tunable(
                name,
                method.label,
                [method],
                space([method]),
                partial(evaluate, name),
                _START + epochs * tokens * blocks * method.dim / 64 * _OF_TOKEN,
                warm_up=min(method.patience, 5),
            )
        )
    return Search(tunables, f"NDCG@{config.ks[0]}", maximize=True, begun=_begun(config, data))


# Ranking.


def _plan_ranking(given: Mapping[str, Any], data: Path, where: str, on_bad: OnBad) -> Any:
    return plan_ranking({key: value for key, value in given.items() if key != "budget"}, data, where, on_bad)


def _search_ranking(config: RankingConfig, data: Path, on_bad: OnBad) -> Search:
    parts = Parts.read(config, data, on_bad)

    def evaluate(method: RankingMethod, report: Report, interrupts: Interrupts) -> Measured:
        stop = EndWhenInterrupted(interrupts)
        value = ranking_models.measure_epochs(
            method, config.seeds[0], parts=parts, report=report, callbacks=[stop]
        )
        return Measured(value, method, value)

    tunables = [
        Tunable(
            name,
            method.label,
            [method],
            ranking_space([method]),
            evaluate,
            trial_seconds(method, parts),
            warm_up=min(method.patience, 5),
        )
        for name, method in config.methods.items()
    ]
    measure = "log loss" if config.binary else "squared error"
    return Search(tunables, measure, maximize=False, begun=_begun(config, data))


FAMILIES: Mapping[str, Family] = {
    "cold-start": Family(_plan_cold_start, _search_cold_start),
    "next-item": Family(plan_catalogue, _search_catalogue),
    "retrieval": Family(partial(plan_catalogue, kind=RetrievalConfig), _search_catalogue),
    "ranking": Family(_plan_ranking, _search_ranking),
}
"""What `gmeta tune --for` names -> how it is tuned."""

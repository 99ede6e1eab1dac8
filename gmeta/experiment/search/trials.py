"""Chooses methods' settings by trials on training tasks, within a time budget.

A third of the training tasks stand for new tasks (`gmeta.experiment.plan.task_sets.divide_training`), as in
the cross-validation that tunes baselines; no test task is used. A trial trains a method on the other training
tasks, and measures it on these. Trials follow a list of moves, such as a higher rate: each changes the best
settings so far, and is kept if it lowers the loss.

The variances of the factor model's priors need no trial: the labels suggest them (`estimate_priors`).

The duration of a trial is estimated from the size of the data, not measured. So the choice is a function of
the data, the settings, the budget and the number of ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from scipy.sparse import csr_matrix, diags, hstack

from gmeta import io
from gmeta.core import collectives
from gmeta.core.errors import NotFiniteError
from gmeta.core.schedules import OneCycle
from gmeta.core.schema import OnBad
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.experiment.baselines.attributes import Biases, ItemAttributes
from gmeta.experiment.baselines.task_rows import Floats, ItemNumbers, Tasks, cut_folds
from gmeta.experiment.baselines.tuning import one_thread
from gmeta.experiment.baselines.vectors import CoRatings, Factors, ItemVectors, Start
from gmeta.experiment.measurement.methods import AttributeReader, read_training
from gmeta.experiment.measurement.split import EVERYTHING, number_items, predict_after, query_rows, yes_from
from gmeta.experiment.plan.experiment_config import FACTORS, ExperimentConfig, MethodConfig, budget_seconds
from gmeta.experiment.plan.task_sets import divide_training, measured_tasks, training_tasks
from gmeta.experiment.runs.model_choice import build_model
from gmeta.io.cuts.task_choice import TaskChoice
from gmeta.io.reader_stats import data_errors
from gmeta.models.zoo.factor_model import FactorSettings
from gmeta.training.joint_optimizer import RateInFit

_TRUSTED_ROWS = 30.0
"""An item with so many rows weighs half of one with infinitely many."""
_LEAST_VARIANCE = 0.02
"""The least share of a variance that own rows, and rows of attributes, get."""


def estimate_priors(
    warm: Tasks, items: int, attributes: ItemAttributes | None, unit: float, settings: FactorSettings
) -> FactorSettings:
    r"""Estimate the prior variances of the factor model's items and attributes from the training labels.

    Ridge on factors (`gmeta.experiment.baselines.vectors`) has the same parts as the factor model: an item's
    bias and factors, with tasks' vectors of variance 1. So the variances of its biases and factors estimate
    the prior variances of the factor model's rows (empirical Bayes).

    The variance of an item's number is split by moments between the item's row and the rows of its
    attributes. For two items, the product of their numbers has the expectation :math:`w K_{ij}`, where w is
    the variance of an attribute's row and :math:`K_{ij}` the product of the items' attributes. w is the
    regression of these products on K over all pairs of two items; the rest of an item's variance is that of
    the item's row.

    Args:
      warm: The training tasks; those that stand for new tasks are cut like test tasks.
      items: The number of items.
      attributes: The attributes of all items; None: items have none.
      unit: The change of a label, or of a rate, where the model's output changes by 1.
      settings: The number of factors, and all other settings.

    Returns:
      The settings with these variances.
    """
    with one_thread():
        found = _fit_factors(warm, items, settings.dim)
        # The penalty makes factors too small, and the tasks' vectors too large by the same factor.
        scale = np.linalg.cholesky(found.moments(warm.whole())[1:, 1:])
    rows = np.bincount(warm.whole().items, minlength=items)[:items]
    weights = rows / (rows + _TRUSTED_ROWS)
    known = None if attributes is None else csr_matrix(hstack(list(attributes.columns.values())))[:items]
    own_bias, bias = _divide_variance(found.bias[:items, None] / unit, known, weights)
    vectors = found.vectors[found.slots[:items], 1:] @ scale
    own_factors, factors = _divide_variance(vectors / unit, known, weights)
    return replace(settings, own_bias=own_bias, own_factors=own_factors, bias=bias, factors=factors)


def _fit_factors(warm: Tasks, items: int, rank: int) -> ItemVectors:
    """Fit ridge on factors with settings that cross-validation chooses, and ``rank`` factors."""
    folds = cut_folds(warm)
    biases = Biases.tune(folds, items)
    turns = []
    for fold in folds:
        fitted = biases.fit(fold.warm, items)
        turns.append((fold, fitted, Start.of(CoRatings.of(fold.warm, fitted), rank)))
    factors = replace(Factors.tune(turns, biases), rank=rank)
    rows = warm.whole()
    fitted = biases.fit(rows, items)
    return factors.fit(rows, biases, fitted, Start.of(CoRatings.of(rows, fitted), rank))


def _divide_variance(numbers: Floats, known: csr_matrix | None, weights: Floats) -> tuple[float, float]:
    """Split the variance of items' numbers, (items, columns), between items' and attributes' rows.

    Args:
      numbers: The numbers of the items.
      known: (items, values) the items' attributes.
      weights: (items,).
    """
    lengths = np.square(numbers).mean(axis=1)
    whole = max(float(np.average(lengths, weights=weights)), 1e-6)
    if known is None:
        return whole, whole * _LEAST_VARIANCE
    own = np.asarray(known.multiply(known).sum(axis=1)).ravel()  # K_ii
    sums = known.T @ (weights[:, None] * numbers)
    products = np.square(sums).sum() / numbers.shape[1] - (weights**2 * lengths * own).sum()
    gram = known.T @ diags(weights) @ known
    squares = gram.multiply(gram).sum() - np.square(weights * own).sum()
    share = float(np.clip(products / squares if squares > 0 else 0.0, whole * _LEAST_VARIANCE, whole))
    explained = share * float(np.average(own, weights=weights))
    return max(whole - explained, whole * _LEAST_VARIANCE), share


LEAST_GAIN = 1e-3
"""The least share of the loss by which a move must lower it: validation tasks are few, and gains noisy."""
SHORTEST = 1 / 4
"""The least share of a method's epochs that a trial has; if not two such trials fit, nothing is tried."""

# The moves of each kind of method.

Move = Callable[[MethodConfig], MethodConfig]


def _rate(by: float) -> Move:
    return lambda method: replace(method, learning_rate=method.learning_rate * by)


def _inner_rate(by: float) -> Move:
    def move(method: MethodConfig) -> MethodConfig:
        return replace(method, inner=replace(method.inner, learning_rate=method.inner.learning_rate * by))

    return move


def _epochs(by: float) -> Move:
    return lambda method: replace(method, epochs=max(round(method.epochs * by), 1))


def _priors(**by: float) -> Move:
    def move(method: MethodConfig) -> MethodConfig:
        held = method.factors
        return replace(
            method, factors=replace(held, **{name: getattr(held, name) * each for name, each in by.items()})
        )

    return move


OF_FACTORS: Sequence[Move] = (
    _rate(2.0),
    _priors(user=10.0),
    _epochs(0.5),
    _priors(own_factors=2.0, factors=2.0),
    _rate(0.5),
    _priors(factors=3.0, bias=3.0),
    _epochs(2.0),
    _priors(dim=2),
    _priors(dropout=0.5),
)
OF_STEPS: Sequence[Move] = (
    _inner_rate(0.3),
    _rate(0.5),
    _inner_rate(3.0),
    _rate(2.0),
    _epochs(2.0),
)
"""The moves of other methods: at a constant rate, a trial also measures them at parts of its epochs."""


# A trial and its duration.


@dataclass(frozen=True)
class Trials:
    """The tasks of all trials of an experiment.

    Attributes:
      config: The experiment.
      data: A prepared data set.
      trained: The tasks that trials train on.
      asked: The batches of tasks that trials measure.
      rows_per_step: The mean number of rows in a step of training.
      steps: The number of steps in an epoch.
      on_bad: What a bad record does.
    """

    config: ExperimentConfig
    data: Path
    trained: TaskChoice
    asked: Sequence[Any]
    rows_per_step: float
    steps: int
    on_bad: OnBad

    @classmethod
    def of(cls, config: ExperimentConfig, data: Path, on_bad: OnBad) -> Trials | None:
        """Read the tasks of trials; None if there are too few."""
        choices = divide_training(config, data)
        if choices is None:
            return None
        trained, asked = choices
        options = io.ReadOptions(seed=0, on_bad=on_bad, shard=(0, 1))
        every = training_tasks(config, data, 0, options, choice=trained)
        rows = [int(batch["label"].shape[0]) for batch in every]
        if config.labels is not None:
            config = replace(config, labels=replace(config.labels, count=max(sum(rows), 1)))
        batches = measured_tasks(config, data, config.train_split, on_bad, shard=EVERYTHING, choice=asked)
        steps = int(training_tasks(config, data, 0, io.ReadOptions(), choice=trained).cardinality())
        return cls(config, data, trained, list(batches), float(np.mean(rows)), steps, on_bad)

    @property
    def tasks(self) -> int:
        """The number of tasks that trials measure."""
        return sum(len(batch["task"]) for batch in self.asked)

    def seconds(self, method: MethodConfig) -> tuple[float, float]:
        """Estimate the duration of a trial on two cores: that without epochs, and that of one epoch."""
        start, step, row = _COSTS[method.inner.algorithm != "ridge" and method.inner.steps > 0]
        return start, self.steps * (step + row * self.rows_per_step)

    def loss(self, name: str, method: MethodConfig) -> tuple[float, MethodConfig]:
        """Train a method and measure it; return the loss, and the settings with the best number of epochs."""
        parts = [method.epochs]
        if method.schedule == "constant":
            parts = sorted({max(method.epochs // 4, 1), max(method.epochs // 2, 1), method.epochs})
        try:
            found = zip(self.losses(name, method, parts), parts, strict=True)
            loss, epochs = min(found, key=lambda each: each[0])
        except NotFiniteError:  # it diverges
            return math.inf, method
        return loss, replace(method, epochs=epochs)

    def losses(
        self,
        name: str,
        method: MethodConfig,
        parts: Sequence[int],
        callbacks: Sequence[tf.keras.callbacks.Callback] = (),
    ) -> Iterator[float]:
        """Train a method, and yield its loss after given numbers of epochs; the last one ends the cycle."""
        config, seed = replace(self.config, methods={name: method}), self.config.seeds[0]
        model = build_model(config, name, seed)
        options = io.ReadOptions(seed=seed, on_bad=self.on_bad)
        tasks = training_tasks(config, self.data, 0, options, method.query, choice=self.trained)
        if method.schedule == "one_cycle":
            callbacks = [*callbacks, _one_cycle(max(int(tasks.cardinality()) * parts[-1], 1))]
        done = 0
        for epochs in parts:
            # The dataset counts its epochs; Keras sees all of them as one, which is faster.
            model.fit(tasks.repeat(epochs - done), epochs=1, verbose=0, callbacks=[*callbacks])
            done = epochs
            after = predict_after(model, self.asked, config.evaluation_steps)
            yield min(self._loss(predictions) for predictions in after.values())

    def _loss(self, predictions: Floats) -> float:
        labels = query_rows(self.asked).labels
        if self.config.loss == "mse":
            losses = np.square(predictions - labels)
        else:
            yes = labels >= self.config.positive
            losses = np.logaddexp(0.0, np.where(yes, -predictions, predictions))
        found = float(losses.mean())
        return found if np.isfinite(found) else float("inf")


_COSTS = {True: (10.0, 5e-3, 15e-6), False: (3.0, 2e-3, 8e-6)}
"""Whether the inner loop takes gradient steps -> seconds to make a model, of a step, and of a row."""


# The search over all methods.


@dataclass(frozen=True)
class Chosen:
    """The result of the search for a method.

    Attributes:
      method: The settings.
      trials: The number of trials.
      before: The loss with the settings that the search began with.
      after: The loss with the chosen settings.
    """

    method: MethodConfig
    trials: int
    before: float
    after: float


def choose_settings(
    config: ExperimentConfig, data: Path, *, say: Callable[[str], None], on_bad: OnBad = "raise"
) -> ExperimentConfig:
    """Choose the settings of all methods within the experiment's budget.

    In a job of several ranks, all ranks call it together and get the same settings.

    Args:
      config: The experiment, with the settings that the search begins with.
      data: A prepared data set.
      say: Called with the sentences that describe the plan and the choices.
      on_bad: What a bad record does: ``"raise"`` or ``"skip"``.

    Returns:
      The experiment with the chosen settings.

    Raises:
      DataError: A record is bad.
    """
    budget = budget_seconds(config.budget)
    if not budget:
        return config
    with data_errors():
        trials = Trials.of(config, data, on_bad)
        if trials is None:
            say("settings: the usual ones, because there are too few training tasks to choose by")
            return config
        say(
            f"settings: chosen within a budget of {config.budget} by trials on training tasks, "
            f"of which {trials.tasks:,} stand for new ones (--budget 0 takes the usual settings)"
        )
        methods, left = dict(config.methods), budget
        estimated = with_estimates(config, data, on_bad)
        for place, (name, method) in enumerate(config.methods.items()):
            share = left * (0.6 if method.model == FACTORS else 1 / (len(methods) - place))
            first = estimated[name]
            moves = OF_FACTORS if method.model == FACTORS else OF_STEPS
            found, spent = _search(trials, name, [method, *first], moves, share)
            left -= spent
            say(_describe(config, method, found, share, trials))
            methods[name] = _of_first_rank(found.method)
    return replace(config, methods=methods)


def _search(
    trials: Trials, name: str, first: Sequence[MethodConfig], moves: Sequence[Move], share: float
) -> tuple[Chosen, float]:
    """Try the first settings, then the moves, within the share of the budget.

    Returns:
      The result, and the estimated seconds that it took.
    """
    usual = first[0]
    start, of_epoch = trials.seconds(usual)
    fit = int((share / max(len(first), 2) - start) / of_epoch)  # epochs of a trial
    shorter = fit < usual.epochs
    if shorter:
        # Short trials favour wide priors and high rates, which are worse in longer training. So they only
        # compare the first settings.
        moves = ()
        if len(first) < 2 or fit < max(usual.epochs * SHORTEST, 1):
            return Chosen(usual, 0, math.inf, math.inf), 0.0
    best, losses, spent = usual, [math.inf], 0.0
    tried: set[MethodConfig] = set()
    for move in (*(lambda _, each=each: each for each in first), *moves):
        method = move(best)
        if shorter:
            method = replace(method, epochs=fit)
        cost = start + of_epoch * method.epochs
        if method in tried or spent + cost > share:
            continue
        tried.add(method)
        loss, method = trials.loss(name, method)
        spent += cost
        if loss < min(losses) * (1 - LEAST_GAIN):
            best = method
        losses.append(loss)
    if shorter:
        best = replace(best, epochs=usual.epochs)
    return Chosen(best, len(losses) - 1, losses[1], min(losses)), spent


def with_estimates(config: ExperimentConfig, data: Path, on_bad: OnBad) -> dict[str, list[MethodConfig]]:
    """Return each method's further initial settings: estimated priors, and a higher rate.

    Training finds the most probable rows rather than averaging over the posterior, so factors may overfit
    under priors with their true variance. Half of it is tried first.
    """
    found: dict[str, list[MethodConfig]] = {name: [] for name in config.methods}
    factors = [name for name, method in config.methods.items() if method.model == FACTORS]
    if not factors or config.item is None:
        return found
    reader = AttributeReader.of(config)
    warm = read_training(config, data, reader, on_bad)
    numbers = ItemNumbers.of_tasks(warm, [])
    if config.loss == "mse":
        unit = 1.0 if config.label_scale is None else config.label_scale.deviation
    else:
        assert config.labels is not None
        if yes_from(config) is None:  # labels are ratings, and the model predicts whether they are high
            return found
        unit = config.labels.mean * (1 - config.labels.mean)
    for name in factors:
        method = config.methods[name]
        priors = estimate_priors(
            number_items(warm, numbers), numbers.unknown, reader.attributes(numbers), unit, method.factors
        )
        estimated = replace(method, factors=priors, learning_rate=2 * method.learning_rate)
        half = _priors(own_factors=0.5, factors=0.5)(estimated)
        found[name] = [_of_first_rank(half), _of_first_rank(estimated)]
    return found


def _of_first_rank(method: MethodConfig) -> MethodConfig:
    """Return the settings of rank 0, since other processors may differ in an estimate's last digits."""
    text = collectives.broadcast_object(json.dumps(to_mapping(method)))
    return from_mapping(MethodConfig, json.loads(text), where="rank 0")


def _describe(
    config: ExperimentConfig, before: MethodConfig, found: Chosen, share: float, trials: Trials
) -> str:
    if not found.trials:
        start, of_epoch = trials.seconds(before)
        least = 2 * (start + of_epoch * max(before.epochs * SHORTEST, 1))
        return (
            f"{before.label}: the usual settings, because two trials take longer than its share of the "
            f"budget, {share:.0f} s (an estimate: {least:.0f} s)"
        )
    loss = "squared error" if config.loss == "mse" else "log loss"
    changes = ", ".join(list_changes(to_mapping(before), to_mapping(found.method))) or "the usual settings"
    return f"{before.label}: {found.trials} trials, {loss} {found.before:.4f} to {found.after:.4f}: {changes}"


def list_changes(before: Any, now: Any, name: str = "") -> list[str]:
    """List the settings that differ, ``"factors.user = 0.1"``."""
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [list_changes(before[key], now[key], f"{name}.{key}" if name else key) for key in before]
        return [change for each in pairs for change in each]
    return [] if before == now else [f"{name} = {now:.3g}" if isinstance(now, float) else f"{name} = {now}"]


def _one_cycle(steps: int) -> tf.keras.callbacks.Callback:
    return RateInFit(lambda rate, _: OneCycle(rate, steps))

"""A run of an experiment on rows: training, the choice of settings, calibrations and the blend.

::

  RUN/config.json                settings (`gmeta.experiment.runs.run_folder`)
  RUN/dcn/seed-0/                checkpoints of the last epoch, its curves, and best/, the best epoch
  RUN/chosen.json                baselines' settings, calibrations and weights of the blends
  RUN/evaluation.json, RUN/report.html, RUN/figures/
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.schema import OnBad
from gmeta.experiment.baselines.task_rows import Floats
from gmeta.experiment.plan.experiment_config import budget_seconds
from gmeta.experiment.plan.next_item_config import BLEND
from gmeta.experiment.plan.ranking_config import GRM, RankingConfig, RankingMethod
from gmeta.experiment.ranking import models
from gmeta.experiment.ranking.baselines import LABELS, MEAN, Bilinear, Drift, Scorer, Tuned
from gmeta.experiment.ranking.examples import Encoding, Examples, Parts
from gmeta.experiment.ranking.models import ModelScorer
from gmeta.experiment.ranking.networks import SequenceModel
from gmeta.experiment.runs.all_runs import TrainingProgress
from gmeta.experiment.runs.best_epoch import CHOSEN, TrainedRun, read_chosen, save_chosen
from gmeta.experiment.runs.run_folder import RunFolder

# The blend: a regression on the scores of models and baselines, fitted to validation.

_FLAT = 1e-6  # the least deviation, relative to the mean or to 1, of an informative score
_PENALTY = 10.0  # in rows


@dataclass(frozen=True)
class Blend:
    r"""A weighted sum of scores, calibrated.

    .. math:: s = w_0 + \sum_m w_m \frac{f_m - \mu_m}{\sigma_m}, \quad
       w = \arg\min_w \sum_r \ell(y_r, s_r) + \frac{\lambda}{2} |w_{1 \dots} - \bar w|^2

    f are scores, and the sum is over the rows of validation: with the log loss, s are logits, and with half
    the squared error of labels in units of their deviation, labels. No test row is used. With one score this
    is a calibration: it changes the scale of scores, and the order of rows only if the scores are worse than
    none.

    Attributes:
      names: The scorers, by name.
      weights: (names,).
      intercept: :math:`w_0`.
      means: (names,) μ.
      deviations: (names,) σ.
    """

    names: Sequence[str]
    weights: Floats
    intercept: float
    means: Floats
    deviations: Floats

    @classmethod
    def fit(cls, scores: Mapping[str, Floats], labels: Floats, *, binary: bool) -> Blend:
        """Fit the weights.

        Args:
          scores: Name -> (rows,) the scores of validation.
          labels: (rows,).
          binary: Whether labels are 0 and 1, and scores logits.

        Example:
          >>> found = Blend.fit({"a": np.array([-1.0, 1.0, 3.0])}, np.array([1.0, 2.0, 3.0]), binary=False)
          >>> bool(found.weights[0] > 0)
          True
        """
        every = np.stack([*scores.values()], axis=1)
        means, deviations = every.mean(axis=0), every.std(axis=0)
        # A score that hardly varies in validation is uninformative there, but may vary elsewhere.
        flat = ~(deviations > _FLAT * np.maximum(np.abs(means), 1.0))
        deviations = np.where(flat, 1.0, deviations)
        x = np.where(flat, 0.0, (every - means) / deviations)
        unit = 1.0 if binary else max(float(labels.std()), 1e-9)
        centre = 0.0 if binary else float(labels.mean())
        targets = labels if binary else (labels - centre) / unit

        def loss(weights: Floats) -> tuple[float, Floats]:
            found = weights[0] + x @ weights[1:]
            if binary:
                value = float(np.logaddexp(0.0, np.where(targets > 0, -found, found)).sum())
                slope = 1 / (1 + np.exp(-found)) - targets
            else:
                slope = found - targets
                value = 0.5 * float(slope @ slope)
            away = np.where(flat, 0.0, weights[1:] - weights[1:][~flat].mean() if not flat.all() else 0.0)
            value += 0.5 * _PENALTY * float(away @ away)
            return value, np.concatenate([[slope.sum()], x.T @ slope + _PENALTY * away])

        best = optimize.minimize(loss, np.zeros(1 + x.shape[1]), jac=True, method="L-BFGS-B").x
        best[1:][flat] = 0.0
        return cls(tuple(scores), best[1:] * unit, centre + float(best[0]) * unit, means, deviations)

    def weigh(self, scores: Mapping[str, Floats]) -> Floats:
        """Weigh scores, name -> (rows,)."""
        found: Any = self.intercept
        for name, weight, mean, deviation in self.terms():
            found = found + weight * (scores[name] - mean) / deviation
        return np.asarray(found, np.float64)

    def of(self, scorers: Mapping[str, Scorer]) -> Blended:
        """Return the blend of these scorers."""
        return Blended(self, {name: scorers[name] for name in self.names})

    def terms(self) -> Iterator[tuple[str, float, float, float]]:
        """Yield each name with its weight, mean and deviation."""
        numbers = (each.tolist() for each in (self.weights, self.means, self.deviations))
        return zip(self.names, *numbers, strict=True)

    def describe(self) -> str:
        """Return the weights as part of a sentence, the greatest first."""
        order = np.argsort(-np.abs(self.weights))
        return ", ".join(f"{self.names[each]} {self.weights[each]:+.2f}" for each in order)

    def to_json(self) -> dict[str, Any]:
        """Return the blend as JSON values."""
        numbers = {name: getattr(self, name).tolist() for name in ("weights", "means", "deviations")}
        return {"names": [*self.names], "intercept": self.intercept, **numbers}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Blend:
        """Return the blend that `to_json` described."""
        weights, means, deviations = (
            np.asarray(values[name], np.float64) for name in ("weights", "means", "deviations")
        )
        return cls(tuple(values["names"]), weights, float(values["intercept"]), means, deviations)


@dataclass(frozen=True)
class Blended:
    """A blend with the scorers that it weighs: itself a `gmeta.experiment.ranking.baselines.Scorer`."""

    blend: Blend
    scorers: Mapping[str, Scorer]

    def scores(self, asked: Examples) -> Floats:
        """Weigh the scores of each row."""
        return self.blend.weigh({name: each.scores(asked) for name, each in self.scorers.items()})


def columns_of(scorer: Scorer, config: RankingConfig) -> set[str]:
    """Return the columns of a row that a scorer reads; for a blend, those of its members."""
    if isinstance(scorer, Blended):
        return set().union(*(columns_of(each, config) for each in scorer.scorers.values()))
    if isinstance(scorer, Drift):
        return {scorer.user, config.time} | columns_of(scorer.base, config)
    if isinstance(scorer, Bilinear):
        return {name for name in (scorer.user, scorer.item) if name is not None}
    found = {*config.features, *config.numbers}
    if isinstance(scorer, ModelScorer) and isinstance(scorer.model, SequenceModel):
        found |= {name for name in (config.user, config.time) if name}
    return found


LEAST_GAIN = 1e-3
"""The least share of the loss by which other settings of a method must lower it."""


def losses(scores: Floats, labels: Floats, encoding: Encoding) -> Floats:
    """Compute each row's log loss or, in units of the labels' deviation, squared error."""
    if encoding.config.binary:
        return np.asarray(np.logaddexp(0.0, np.where(labels > 0, -scores, scores)))
    return np.square((scores - labels) / encoding.deviation)


# Chooses methods' settings by trials in validation, within a time budget.

Move = Callable[[RankingMethod], RankingMethod]
_MOVES: tuple[Move, ...] = (
    lambda method: replace(method, variance=method.variance / 3),
    lambda method: replace(method, variance=method.variance * 3),
    lambda method: replace(method, dim=2 * method.dim),
    lambda method: replace(method, learning_rate=method.learning_rate / 2),
    lambda method: replace(method, dropout=0.2),
)
_START, _STEP, _VALUE = 5.0, 4e-3, 8e-8
"""Seconds to make a model, of a step, and of a value of a row, on two cores."""
_NUMBER = 2e-7  # seconds per number of a token in a block of GRM
_EPOCHS = 12  # the expected number in a trial
_SHARE = 0.6  # of the remaining budget, for a method that isn't the last


def choose_settings(config: RankingConfig, parts: Parts, say: Callable[[str], None]) -> RankingConfig:
    """Choose the settings of all methods by as many trials as the budget is estimated to allow.

    A trial trains a method on the training rows and measures it in validation, at its best epoch. Trials
    follow a list of moves, each of which changes the best settings so far and is kept if it lowers the loss
    by the share `LEAST_GAIN`. Their duration is estimated from the size of the data, not measured, so the
    choice is a function of the data, the settings and the budget.
    """
    budget = budget_seconds(config.budget)
    methods = dict(config.methods)
    for place, (name, method) in enumerate(config.methods.items()):
        share = budget if place == len(methods) - 1 else _SHARE * budget
        best, least, first, trials = method, np.inf, np.inf, 0
        for move in (lambda same: same, *_MOVES):
            tried = move(best)
            cost = trial_seconds(tried, parts)
            if cost > share or (trials and tried == best):
                continue
            if not trials and 2 * cost > share:
                break
            share, budget, trials = share - cost, budget - cost, trials + 1
            loss = models.measure_epochs(tried, config.seeds[0], parts=parts)
            first = loss if trials == 1 else first
            if loss < least * (1 - LEAST_GAIN):
                best, least = tried, loss
        methods[name] = best
        if trials:
            say(f"{method.label}: {trials} trials, loss {first:.4f} to {least:.4f}: {_changes(method, best)}")
        else:
            say(f"{method.label}: the usual settings, because two trials take longer than {share:.0f} s")
    return replace(config, methods=methods)


def trial_seconds(method: RankingMethod, parts: Parts) -> float:
    """Estimate the duration of a method's training on two cores."""
    rows, size = len(parts.train), method.rows_per_batch or 1
    row = len(parts.encoding.config.features) * (method.dim + 4) * _VALUE
    if method.model == GRM:  # a row is in a history too
        row = 2 * (row + method.blocks * method.width * _NUMBER)
    return _START + _EPOCHS * (rows / size * _STEP + rows * row)


def _changes(before: RankingMethod, now: RankingMethod) -> str:
    changed = [name for name in vars(now) if getattr(now, name) != getattr(before, name)]
    return ", ".join(f"{name} = {getattr(now, name):.3g}" for name in changed) or "the usual settings"


# Training.


def train_ranking(
    config: RankingConfig, run: RunFolder, data: Path, parts: Parts, *, progress: TrainingProgress
) -> None:
    """Train every method with every seed, choose the baselines' settings, calibrate, and fit the blends.

    Interrupted training is resumed; finished training is skipped.

    Raises:
      ConfigError: The folder holds other settings, another job trains in it, or there are several ranks.
      DataError: A checkpoint can't be read.
    """
    if collectives.world().size > 1:
        raise ConfigError(
            "gmeta train --for ranking trains in one process: leave --np out; gmeta.models.DCN itself trains "
            "on any number of ranks"
        )
    lock = run.lock
    lock.take()
    try:
        begun = _begun(config, run)
        if begun is None and budget_seconds(config.budget):
            begun = choose_settings(config, parts, progress.say)
        config = begun or config
        run.begin(config, data)
        parts = parts.under(config)
        for method, settings in config.methods.items():
            for seed in config.seeds:
                label = f"{settings.label}, seed {seed}"
                done = models.train(
                    settings,
                    seed,
                    parts=parts,
                    folder=run.training(method, seed),
                    callbacks=[progress.track(label, settings.epochs)],
                )
                if done:
                    progress.say(f"{label}: resumed after epoch {done}")
        if not (run.path / CHOSEN).exists():
            save_chosen(run, _choose(config, run, parts, progress.say))
    finally:
        lock.release()


def _begun(config: RankingConfig, run: RunFolder) -> RankingConfig | None:
    """Return the experiment with the settings of methods that an earlier call chose within the budget."""
    if not (run.path / "config.json").exists():
        return None
    held, _ = run.load()
    if not isinstance(held, RankingConfig):
        raise ConfigError(f"{run.path} was begun for {run.family}: name another --run")
    chose = budget_seconds(config.budget) and held.budget == config.budget
    return replace(config, methods=held.methods) if chose else config


def _choose(
    config: RankingConfig, run: RunFolder, parts: Parts, say: Callable[[str], None]
) -> dict[str, Any]:
    """Choose the settings of all baselines, calibrate all scores, and fit the blend of each seed."""
    asked, encoding = parts.validation, parts.encoding

    def loss(scores: Floats) -> float:
        return float(losses(scores, asked.labels, encoding).mean())

    def calibrated(scores: Mapping[str, Floats]) -> tuple[Blend, float]:
        blend = Blend.fit(scores, asked.labels, binary=config.binary)
        return blend, loss(blend.weigh(scores))

    tuned = Tuned.tune(parts, lambda scorer: loss(scorer.scores(asked)))
    fitted = {name: scorer.scores(asked) for name, scorer in tuned.fit(parts).items()}
    calibrations: dict[str, Any] = {}
    found: dict[str, list[float]] = {}
    for name, scores in fitted.items():
        blend, value = calibrated({name: scores})
        calibrations[name], found[name] = blend.to_json(), [value]
        say(f"{LABELS[name]}: loss {value:.4f} in validation")
    blends = {}
    for seed in config.seeds:
        own = {name: scorer.scores(asked) for name, scorer in _models(config, run, parts, seed).items()}
        for name, scores in own.items():
            blend, value = calibrated({name: scores})
            calibrations[f"{name}, seed {seed}"] = blend.to_json()
            found.setdefault(name, []).append(value)
        if config.blend:
            weighed = {name: scores for name, scores in fitted.items() if name != MEAN}
            blend, value = calibrated({**own, **weighed})
            say(f"blend, seed {seed}: {blend.describe()}")
            blends[str(seed)] = blend.to_json()
            found.setdefault(BLEND, []).append(value)
    return {
        "baselines": tuned.to_json(),
        "calibrations": calibrations,
        "blends": blends,
        "validation": {name: float(np.mean(values)) for name, values in found.items()},
    }


def _models(config: RankingConfig, run: RunFolder, parts: Parts, seed: int) -> dict[str, Scorer]:
    return {
        method: models.ModelScorer(
            models.load_best(method, settings, seed, parts=parts, folder=run.training(method, seed)),
            parts.encoding,
        )
        for method, settings in config.methods.items()
    }


# A trained run.


@dataclass(frozen=True)
class Trained(TrainedRun):
    """A trained run, ready to predict; its values in validation are losses, and all scores are calibrated.

    Attributes:
      parts: Its data, cut.
    """

    HIGHER = False
    LABELS = LABELS

    parts: Parts


def load_ranking(run: RunFolder, on_bad: OnBad = "raise") -> Trained:
    """Load a trained run: its models at their best epochs, and the baselines with the chosen settings.

    Raises:
      DataError: The run isn't fully trained.
    """
    config, data = run.load(unchanged=True)
    assert isinstance(config, RankingConfig)
    with read_chosen(run) as chosen:
        tuned = Tuned.from_json(chosen["baselines"])
        calibrations = {name: Blend.from_json(values) for name, values in chosen["calibrations"].items()}
        blends = {int(seed): Blend.from_json(values) for seed, values in chosen["blends"].items()}
        validation = {str(name): float(value) for name, value in chosen["validation"].items()}
    parts = Parts.read(config, data, on_bad)
    fitted = tuned.fit(parts)
    baselines = {name: calibrations[name].of({name: scorer}) for name, scorer in fitted.items()}
    methods: dict[str, dict[int, Scorer]] = {}
    for seed in config.seeds:
        own = _models(config, run, parts, seed)
        for name, scorer in own.items():
            calibration: Blended = calibrations[f"{name}, seed {seed}"].of({name: scorer})
            methods.setdefault(name, {})[seed] = calibration
        if seed in blends:
            methods.setdefault(BLEND, {})[seed] = blends[seed].of({**own, **fitted})
    described = tuned.describe()
    described |= {BLEND: "; ".join(each.describe() for each in blends.values())} if blends else {}
    return Trained(config, baselines, described, methods, validation, parts=parts)

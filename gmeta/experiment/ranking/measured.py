"""The predictions of a run on test rows, and their metrics: errors, order, calibration, groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gmeta.core.schema import OnBad
from gmeta.experiment.baselines.task_rows import Floats, Ints
from gmeta.experiment.measurement.split import click_metrics, number_metrics
from gmeta.experiment.plan.next_item_config import BLEND
from gmeta.experiment.ranking import models
from gmeta.experiment.ranking.baselines import MEAN
from gmeta.experiment.ranking.runs import Trained, load_ranking, losses
from gmeta.experiment.results.bootstrap import Comparison, compare
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.experiment.runs.trainer import read_logged

BINS = 10
"""So many parts of equal size, in the order of predictions, does a calibration have."""
_BLOCKS = 1000  # of rows, drawn by the bootstrap instead of users if rows have none


def calibration(scores: Floats, labels: Floats, bins: int = BINS) -> tuple[Floats, Floats]:
    """Compare probabilities with outcomes, in parts of equal size in the order of probabilities.

    Rows of equal probability share their rate, so that the order of rows has no influence.

    Args:
      scores: (rows,) logits.
      labels: (rows,) 0 or 1.
      bins: The number of parts.

    Returns:
      (parts,) the mean probability and (parts,) the rate of ones.

    Example:
      >>> calibration(np.array([0.0, 0.0]), np.array([1.0, 0.0]), bins=1)
      (array([0.5]), array([0.5]))
    """
    rates = 1 / (1 + np.exp(-scores))
    _, place, count = np.unique(rates, return_inverse=True, return_counts=True)
    labels = (np.bincount(place, weights=labels) / count)[place]
    parts = np.array_split(np.argsort(rates, kind="stable"), min(bins, len(rates)))
    means = [(rates[part].mean(), labels[part].mean()) for part in parts]
    said, happened = np.array(means).T
    return said, happened


@dataclass(frozen=True)
class Results:
    """The reported results of a run.

    Attributes:
      trained: The run.
      scores: Name -> seeds -> (rows,) logits, or labels, of test rows; a baseline has one seed.
      epochs: Method -> seed -> the loss in validation after each epoch.
    """

    trained: Trained
    scores: Mapping[str, Sequence[Floats]]
    epochs: Mapping[str, Mapping[int, Sequence[float]]]

    @property
    def binary(self) -> bool:
        """Whether labels are 0 and 1."""
        return self.trained.config.binary

    @cached_property
    def _by_user(self) -> tuple[Ints, Ints]:
        """Return the test rows user after user, and where each user's rows begin."""
        users = self.trained.parts.test.users
        order = np.argsort(users, kind="stable")
        sizes = np.unique(users, return_counts=True)[1]
        return order, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @cached_property
    def metrics(self) -> dict[str, list[dict[str, float]]]:
        """Name -> seed -> metric -> value."""
        return {name: [self.measure(each) for each in seeds] for name, seeds in self.scores.items()}

    def measure(self, scores: Floats) -> dict[str, float]:
        """Compute the metrics of scores of test rows.

        For labels 0 and 1: ``logloss``, ``auc``, ``gauc`` if rows have users, ``ece``, the mean distance of
        the parts of `calibration` from the diagonal, and, if there are ones, ``ratio``, the mean probability
        divided by the rate of ones. For other labels: ``mae`` and ``rmse``.
        """
        labels = self.trained.parts.test.labels
        if not self.binary:
            return number_metrics(labels, scores)
        order, splits = self._by_user
        found = click_metrics(labels[order], scores[order], splits, 1.0)
        if self.trained.config.user is None:
            del found["gauc"]
        said, happened = calibration(scores, labels)
        found["ece"] = float(np.abs(said - happened).mean())
        if happened.any():
            found["ratio"] = float(said.mean() / happened.mean())
        return found

    def mean(self, name: str, metric: str) -> tuple[float, float | None]:
        """Return a metric's mean over seeds, and its sample standard deviation if there are several."""
        values = [each[metric] for each in self.metrics[name]]
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None

    @property
    def error(self) -> str:
        """The metric by which methods are compared."""
        return "logloss" if self.binary else "rmse"

    @property
    def strongest(self) -> tuple[str | None, str]:
        """The method and the baseline that are best in validation; None without a method."""
        trained, by = self.trained, self.trained.validation
        methods = [name for name in by if name in trained.methods]
        return min(methods, key=by.__getitem__, default=None), min(trained.baselines, key=by.__getitem__)

    @cached_property
    def difference(self) -> Comparison | None:
        """The strongest method's error minus the strongest baseline's, with its bootstrap interval.

        The bootstrap draws users with all their rows; without users, blocks of rows.
        """
        method, baseline = self.strongest
        if method is None:
            return None
        parts = self.trained.parts
        if self.trained.config.user is None:
            group = np.arange(len(parts.test)) % min(_BLOCKS, len(parts.test))
        else:
            group = np.unique(parts.test.users, return_inverse=True)[1]
        unit = 1.0 if self.binary else parts.encoding.deviation**2

        def sums(name: str) -> dict[str, Floats]:
            every = [losses(each, parts.test.labels, parts.encoding) * unit for each in self.scores[name]]
            return {self.error: np.stack([np.bincount(group, weights=each) for each in every])}

        found = compare({(method, 0): sums(method)}, {baseline: sums(baseline)}, np.bincount(group))
        return found.find(method, 0, baseline, self.error)

    def order(self) -> list[str]:
        """Return all names: methods, then baselines, each from best to worst in validation."""
        trained, by = self.trained, self.trained.validation
        return [
            *sorted(trained.methods, key=by.__getitem__),
            *sorted(trained.baselines, key=by.__getitem__),
        ]

    def groups(self) -> dict[str, tuple[list[str], dict[str, list[float]]]]:
        """Return the error by group.

        Returns:
          Title -> the groups' names, and name of a method or baseline -> its log loss, or root mean squared
          error, in each group: by the number of training rows of a row's user, and of its item. Users and
          items without training rows are a separate group; the others are in quarters of the rows.
        """
        trained, parts = self.trained, self.trained.parts
        names = [name for name in self.order() if name in trained.methods]
        names += [name for name in self.order() if name in trained.baselines and name != MEAN][:2]
        found = {}
        for what, feature in (("user", trained.config.user), ("item", trained.config.item)):
            if feature is None:
                continue
            number = np.asarray(parts.test.ids[feature])
            counts = np.bincount(
                np.asarray(parts.train.ids[feature]), minlength=parts.encoding.sizes[feature]
            )
            often = np.where(number > 0, counts[number], 0)
            known = often[often > 0]
            bounds = np.unique(np.quantile(known, [0.25, 0.5, 0.75], method="higher")) if len(known) else []
            place = np.where(often > 0, 1 + np.searchsorted(bounds, often, side="left"), 0)
            present = np.unique(place)
            labels = [_span(often[place == part]) for part in present]
            values = {
                name: [self._error_of(self.scores[name], place == part) for part in present] for name in names
            }
            found[f"by the training rows of a row's {what}"] = labels, values
        return found

    def _error_of(self, seeds: Sequence[Floats], rows: Floats) -> float:
        labels, encoding = self.trained.parts.test.labels, self.trained.parts.encoding
        means = [float(losses(each[rows], labels[rows], encoding).mean()) for each in seeds]
        found = means if self.binary else encoding.deviation * np.sqrt(means)
        return float(np.mean(found))


def _span(values: Ints) -> str:
    low, high = int(values.min()), int(values.max())
    return ("none" if low == 0 else f"{low:,}") if low == high else f"{low:,} to {high:,}"


def evaluate_ranking(run: RunFolder, on_bad: OnBad = "raise") -> Results:
    """Measure a trained run.

    Raises:
      DataError: The run isn't fully trained.
    """
    trained = load_ranking(run, on_bad)
    test = trained.parts.test
    scores = {name: [each.scores(test) for each in seeds.values()] for name, seeds in trained.methods.items()}
    scores |= {name: [each.scores(test)] for name, each in trained.baselines.items()}
    epochs = {
        method: {
            seed: read_logged(run.training(method, seed), models.LOGGED) for seed in trained.config.seeds
        }
        for method in trained.methods
        if method != BLEND
    }
    return Results(trained, scores, epochs)

"""The outcome of a cold-start evaluation, as data.

An `Evaluation` holds only measured values, and nothing that can be computed from them: one value per seed of
every metric, for every method and number of inner steps. The terminal table, the JSON file and the report are
all computed from it, so they can't disagree.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError
from gmeta.experiment.results.metrics import ERRORS, METRICS, Bootstrap

# Calibration of predicted variances: whether errors are as large as predicted.

LEVELS, BINS = (50, 80, 95), 10


@dataclass(frozen=True)
class Calibration:
    """How predicted variances of labels compare with squared errors on the query rows.

    Attributes:
      ratio: One value per seed: the mean of squared error / predicted variance; 1 is ideal, and above 1 the
        method is overconfident.
      coverage: Level in percent -> one value per seed: the share of labels within the normal distribution's
        central interval of that level.
      deviations: The rows of all seeds, in ascending order of predicted variance, in parts of equal size: the
        root of each part's mean predicted variance.
      errors: Each part's root mean squared error; ideally the same numbers.
    """

    ratio: Sequence[float]
    coverage: Mapping[int, Sequence[float]]
    deviations: Sequence[float]
    errors: Sequence[float]

    @classmethod
    def of(
        cls,
        labels: NDArray[np.float64],
        predictions: Sequence[NDArray[np.float64]],
        variances: Sequence[NDArray[np.float64]],
    ) -> Calibration:
        """Compare variances with errors.

        Args:
          labels: (rows,).
          predictions: For each seed (rows,).
          variances: For each seed (rows,), above 0, including the noise of labels.

        Example:
          >>> found = Calibration.of(np.array([1.0, -3.0]), [np.zeros(2)], [np.array([1.0, 4.0])])
          >>> found.ratio, found.coverage, found.deviations, found.errors
          ([1.625], {50: [0.0], 80: [0.5], 95: [1.0]}, [1.0, 2.0], [1.0, 3.0])
        """
        from scipy.stats import norm

        wrong = np.square(np.asarray(predictions) - labels)
        said = np.asarray(variances)
        scaled = wrong / said
        order = np.argsort(said, axis=None, kind="stable")
        parts = np.array_split(order, min(BINS, order.size))
        return cls(
            ratio=scaled.mean(axis=1).tolist(),
            coverage={
                level: (scaled <= norm.ppf(0.5 + level / 200) ** 2).mean(axis=1).tolist() for level in LEVELS
            },
            deviations=[float(np.sqrt(said.ravel()[part].mean())) for part in parts],
            errors=[float(np.sqrt(wrong.ravel()[part].mean())) for part in parts],
        )


# Mean and spread of a number that is measured once per seed.


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds.

    Attributes:
      mean: Mean of the defined values; nan if there are none.
      deviation: Sample standard deviation, ``sqrt(sum (x - mean)^2 / (n - 1))``, in the metric's own unit;
        ``None`` if fewer than two values are defined. It measures how much single runs differ, not how well
        the mean is known: for that, divide it by ``sqrt(n)``.
      defined: Number of finite values.
      total: Number of values, including undefined ones.

    Example:
      >>> Spread.of([0.75, 1.0, 1.25])
      Spread(mean=1.0, deviation=0.25, defined=3, total=3)
    """

    mean: float
    deviation: float | None
    defined: int
    total: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise one value per seed; non-finite values only count in ``total``."""
        finite = [value for value in values if math.isfinite(value)]
        return cls(
            mean=statistics.fmean(finite) if finite else math.nan,
            deviation=statistics.stdev(finite) if len(finite) > 1 else None,
            defined=len(finite),
            total=len(values),
        )

    def parts(self, digits: int = 3) -> tuple[str, str]:
        """Format mean and spread as two texts: ``("0.917", "±.009")``.

        A spread of ``None`` is empty; an undefined mean is a dash. If only some seeds are defined, the spread
        ends with their number: ``"±.009 (2/3)"``.
        """
        if not self.defined:
            return "–", ""
        spread = "" if self.deviation is None else "±" + f"{self.deviation:.{digits}f}".removeprefix("0")
        if self.defined < self.total:
            spread += f" ({self.defined}/{self.total})"
        return f"{self.mean:.{digits}f}", spread

    def format(self, digits: int = 3) -> str:
        """Format mean and spread as one text, ``"0.917±.009"``."""
        return "".join(self.parts(digits))


TRAIN_LOSS, VALIDATION_MAE = "loss", "mae"
"""The curves of a `TrainingRun` that the report draws."""


@dataclass(frozen=True)
class DataDescription:
    """The data set that was evaluated.

    Attributes:
      name: Its folder's name.
      warm_tasks: Number of tasks that were trained on.
      cold_tasks: Number of tasks of the measured split.
      rows: Number of rows of the whole data set.
      split: Name of the measured split.
    """

    name: str
    warm_tasks: int
    cold_tasks: int
    rows: int
    split: str = "cold"


@dataclass(frozen=True)
class MethodResult:
    """The results of one method on the cold tasks' query rows.

    Attributes:
      label: Its name in tables and figures, such as ``"MAML"``.
      description: One sentence that describes it.
      results: Inner (or fine-tuning) steps -> metric -> one value per seed; a method without a seed, such as
        the item mean, may give a single value. nan where a metric is undefined.
    """

    label: str
    description: str
    results: Mapping[int, Mapping[str, Sequence[float]]]

    @property
    def adapts(self) -> bool:
        """Whether the method takes any steps; a fixed baseline has results at 0 steps only."""
        return any(steps > 0 for steps in self.results)


@dataclass(frozen=True)
class SplitResult:
    """The results of all methods on another split.

    Attributes:
      tasks: Number of tasks of the split.
      results: Method name -> the same as `MethodResult.results`.
      bootstrap: The comparisons of methods with baselines on it; None: not measured.
    """

    tasks: int
    results: Mapping[str, Mapping[int, Mapping[str, Sequence[float]]]]
    bootstrap: Bootstrap | None = None


@dataclass(frozen=True)
class TrainingRun:
    """The curves of one training run, one point per epoch.

    Attributes:
      epoch: Epochs, counted from 1, in ascending order.
      curves: Name -> one value per epoch, nan where it wasn't measured. The report draws ``"loss"``, the
        training loss, and ``"mae"``, the mean absolute error on held-out tasks.
    """

    epoch: Sequence[int]
    curves: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Evaluation:
    """A cold-start evaluation of several methods over several seeds.

    Attributes:
      title: The report's title.
      data: The data set.
      config: The settings of the runs, as JSON values.
      seeds: The seeds, in the order of every "value per seed" below.
      methods: Method name -> its results on ``data.split``, in the order of the table's rows.
      splits: Name of another split -> the same methods' results on it.
      bootstrap: The comparisons of methods with baselines; None: not measured.
      support_curve: Method name -> support ratings given -> MAE per seed.
      support_steps: Inner steps taken at each point of ``support_curve`` by methods that adapt.
      calibration: Method name -> how its predicted variances compare with its errors.
      training: Method name -> one run per seed; of several runs that were measured as one, per run and seed.
      notes: Sentences for the reader, such as records that were skipped.
      seconds: Phase -> wall time in seconds.

    Raises:
      ConfigError: Two parts contradict each other: the number of values differs from the number of seeds, a
        metric isn't in `gmeta.experiment.results.metrics.METRICS`, or a method isn't in ``methods``.

    Example:
      >>> item_mean = MethodResult("item mean", "The item's mean rating.", {0: {"mae": [0.95]}})
      >>> data = DataDescription("ml-100k", warm_tasks=461, cold_tasks=121, rows=21_000)
      >>> evaluation = Evaluation("Cold start", data, seeds=[0], methods={"item_mean": item_mean})
      >>> evaluation.spread("item_mean", 0, "mae").format()
      '0.950'
    """

    title: str
    data: DataDescription
    seeds: Sequence[int]
    methods: Mapping[str, MethodResult]
    splits: Mapping[str, SplitResult] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    bootstrap: Bootstrap | None = None
    support_curve: Mapping[str, Mapping[int, Sequence[float]]] = field(default_factory=dict)
    support_steps: int | None = None
    calibration: Mapping[str, Calibration] = field(default_factory=dict)
    training: Mapping[str, Sequence[TrainingRun]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.seeds or not self.methods:
            raise ConfigError("an evaluation needs at least one seed and one method")
        for name, method in self.methods.items():
            for steps, metrics in method.results.items():
                for metric, values in metrics.items():
                    where = f"method {name!r}, {steps} steps, {metric!r}"
                    if metric not in METRICS:
                        raise ConfigError(f"{where}: not a metric; there are {', '.join(METRICS)}")
                    self._check_seeds(where, values)
        for split, other in self.splits.items():
            if split == self.data.split or set(other.results) != set(self.methods):
                raise ConfigError(
                    f"split {split!r} must be another than {self.data.split!r} and have the methods "
                    f"{', '.join(self.methods)}, got {', '.join(other.results)}"
                )
            self.on(split)  # checks the split's results
        for name in (*self.support_curve, *self.training, *self.calibration):
            if name not in self.methods:
                raise ConfigError(
                    f"method {name!r} has a curve but no results; methods: {', '.join(self.methods)}"
                )
        for one in self.bootstrap.comparisons if self.bootstrap else ():
            for name, steps in ((one.method, one.steps), (one.baseline, 0)):
                if name not in self.methods or steps not in self.methods[name].results:
                    raise ConfigError(f"{name!r}, {steps} steps, is compared but has no results")
        for name, found in self.calibration.items():
            for values in (found.ratio, *found.coverage.values()):
                self._check_seeds(f"calibration of {name!r}", values)
        for name, sizes in self.support_curve.items():
            for size, values in sizes.items():
                self._check_seeds(f"support curve of {name!r} at {size} ratings", values)
        for name, runs in self.training.items():
            for run in runs:
                for curve, values in run.curves.items():
                    if len(values) != len(run.epoch):
                        raise ConfigError(
                            f"training of {name!r}, curve {curve!r}: {len(values)} values for "
                            f"{len(run.epoch)} epochs"
                        )

    def _check_seeds(self, where: str, values: Sequence[float]) -> None:
        if len(values) not in (1, len(self.seeds)):
            raise ConfigError(f"{where}: {len(values)} values for {len(self.seeds)} seeds")

    def on(self, split: str) -> Evaluation:
        """Return the evaluation of one of the other splits alone: its table, without curves."""
        found = self.splits[split]
        return replace(
            self,
            data=replace(self.data, split=split, cold_tasks=found.tasks),
            methods={
                name: replace(method, results=found.results[name]) for name, method in self.methods.items()
            },
            splits={},
            bootstrap=found.bootstrap,
            support_curve={},
            calibration={},
            training={},
        )

    @property
    def sections(self) -> list[Evaluation]:
        """One evaluation per split; the first one also holds the curves."""
        return [self, *map(self.on, self.splits)]

    @property
    def metrics(self) -> list[str]:
        """The metrics that at least one method has, in the order of `METRICS`: the table's columns."""
        present = {
            metric
            for method in self.methods.values()
            for metrics in method.results.values()
            for metric in metrics
        }
        return [metric for metric in METRICS if metric in present]

    @property
    def error(self) -> str:
        """The metric by which methods are compared; ``"mae"`` if no method has an error metric."""
        return next((metric for metric in ERRORS if metric in self.metrics), ERRORS[0])

    def spread(self, method: str, steps: int, metric: str) -> Spread:
        """Compute mean and spread of one cell of the table; undefined (no values) if the cell is absent."""
        result = self.methods.get(method)
        return Spread.of(result.results.get(steps, {}).get(metric, ()) if result else ())

    def best(self, metric: str) -> tuple[str, int] | None:
        """Find the method and number of steps with the best mean; ``None`` if no mean is defined."""
        sign = 1.0 if METRICS[metric].better == "lower" else -1.0
        means = {
            (name, steps): sign * self.spread(name, steps, metric).mean
            for name, method in self.methods.items()
            for steps in method.results
        }
        finite = {cell: mean for cell, mean in means.items() if math.isfinite(mean)}
        return min(finite, key=lambda cell: finite[cell]) if finite else None

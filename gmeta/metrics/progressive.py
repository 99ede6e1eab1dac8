"""Progressive evaluation: metrics of predictions that a model makes before it trains on their labels.

Each sample of a stream is a test of the weights before it, and then trains them: all data are test data, and
no test sample was seen in training (`gmeta.callbacks.ProgressiveEvaluation` collects them in `fit`).
`ProgressiveMetrics` computes metrics window by window, in NumPy.

A window is a part of the stream, in the order of training:

* of a duration: the clock of the stream is the latest event time so far. A window ends before the first
  sample that moves this clock past the window's end. A sample that arrives late, with an event time before
  the window, counts in the window that is open when it is trained, and in the field ``late``. Thus one
  window is open at a time, and no sample waits. One event time in the future moves the clock there, and
  the samples of the meantime count in that window: check times where the stream is read.
* of a number of samples.

A window's metrics need its scores: 17 bytes per sample of host memory (score, label, weight, user), at most
``max_rows`` of them. They are computed from these columns when the window ends, so that neither the division
into batches nor a restart changes a bit.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.core.errors import ConfigError, DataError, whole_number
from gmeta.core.settings import parse_duration
from gmeta.metrics.auc import auc_of_groups

_COLUMNS = {"score": np.float32, "label": np.bool_, "weight": np.float32, "user": np.int64}
_KEPT = 1000  # ended windows, of some 200 bytes each
_LEAST = 1e-7  # a probability's distance from 0 and 1 in the log loss, as in Keras
_MICROSECONDS = 1_000_000

METRICS = ("auc", "gauc", "log_loss", "normalised_entropy", "calibration")
"""The fields of a `Window` that say how good predictions are."""


@dataclass(frozen=True)
class Window:
    r"""The metrics of a window, with weights w, labels y, probabilities p, and the mean label :math:`\bar y`.

    A metric that is undefined is NaN: all but ``log_loss`` and ``calibration`` without samples of both
    classes, ``calibration`` without positives. If a prediction isn't finite, all are NaN.

    Attributes:
      number: The number of the window, from 0 on.
      start: The event time of its beginning, microseconds; of windows by rows, the number of its first row.
      end: That of its end, which isn't included. A window may end early (``max_rows``).
      rows: Samples evaluated.
      positives: The sum of w of the positive ones.
      weight: The sum of w.
      auc: The area under the ROC curve, exact; ties count half.
      gauc: The mean of users' AUC, weighted by w of their samples (impressions), without users that have
        samples of one class only; NaN if `ProgressiveMetrics.update` gets no users.
      log_loss: :math:`-\sum w (y \ln p + (1 - y) \ln(1 - p)) / \sum w`, with p between 1e-7 and 1 - 1e-7.
      normalised_entropy: The log loss divided by that of predicting :math:`\bar y` for all samples,
        :math:`-\bar y \ln \bar y - (1 - \bar y) \ln(1 - \bar y)`: below 1 if predictions are better than
        the window's base rate (He et al. 2014).
      calibration: :math:`\sum w p / \sum w y`: 1 if as many positives are predicted as there are.
      late: Samples whose event time is before the window.
      corrections: Samples left out because they correct earlier ones.
      not_finite: Samples whose prediction is NaN or infinite.
    """

    number: int
    start: int
    end: int
    rows: int
    positives: float
    weight: float
    auc: float
    gauc: float
    log_loss: float
    normalised_entropy: float
    calibration: float
    late: int = 0
    corrections: int = 0
    not_finite: int = 0


class ProgressiveMetrics:
    """Computes metrics of a stream of predictions, window by window (see `Window`).

    Labels that come late: a stream may first train a sample as negative and, when its click comes, take that
    back by two samples: the negative again with weight -1, and the positive with weight 1. The model has
    seen both by then, so their predictions are no test, and they are not evaluated: mark them by
    ``corrects``. Samples of negative weight are left out without a mark; their positives can't be recognized
    without one. ``corrections`` counts what is left out: ``calibration`` is too high by about the share of
    clicks that come late. Samples of weight 0 are padding.

    Args:
      window: A duration of event time, such as ``"1h"``, or a number of samples.
      logits: Whether predictions are logits; else they are probabilities.
      positive: The least label that is positive, such as 4 for ratings of 1 to 5. None: labels are 0 or 1.
      max_rows: The most samples of a window; a window of a duration ends early when it has them, and the next
        one continues its time. The open window takes 17 bytes for each, in memory and in the state.

    Attributes:
      windows: The latest 1,000 windows that have ended, in order.

    Raises:
      ConfigError: An argument is invalid.

    Example:
      >>> metrics = ProgressiveMetrics(window=4)
      >>> labels, scores, users = [1, 0, 1, 0, 1], [0.9, 0.2, 0.4, 0.4, 0.3], [7, 7, 8, 8, 7]
      >>> ended = metrics.update(labels, scores, users=users)
      >>> [(window.rows, window.auc, window.gauc) for window in ended]
      [(4, 0.875, 0.75)]
      >>> metrics.current().rows
      1

    References:
      He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook" (ADKDD 2014), section 3, for
      normalized entropy and calibration. McMahan et al., "Ad Click Prediction: a View from the Trenches"
      (KDD 2013), section 5, for progressive validation.
    """

    def __init__(
        self,
        window: str | int = "1h",
        *,
        logits: bool = False,
        positive: float | None = None,
        max_rows: int = 1_000_000,
    ) -> None:
        self.max_rows = whole_number("ProgressiveMetrics: max_rows", max_rows, least=1)
        self._length = 0  # of a window, microseconds; 0: windows by rows
        if isinstance(window, str):
            self._length = round(parse_duration(window, "ProgressiveMetrics: window") * _MICROSECONDS)
            if self._length < 1:
                raise ConfigError(f"ProgressiveMetrics: window must be longer than 0, got {window!r}")
        else:
            rows = whole_number("ProgressiveMetrics: window (a duration or a number of rows)", window, 1)
            if rows > self.max_rows:
                raise ConfigError(
                    f"ProgressiveMetrics: window={rows} rows exceeds max_rows={self.max_rows}: increase "
                    "max_rows, 17 bytes of memory each"
                )
            self.max_rows = rows
        self.window, self.logits, self.positive = window, logits, positive
        self.windows: list[Window] = []
        self._parts: list[list[npt.NDArray[Any]]] = []  # the open window's columns
        self._number = 0  # of the open window
        self._rows = 0  # in the open window
        self._before = 0  # rows in ended windows
        self._clock: int | None = None  # event time divided by the length
        self._late = self._corrections = 0  # in the open window
        self._pending = 0  # corrections since the last row, which count in the window of the next one
        self._has_users = False
        self._sums = dict.fromkeys(("rows", "weight", "positives", "predicted", "loss", *_COUNTS), 0.0)
        self._means = {name: [0.0, 0.0] for name in ("auc", "gauc")}  # weighted sum, weight

    @property
    def by_time(self) -> bool:
        """Whether windows are durations of event time, which `update` then needs."""
        return self._length > 0

    def update(
        self,
        labels: npt.ArrayLike,
        scores: npt.ArrayLike,
        *,
        weights: npt.ArrayLike | None = None,
        users: npt.ArrayLike | None = None,
        times: npt.ArrayLike | None = None,
        corrects: npt.ArrayLike | None = None,
    ) -> list[Window]:
        """Add samples in the order of the stream, and return the windows that they end.

        Args:
          labels: Numbers of any shape.
          scores: As many predictions, made before training on their labels.
          weights: As many; 0 marks padding, in which nothing matters. None: 1.
          users: As many integers. None: no GAUC. All calls give users, or none.
          times: As many integers, event times in microseconds, for windows of a duration.
          corrects: As many booleans: whether a sample corrects an earlier one, and so isn't evaluated.

        Raises:
          ConfigError: Arguments differ in their number of elements; times are missing; or only some calls
            give users.
          DataError: A weight is NaN; a label is NaN or, without ``positive``, neither 0 nor 1; or a
            probability is outside of 0 to 1.
        """
        rows = self._checked(labels, scores, weights, users, times, corrects)
        clocks, corrections = rows.pop("clock"), rows.pop("corrections")
        corrections[0] += self._pending
        self._pending = int(corrections[-1])
        first = clocks[:1] if self._clock is None else [self._clock]
        latest = np.maximum.accumulate(np.concatenate([first, clocks]))[1:]
        ended: list[Window] = []
        begin, count = 0, len(clocks)
        while begin < count:
            if self._rows and latest[begin] > self._clock:
                ended.append(self._end())
            self._clock = int(latest[begin])
            room = self.max_rows - self._rows
            end = min(begin + room, int(np.searchsorted(latest, self._clock, side="right")))
            self._parts.append([rows[name][begin:end] for name in _COLUMNS])
            self._rows += end - begin
            self._late += int(np.count_nonzero(clocks[begin:end] < self._clock))
            self._corrections += int(corrections[begin:end].sum())
            if self._rows == self.max_rows:
                ended.append(self._end())
            begin = end
        return ended

    def current(self) -> Window | None:
        """Return the metrics of the open window so far; None if it has no sample."""
        return self._measure()[0] if self._rows else None

    def close(self) -> Window | None:
        """End the open window, as at the end of a stream, and return it; None if it has no sample."""
        return self._end() if self._rows else None

    def overall(self) -> Window | None:
        """Return the metrics of all ended windows together; None if there is none.

        AUC and GAUC are means of the windows', weighted by their samples' weights; all others are those of
        all samples. Windows with predictions that aren't finite add to the last three counts only. ``start``
        and ``end`` are the numbers of the first and the last row.
        """
        sums = self._sums
        if not sums["rows"]:
            return None
        auc, gauc = (_ratio(*self._means[name]) for name in ("auc", "gauc"))
        loss, entropy, calibration = _rates(
            sums["loss"], sums["predicted"], sums["positives"], sums["weight"]
        )
        counts = {name: int(sums[name]) for name in _COUNTS}
        about = (self._number, 0, self._before, int(sums["rows"]), sums["positives"], sums["weight"])
        return Window(*about, auc, gauc, loss, entropy, calibration, **counts)

    # The state.

    def state(self) -> bytes:
        """Return all that a later process needs to continue with the same windows, bit for bit.

        It has 17 bytes per sample of the open window, and some 250 kB at most for ended ones.
        """
        about = {
            "settings": self._settings(),
            "windows": [list(asdict(window).values()) for window in self.windows],
            **{name: getattr(self, f"_{name}") for name in _STATE},
        }
        file = io.BytesIO()
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        np.savez(file, about=text, **dict(zip(_COLUMNS, self._columns(), strict=True)))
        return file.getvalue()

    def restore(self, state: bytes) -> None:
        """Continue from a result of `state`.

        Raises:
          ConfigError: It was made with other settings.
          DataError: It is damaged.
        """
        try:
            with np.load(io.BytesIO(state), allow_pickle=False) as file:
                about = json.loads(file["about"].tobytes())
                columns = [file[name].astype(dtype, copy=False) for name, dtype in _COLUMNS.items()]
            settings, values = about["settings"], {name: about[name] for name in _STATE}
            windows = [Window(*each) for each in about["windows"]]
            if {len(column) for column in columns} != {values["rows"]}:
                raise ValueError("columns of different lengths")
        except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"the state of progressive metrics is damaged: {error}") from error
        if settings != self._settings():
            raise ConfigError(
                f"the state of progressive metrics was made with {settings}, and these have "
                f"{self._settings()}: use the same settings, or begin without the state"
            )
        self.windows, self._parts = windows, [columns] if values["rows"] else []
        for name, value in values.items():
            setattr(self, f"_{name}", value)

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("window", "logits", "positive", "max_rows")}

    def _columns(self) -> list[npt.NDArray[Any]]:
        """Return the open window's columns, and keep them as one part."""
        empty = [np.zeros(0, dtype) for dtype in _COLUMNS.values()]
        self._parts = [[np.concatenate(each) for each in zip(empty, *self._parts, strict=True)]]
        return self._parts[0]

    # Samples.

    def _checked(
        self, labels: Any, scores: Any, weights: Any, users: Any, times: Any, corrects: Any
    ) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of samples to evaluate, with ``clock``, (n,), and ``corrections``, (n + 1,)."""
        score = np.asarray(scores, np.float32).reshape(-1)
        size = len(score)
        given = {"labels": labels, "weights": weights, "users": users, "times": times, "corrects": corrects}
        flat = {name: np.asarray(each).reshape(-1) for name, each in given.items() if each is not None}
        other = {name: len(each) for name, each in flat.items() if len(each) != size}
        if other:
            raise ConfigError(
                f"ProgressiveMetrics: {size} scores, but {_listed(other)}: give as many of each"
            )
        if self.by_time and times is None:
            raise ConfigError(
                f"ProgressiveMetrics: window={self.window!r} is a duration of event time, so update needs "
                "times, in microseconds; or give a number of rows as window"
            )
        if size and (self._before + self._rows) and (users is not None) != self._has_users:
            raise ConfigError("ProgressiveMetrics: give users in all calls of update, or in none")
        weight = flat.get("weights", np.ones(size, np.float32)).astype(np.float32, copy=False)
        if np.isnan(weight).any():
            raise DataError("ProgressiveMetrics: weights hold NaN: weigh samples to be left out 0")
        correction = (weight < 0) | ((weight != 0) & flat.get("corrects", np.zeros(1, bool)).astype(bool))
        kept = np.flatnonzero((weight > 0) & ~correction)
        # Corrections count in the window of the next row, so that batches make no difference.
        next_row = np.searchsorted(kept, np.flatnonzero(correction))
        self._has_users = users is not None if len(kept) else self._has_users
        score = score[kept]
        if not self.logits and ((score < 0) | (score > 1)).any():
            raise DataError(
                "ProgressiveMetrics: predictions must be probabilities, from 0 to 1, got "
                f"{score[(score < 0) | (score > 1)][0]}: use logits=True if they are logits"
            )
        clock = flat["times"][kept].astype(np.int64) // self._length if self.by_time else np.zeros(len(kept))
        return {
            "score": score,
            "label": self._positive(flat["labels"][kept]),
            "weight": weight[kept],
            "user": flat.get("users", np.zeros(size, np.int64))[kept].astype(np.int64, copy=False),
            "clock": clock.astype(np.int64),
            "corrections": np.bincount(next_row, minlength=len(kept) + 1),
        }

    def _positive(self, labels: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        bad = labels[np.isnan(labels) if self.positive is not None else (labels != 0) & (labels != 1)]
        if self.positive is not None and not len(bad):
            return labels >= self.positive
        if len(bad):
            wanted = "0 or 1" if self.positive is None else "numbers"
            raise DataError(
                f"ProgressiveMetrics: labels must be {wanted}, got {bad[0]}: give samples without a label "
                "the weight 0, and for labels such as ratings of 1 to 5 give positive=4, the least label "
                "that is positive"
            )
        return labels == 1

    # Windows.

    def _measure(self) -> tuple[Window, dict[str, float]]:
        """Return the open window, and its sums."""
        score, label, weight, user = self._columns()
        if self.by_time:
            assert self._clock is not None
            place = self._clock * self._length, (self._clock + 1) * self._length
        else:
            place = self._before, self._before + self._rows
        bad = int(np.count_nonzero(~np.isfinite(score)))
        weighed = weight.astype(np.float64)
        sums = {"rows": self._rows, "weight": weighed.sum(), "positives": weighed[label].sum()}
        counts = {"late": self._late, "corrections": self._corrections, "not_finite": bad}
        sums |= dict.fromkeys(("predicted", "loss"), math.nan)
        auc = gauc = math.nan
        if not bad:
            chance, losses = self._losses(score.astype(np.float64), label)
            sums |= {"predicted": (weighed * chance).sum(), "loss": (weighed * losses).sum()}
            classes = np.where(label, weighed, 0.0), np.where(label, 0.0, weighed)
            auc = _mean(*auc_of_groups(np.zeros(len(user), np.int64), score, *classes))
            gauc = _mean(*auc_of_groups(user, score, *classes)) if self._has_users else math.nan
        sums = {name: float(value) for name, value in sums.items()}
        rates = _rates(sums["loss"], sums["predicted"], sums["positives"], sums["weight"])
        about = (self._number, *place, self._rows, sums["positives"], sums["weight"])
        return Window(*about, auc, gauc, *rates, **counts), {**sums, **counts}

    def _losses(
        self, scores: npt.NDArray[np.float64], labels: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return probabilities and log losses."""
        if self.logits:
            losses = np.logaddexp(0.0, np.where(labels, -scores, scores))
            return np.exp(-np.logaddexp(0.0, -scores)), losses
        chance = np.clip(scores, _LEAST, 1 - _LEAST)
        return scores, -np.log(np.where(labels, chance, 1 - chance))

    def _end(self) -> Window:
        window, sums = self._measure()
        for name, value in sums.items():
            if name in _COUNTS or not window.not_finite:
                self._sums[name] += value
        for name, mean in self._means.items():
            if not math.isnan(value := getattr(window, name)):
                mean[0] += value * window.weight
                mean[1] += window.weight
        self.windows = [*self.windows, window][-_KEPT:]
        self._before += self._rows
        self._number += 1
        self._parts, self._rows, self._late, self._corrections = [], 0, 0, 0
        return window


_COUNTS = ("late", "corrections", "not_finite")
_STATE = ("number", "rows", "before", "clock", "late", "corrections", "pending", "has_users", "sums", "means")


def _mean(values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> float:
    return _ratio(float((values * weights).sum()), float(weights.sum()))


def _ratio(value: float, by: float) -> float:
    return value / by if by else math.nan


def _rates(loss: float, predicted: float, positives: float, weight: float) -> tuple[float, float, float]:
    """Return log loss, normalised entropy and calibration of sums."""
    rate = _ratio(positives, weight)
    entropy = -sum(part * math.log(part) for part in (rate, 1 - rate) if part > 0)
    mean = _ratio(loss, weight)
    return mean, _ratio(mean, entropy), _ratio(predicted, positives)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())

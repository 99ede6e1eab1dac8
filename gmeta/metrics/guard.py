"""Rules on progressive metrics: when training on a stream stops, or falls back to an earlier checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from gmeta.core.errors import ConfigError, whole_number
from gmeta.metrics.progressive import METRICS, Window

Action = Literal["stop", "fall back"]
_LOWER_IS_BETTER = ("log_loss", "normalised_entropy")
_NUMBER = r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+"
_RULE = re.compile(
    rf"(?P<metric>\w+) (?P<sign>[<>]) "
    rf"(?:(?P<number>{_NUMBER})"
    rf"|(?:(?P<factor>{_NUMBER}) \* )?best of (?P<of>[0-9]+) windows?"
    rf"(?: (?P<plus>[+-]) (?P<by>{_NUMBER}))?)"
    rf"(?: for (?P<runs>[0-9]+) windows?)?"
)
_FORMS = (
    'write METRIC < NUMBER or METRIC > NUMBER, such as "normalised_entropy > 1.05 for 3 windows"; in place '
    'of NUMBER, "best of 24 windows", with a factor before it or a number after it, such as "auc < best of '
    '24 windows - 0.02" or "log_loss > 1.1 * best of 24 windows for 2 windows"'
)


@dataclass(frozen=True)
class Rule:
    """A rule on windows' metrics, made by `parse`.

    Attributes:
      text: The rule as it was written.
      metric: One of `gmeta.metrics.progressive.METRICS`.
      above: Whether values above the threshold break the rule; else those below it.
      factor: The factor of the best value.
      plus: The number added to it, or the threshold itself.
      of: The number of windows that the best value is taken from; 0: the threshold is a number.
      runs: The number of windows in a row that break the rule.
    """

    text: str
    metric: str
    above: bool
    factor: float
    plus: float
    of: int
    runs: int

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse a rule.

        Args:
          text: ``METRIC < THRESHOLD`` or ``METRIC > THRESHOLD``, optionally with ``for N windows``. A
            threshold is a number, or ``best of N windows``, optionally with ``FACTOR *`` before it, and
            ``+ NUMBER`` or ``- NUMBER`` after it.

        Raises:
          ConfigError: The text has another form, names no metric, or counts 0 windows.

        Example:
          >>> Rule.parse("auc < best of 24 windows - 0.02 for 2 windows").runs
          2
        """
        words = " ".join(re.sub(r"([<>*])", r" \1 ", text).split()) if isinstance(text, str) else ""
        found = _RULE.fullmatch(words)
        if found is None:
            raise ConfigError(f"{text!r} is no rule: {_FORMS}")
        metric = found["metric"]
        if metric not in METRICS:
            raise ConfigError(f"{text!r}: {metric!r} is no metric: name one of {', '.join(METRICS)}")
        of, runs = int(found["of"] or 0), int(found["runs"] or 1)
        if runs < 1 or (found["of"] and of < 1):
            raise ConfigError(f"{text!r} counts 0 windows: give a number of at least 1")
        above = found["sign"] == ">"
        if of and metric == "calibration":
            raise ConfigError(
                f"{text!r}: the best calibration is 1: write two rules, such as 'calibration < 0.8' and "
                "'calibration > 1.25'"
            )
        if of and above != (metric in _LOWER_IS_BETTER):
            raise ConfigError(
                f"{text!r} breaks where {metric} is better than its best: write {'<' if above else '>'}"
            )
        by = float(found["number"] or found["by"] or 0)
        plus = -by if found["plus"] == "-" else by
        return cls(text, metric, above, float(found["factor"] or 1), plus, of, runs)

    def broken_by(self, windows: Sequence[Window]) -> str:
        """Describe how the latest windows break this rule; return "" if they don't.

        Windows in which the metric is undefined, such as AUC without positives, are left out. A window with
        a prediction that isn't finite breaks every rule at once.

        Args:
          windows: Ended windows, in order.
        """
        if windows and windows[-1].not_finite:
            last = windows[-1]
            return f"window {last.number} has {last.not_finite} predictions that are not finite"
        defined = [
            (window, value) for window in windows if not math.isnan(value := getattr(window, self.metric))
        ]
        latest, before = defined[-self.runs :], defined[: -self.runs]
        threshold, best = self.plus, ""
        if self.of:
            values = [value for _, value in before[-self.of :]]
            if not values:
                return ""
            reached = min(values) if self.metric in _LOWER_IS_BETTER else max(values)
            threshold = self.factor * reached + self.plus
            best = f", where the best of {len(values)} windows before is {reached:.6g}"
        bad = [value > threshold if self.above else value < threshold for _, value in latest]
        if len(latest) < self.runs or not all(bad):
            return ""
        numbers = ", ".join(str(window.number) for window, _ in latest)
        shown = ", ".join(f"{value:.6g}" for _, value in latest)
        sign = ">" if self.above else "<"
        return f"{self.metric} {shown} of window {numbers} {sign} {threshold:.6g}{best}"


@dataclass(frozen=True)
class Decision:
    """What to do now.

    Attributes:
      action: ``"stop"`` the training, or ``"fall back"`` to the last checkpoint that was saved before
        ``since``, and go on from there.
      rule: The rule, as it was written.
      reason: What the metrics were.
      since: The first of the windows that broke the rule.
    """

    action: Action
    rule: str
    reason: str
    since: int

    def __str__(self) -> str:
        """Describe the decision in a line."""
        return f"{self.action}: {self.reason} ({self.rule})"


@dataclass(frozen=True)
class Guard:
    """Rules on the windows of `gmeta.metrics.progressive.ProgressiveMetrics`; see `Rule.parse`.

    Args:
      stop_if: Rules by which training stops.
      fall_back_if: Rules by which training falls back to the last good checkpoint.
      most_fall_backs: After this number of them, these rules stop training too, since the data of then would
        break them again.
      min_rows: Windows with fewer samples are ignored, unless a prediction isn't finite.

    Raises:
      ConfigError: A rule can't be parsed, or a number is negative.

    Example:
      >>> from gmeta.metrics.progressive import ProgressiveMetrics
      >>> guard = Guard(stop_if=["normalised_entropy > 1.05 for 2 windows"])
      >>> metrics = ProgressiveMetrics(window=2)
      >>> windows = metrics.update([1, 0, 1, 0], [0.1, 0.9, 0.2, 0.6])
      >>> guard.decide(windows).reason
      'normalised_entropy 3.32193, 1.82193 of window 0, 1 > 1.05'
    """

    stop_if: Sequence[str] = ()
    fall_back_if: Sequence[str] = ()
    most_fall_backs: int = 3
    min_rows: int = 0

    def __post_init__(self) -> None:
        """Parse the rules."""
        whole_number("Guard: most_fall_backs", self.most_fall_backs)
        whole_number("Guard: min_rows", self.min_rows)
        for name, texts in (("stop_if", self.stop_if), ("fall_back_if", self.fall_back_if)):
            if isinstance(texts, str):
                raise ConfigError(f"Guard: {name} must be a list of rules, got the text {texts!r}")
        self._rules  # noqa: B018  errors of rules are raised here

    @cached_property
    def _rules(self) -> list[tuple[Action, Rule]]:
        stop: list[tuple[Action, Rule]] = [("stop", Rule.parse(text)) for text in self.stop_if]
        return [*stop, *(("fall back", Rule.parse(text)) for text in self.fall_back_if)]

    def decide(self, windows: Sequence[Window], fall_backs: int = 0) -> Decision | None:
        """Apply the rules, those of ``stop_if`` first.

        Args:
          windows: Ended windows, in order, since the training began or fell back; decide after each of them.
          fall_backs: How often the training has fallen back so far.

        Returns:
          The decision of the first rule that is broken; None: go on.
        """
        counted = [window for window in windows if window.rows >= self.min_rows or window.not_finite]
        if not counted or counted[-1] is not windows[-1]:
            return None  # the latest window changes nothing
        for action, rule in self._rules:
            reason = rule.broken_by(counted)
            if reason:
                if action == "fall back" and fall_backs >= self.most_fall_backs:
                    action, reason = "stop", f"{reason}, after {fall_backs} fall-backs"
                return Decision(action, rule.text, reason, _since(counted, rule))
        return None


def _since(windows: Sequence[Window], rule: Rule) -> int:
    defined = [window for window in windows if not math.isnan(getattr(window, rule.metric))]
    last = windows[-1]
    return last.number if last.not_finite else defined[-rule.runs].number

"""What the numbers say, in sentences that are computed from them.

Two means count as different when they lie further apart than ``sqrt(s_a^2 + s_b^2)``, the standard deviation
of the difference of two single runs; ``s`` is the spread over seeds. This is no significance test: it keeps
the report from praising a difference that the next seed could turn round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gmeta.training.evaluation import Evaluation
from gmeta.training.metrics import METRICS
from gmeta.training.spread import Spread


@dataclass(frozen=True)
class Standing:
    """The best that a method reaches by a metric, and after how many steps."""

    method: str
    label: str
    steps: int
    adapts: bool
    spread: Spread

    @property
    def where(self) -> str:
        """``" after 5 steps"``; empty for a method that takes none."""
        return f" {after(self.steps)}" if self.adapts else ""


def after(steps: int) -> str:
    """A number of steps, as part of a sentence."""
    return {0: "before adaptation", 1: "after 1 step"}.get(steps, f"after {steps} steps")


def level(a: Spread, b: Spread) -> bool:
    """Whether two means can't be told apart by the spread between seeds; see the module's rule."""
    noise = math.hypot(a.deviation or 0.0, b.deviation or 0.0)
    return abs(a.mean - b.mean) <= noise + 1e-12  # rounding is no difference


def standings(evaluation: Evaluation, metric: str) -> list[Standing]:
    """Every method at its best number of steps, best method first; methods without a value are left out."""
    sign = 1.0 if METRICS[metric].better == "lower" else -1.0
    found = []
    for name, method in evaluation.methods.items():
        spreads = {steps: evaluation.spread(name, steps, metric) for steps in sorted(method.results)}
        spreads = {steps: spread for steps, spread in spreads.items() if spread.defined}
        if spreads:
            steps = min(spreads, key=lambda steps: sign * spreads[steps].mean)
            found.append(Standing(name, method.label, steps, method.adapts, spreads[steps]))
    return sorted(found, key=lambda standing: sign * standing.spread.mean)


def headline(evaluation: Evaluation) -> list[str]:
    """The report's opening: what adaptation did, who is best by error, who is best by ranking."""
    sentences = [adaptation(evaluation), lowest_error(evaluation), ranking(evaluation), caution(evaluation)]
    return [sentence for sentence in sentences if sentence]


def change(before: Spread, now: Spread) -> str:
    """``"falls from 1.001 to 0.917"``, or that it hardly moves."""
    if level(before, now):
        return f"hardly moves, from {before.mean:.3f} to {now.mean:.3f}"
    return f"{'falls' if now.mean < before.mean else 'rises'} from {before.mean:.3f} to {now.mean:.3f}"


def adaptation(evaluation: Evaluation) -> str:
    """What the first step does to the error of the first method that adapts; empty if there is none."""
    for name, method in evaluation.methods.items():
        steps = [n for n in sorted(method.results) if evaluation.spread(name, n, "mae").defined]
        if len(steps) > 1 and steps[0] == 0:
            before, now = (evaluation.spread(name, n, "mae") for n in steps[:2])
            where = f"{method.label}’s MAE on {evaluation.data.split} tasks"
            return f"{capital(after(steps[1]))}, {where} {change(before, now)}."
    return ""


def lowest_error(evaluation: Evaluation) -> str:
    """Who has the lowest error, and whether the runner-up is really behind."""
    order = standings(evaluation, "mae")
    if len(order) < 2:
        return ""
    first, second, *others = order
    sentence = f"{capital(first.label)} reaches the lowest MAE, {first.spread.mean:.3f}{first.where}"
    runner_up = f"{second.label}’s {second.spread.mean:.3f}{second.where}"
    if level(first.spread, second.spread):
        sentence += f", but {runner_up} is level with it"
        if len(evaluation.seeds) > 1:
            sentence += " within the spread between seeds"
    else:
        sentence += f", ahead of {runner_up}"
    if others:
        sentence += "; " + ", ".join(f"{other.label}: {other.spread.mean:.3f}" for other in others)
    return sentence + "."


def ranking(evaluation: Evaluation) -> str:
    """Who orders a task's items best, by AUC and nDCG@3."""
    parts = []
    for metric in ("auc", "ndcg@3"):
        order = standings(evaluation, metric)
        if len(order) < 2:
            continue
        first, second = order[:2]
        verdict = "is level with" if level(first.spread, second.spread) else "is ahead of"
        parts.append(
            f"by {METRICS[metric].label}, {first.label} ({first.spread.mean:.3f}{first.where}) {verdict} "
            f"{second.label} ({second.spread.mean:.3f}{second.where})"
        )
    return capital("; ".join(parts)) + "." if parts else ""


def caution(evaluation: Evaluation) -> str:
    """That one seed is no evidence of a small difference."""
    if len(evaluation.seeds) > 1:
        return ""
    return "This is one seed: the spread between seeds is unknown, and small differences prove nothing."


def capital(text: str) -> str:
    """The text with its first letter capital, the rest as it is."""
    return text[:1].upper() + text[1:]

"""The report's sentences, computed from the numbers of an evaluation.

Two means count as different if they lie further apart than ``sqrt(s_a^2 + s_b^2)``, the standard deviation
of the difference of two single runs; ``s`` is the spread over seeds. This is no significance test: it keeps
the report from praising a difference that the next seed could reverse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gmeta.experiment.results.evaluation import Evaluation
from gmeta.experiment.results.metrics import METRICS
from gmeta.experiment.results.spread import Spread


@dataclass(frozen=True)
class Standing:
    """The best value of a metric that a method reaches, and the number of steps it takes."""

    method: str
    label: str
    steps: int
    adapts: bool
    spread: Spread

    @property
    def where(self) -> str:
        """The number of steps as text, ``" after 5 steps"``; empty for a method that takes no steps."""
        return f" {after(self.steps)}" if self.adapts else ""


def after(steps: int) -> str:
    """Format a number of steps as part of a sentence."""
    return {0: "before adaptation", 1: "after 1 step"}.get(steps, f"after {steps} steps")


def level(a: Spread, b: Spread) -> bool:
    """Return whether two means differ by no more than the spread between seeds; see the module's rule."""
    noise = math.hypot(a.deviation or 0.0, b.deviation or 0.0)
    return abs(a.mean - b.mean) <= noise + 1e-12  # rounding is no difference


def standings(evaluation: Evaluation, metric: str) -> list[Standing]:
    """List every method at its best number of steps, best method first; omit methods without a value."""
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
    """Write the report's opening: the winner and why, the effect of adaptation, the best by each measure."""
    parts = (winner, adaptation, lowest_error, ranking, caution)
    sentences = [part(evaluation) for part in parts]
    return [sentence for sentence in sentences if sentence]


def change(before: Spread, now: Spread) -> str:
    """Describe a change, as in ``"falls from 1.001 to 0.917"``, or say that the value hardly moves."""
    if level(before, now):
        return f"hardly moves, from {before.mean:.3f} to {now.mean:.3f}"
    return f"{'falls' if now.mean < before.mean else 'rises'} from {before.mean:.3f} to {now.mean:.3f}"


def winner(evaluation: Evaluation) -> str:
    """Say which method has the lowest error, how far it is below the best simple baseline, and why.

    If a method is best after some steps, the sentence credits the steps, provided that the error before them
    is higher. If it is best before any step, the sentence credits what it has learnt from the features.
    """
    metric = METRICS[evaluation.error].label
    order = standings(evaluation, evaluation.error)
    simple = [standing for standing in order if not standing.adapts]
    trained = [standing for standing in order if standing.adapts]
    if not simple or not trained:
        return ""
    best, baseline = trained[0], simple[0]
    where = f"on {evaluation.data.split} tasks"
    values = f"{best.spread.mean:.3f}{best.where}"
    if level(best.spread, baseline.spread):
        return (
            f"No method wins {where}: {best.label}’s {metric} of {values} is level with the "
            f"{baseline.spread.mean:.3f} of {baseline.label}, a simple baseline, so features and steps have "
            "added nothing to means."
        )
    if best.spread.mean > baseline.spread.mean:
        return (
            f"A simple baseline wins {where}: {baseline.label} reaches {metric} {baseline.spread.mean:.3f}, "
            f"and the best trained method, {best.label}, {values}, because {_behind(evaluation, best)}."
        )
    gap = baseline.spread.mean - best.spread.mean
    return (
        f"{capital(best.label)} wins {where}: its {metric} of {values} is {gap:.3f} below that of the best "
        f"simple baseline, {baseline.label} ({baseline.spread.mean:.3f}), because {_ahead(evaluation, best)}."
    )


def _ahead(evaluation: Evaluation, best: Standing) -> str:
    before = evaluation.spread(best.method, 0, evaluation.error)
    if best.steps == 0 or not before.defined or level(before, best.spread):
        return "what it has learnt of the features holds for new tasks too, whose own rows add little to it"
    steps = (
        "one step on a task’s own rows takes"
        if best.steps == 1
        else f"{best.steps} steps on a task’s own rows take"
    )
    return f"{steps} it there from {before.mean:.3f}"


def _behind(evaluation: Evaluation, best: Standing) -> str:
    tasks = f"{evaluation.data.warm_tasks:,} tasks"
    before = evaluation.spread(best.method, 0, evaluation.error)
    if best.steps and before.defined and not level(before, best.spread):
        return f"its steps, from {before.mean:.3f}, end above what damped means say after {tasks} of training"
    return f"its steps on a task’s own rows don’t help, and {tasks} have taught it less than damped means say"


def adaptation(evaluation: Evaluation) -> str:
    """Say how the first step changes the error of the first method that adapts; empty if no method does."""
    metric = evaluation.error
    for name, method in evaluation.methods.items():
        steps = [n for n in sorted(method.results) if evaluation.spread(name, n, metric).defined]
        if len(steps) > 1 and steps[0] == 0:
            before, now = (evaluation.spread(name, n, metric) for n in steps[:2])
            where = f"{method.label}’s {METRICS[metric].label} on {evaluation.data.split} tasks"
            return f"{capital(after(steps[1]))}, {where} {change(before, now)}."
    return ""


def lowest_error(evaluation: Evaluation) -> str:
    """Say which method has the lowest error, and whether the second-best is clearly behind it."""
    order = standings(evaluation, evaluation.error)
    if len(order) < 2:
        return ""
    first, second, *others = order
    metric = METRICS[evaluation.error].label
    sentence = f"{capital(first.label)} reaches the lowest {metric}, {first.spread.mean:.3f}{first.where}"
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
    """Say which method ranks a task's items best, by AUC, GAUC and nDCG@3."""
    parts = []
    for metric in ("auc", "gauc", "ndcg@3"):
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
    """Warn that one seed is no evidence of a small difference; empty if there are several seeds."""
    if len(evaluation.seeds) > 1:
        return ""
    return "This is one seed: the spread between seeds is unknown, and small differences prove nothing."


def capital(text: str) -> str:
    """Capitalise the first letter of the text, and leave the rest as it is."""
    return text[:1].upper() + text[1:]

"""The report's sentences, computed from the numbers of an evaluation.

The first one is a verdict by the paired bootstrap over tasks (`gmeta.experiment.report.first_sentence`). In
the others, two means count as different as `gmeta.experiment.report.standing` says.
"""

from __future__ import annotations

from gmeta.experiment.report.first_sentence import reason, verdict
from gmeta.experiment.report.passages import passage_sentences
from gmeta.experiment.report.standing import after, capital, change, level, standings
from gmeta.experiment.results.evaluation import Evaluation
from gmeta.experiment.results.metrics import METRICS


def headline(evaluation: Evaluation) -> list[str]:
    """Write the report's opening: the verdict and why, the effect of adaptation, the best by each measure."""
    parts = (verdict, reason, adaptation, lowest_error, ranking)
    sentences = [*(part(evaluation) for part in parts), *passage_sentences(evaluation), caution(evaluation)]
    return [sentence for sentence in sentences if sentence]


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
    runner_up = f"{second.label} ({second.spread.mean:.3f}{second.where})"
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
